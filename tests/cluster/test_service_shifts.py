"""A whole service that changes gears under load: no stream is disturbed, and no token is wrong."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from flexslurm.cli.ask import ask
from flexslurm.errors import ServiceError
from flexslurm.head.light_checkpoint import LightCheckpoint
from flexslurm.messages import ShiftAnswer, ShiftAsk
from tests.service_harness import (
    MOST_TOKENS,
    SLOWLY,
    Ask,
    Oracle,
    RunningService,
    finish,
    running,
    tiny_service,
    tiny_site,
)

pytestmark = [pytest.mark.shared_service, pytest.mark.timeout(180)]
POOL = [("a100", 4, 1)]
LONG = 120


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[RunningService]:
    """Four virtual GPUs on one node, each with room for several gears."""
    home = tmp_path_factory.mktemp("shifts")
    settings = tiny_service(tiny_model, POOL, lost_after="10s")  # nobody is silent here
    settings["executor"] = {"checkpoint_dir": str(home / "kept")}
    with running(home, settings, tiny_site(SLOWLY)) as service:
        yield service


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> Oracle:
    return Oracle(tiny_model)


def layout(*stages: int | tuple[int, int]) -> str:
    """Stages of even depth by their TP degrees; or (tp, layers) each."""
    depths = [s[1] if isinstance(s, tuple) else 6 // len(stages) for s in stages]
    tps = [s[0] if isinstance(s, tuple) else s for s in stages]
    ends = [sum(depths[:n]) for n in range(len(depths) + 1)]
    parts = [f"a100 tp{tp} [{ends[n]},{ends[n + 1]})" for n, tp in enumerate(tps)]
    return " → ".join(parts)


def shift_to(service: RunningService, gear: str) -> dict[str, float | str]:
    """Go into a gear; the history's line of it."""
    answer = ask(service.directory, ShiftAsk(to=gear), 30.0)
    assert isinstance(answer, ShiftAnswer)
    status = service.until(
        lambda s: s.state == "serving" and s.gear is not None and s.gear.layout() == answer.to
    )
    return status.shifts[-1]


def check(asks: list[Ask], expected: Oracle) -> None:
    assert [ask.error for ask in asks] == [""] * len(asks)
    assert [ask.tokens for ask in asks] == expected(asks)
    assert [ask.finish for ask in asks] == ["length"] * len(asks)


WALKS = {
    "pipelines": [layout(1), layout(1, 1), layout(1, 1, 1), layout(1)],
    "tensor parallel": [layout(1), layout(2), layout(3), layout(1)],
    "both": [layout(1, 1), layout(2), layout(1, 1, 1), layout((2, 2), (1, 4))],
    "uneven": [layout((1, 1), (1, 5)), layout((1, 4), (2, 2)), layout((2, 5), (1, 1))],
    "replicas": [layout(1), f"2x({layout(1)})", layout(1), f"{layout(2)} + {layout(1)}"],
}


@pytest.mark.parametrize("walk", WALKS)
def test_a_walk_over_gears_under_load(service: RunningService, expected: Oracle, walk: str) -> None:
    """Nothing is computed anew. Where a busy machine lets streams end before the walk does, or
    falls so far behind them that it is, the walk is done again with longer ones.
    """
    for tokens in (LONG, MOST_TOKENS, MOST_TOKENS):
        shift_to(service, WALKS[walk][0])
        asks, threads = service.under_way(4, tokens)
        lines = [shift_to(service, gear) for gear in WALKS[walk][1:]]
        lived = all(ask.finish is None for ask in asks)
        finish(threads, 120)
        check(asks, expected)
        if lived and not any(line["sequences_recomputed"] for line in lines):
            break
    assert lived, "the streams were too short"
    for line in lines:
        assert line["outcome"] == "committed" and line["mode"] == "beside", line
        assert line["sequences_recomputed"] == 0, line
        stages = str(line["from"]).count("[")
        assert 0 <= float(line["pause_steps"]) <= stages, line
    touched = [line for line in lines if line["sequences_moved"]]
    assert touched or walk == "replicas"
    service.until(lambda s: s.running == 0 and s.kv_used == 0.0)


def test_a_replica_more_disturbs_nobody(service: RunningService, expected: Oracle) -> None:
    shift_to(service, layout(1))
    asks, threads = service.under_way(4, LONG)
    more = shift_to(service, f"2x({layout(1)})")
    assert more["sequences_moved"] == 0 and more["sequences_recomputed"] == 0
    assert more["pause_s"] == 0
    finish(threads, 120)
    check(asks, expected)


def test_what_lives_where_is_written_down(service: RunningService) -> None:
    shift_to(service, layout(1))
    line = shift_to(service, layout(2, 1))
    kept = service.directory.path.parent / "kept" / "tiny"
    path = kept / f"shift-{line['epoch']:.0f}.json"
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, sorted(kept.iterdir())
        time.sleep(0.02)
    noted = msgspec.json.decode(path.read_bytes(), type=LightCheckpoint)
    assert noted.layout == line["to"]
    [one] = noted.replicas
    assert [(s.lo, s.hi, s.tp_rank) for s in one.stages] == [(0, 3, 0), (0, 3, 1), (3, 6, 0)]


def test_a_dry_run_says_what_would_move_and_moves_nothing(service: RunningService) -> None:
    shift_to(service, layout(1))
    before = service.status()
    answer = ask(service.directory, ShiftAsk(to=layout(2, 1), dry_run=True), 30.0)
    assert isinstance(answer, ShiftAnswer) and answer.epoch == 0
    said = "\n".join(answer.lines)
    assert "weights:" in said and "memory: both gears fit" in said and "pause" in said
    time.sleep(0.3)
    assert service.status().epoch == before.epoch


@pytest.mark.parametrize(
    ("gear", "said"),
    [
        ("h100:4", "did you mean 'a100'?"),
        ("nonsense", "give one of a100:4, or a layout"),
        ("a100 tp9 [0,6)", "tp9"),
        ("a100 tp1 [0,4)", "ends at layer 4 of 6"),
        ("b200 tp1 [0,6)", "there are a100"),
        ("5x(a100 tp1 [0,6))", "no node has 1 free a100"),
    ],
)
def test_a_wrong_gear_is_answered_with_the_legal_ones(
    service: RunningService, gear: str, said: str
) -> None:
    with pytest.raises(ServiceError) as caught:
        ask(service.directory, ShiftAsk(to=gear), 30.0)
    assert said in str(caught.value)


def test_best_gives_the_choice_back(service: RunningService) -> None:
    shift_to(service, layout(1, 1))
    assert "asked for by" in service.status().reason
    ask(service.directory, ShiftAsk(to="best"), 30.0)
    service.until(lambda s: s.state == "serving" and "asked for" not in s.reason)
