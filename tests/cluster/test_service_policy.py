"""Decisions of a whole service: an operator's gear and the choice given back, cordoned pilots."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

import pytest

from flexslurm.cli import launch as launching
from flexslurm.cli import submitting
from flexslurm.cli.ask import ask
from flexslurm.cli.show import render_status
from flexslurm.messages import CordonAsk, DrainAsk, ShiftAsk, StatusAnswer
from tests.service_harness import (
    SLOWLY,
    Ask,
    Load,
    Oracle,
    RunningService,
    check,
    gear_of,
    running,
    serves,
    some_asks,
    tiny_service,
    tiny_site,
)

pytestmark = [pytest.mark.slow, pytest.mark.shared_service, pytest.mark.timeout(300)]

WINDOW_S = 3.0
SLOW = "a100 tp1 [0,6)"
STREAMS, PLACES = 12, 4
"""Of streams under way at once, and of the slow gear."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[RunningService]:
    """Three virtual GPUs that compute slowly, so that a few streams are a load."""
    home = tmp_path_factory.mktemp("policy")
    settings = tiny_service(tiny_model, [("a100", 3, 1)], max_batch=PLACES, lost_after="10s")
    settings["profiling"] = {"interval_sec": 0.1, "window_minutes": WINDOW_S / 60}
    settings["decisions"] = {"min_action_gap_sec": 1, "migration_benefit_ratio": 1.3}
    with running(home, settings, tiny_site(2 * SLOWLY)) as service:
        yield service


def streams() -> Iterator[Ask]:
    """Answers of different lengths, so that those that run together do not end together."""
    for _ in count():
        for number, one in enumerate(some_asks(STREAMS, 0)):
            yield Ask(one.prompt, 100 + 16 * (5 * number % STREAMS), one.sampling)


def in_the_middle(asks: Sequence[Ask]) -> bool:
    """Whether the slow gear is full of streams of which none has just begun or is about to end."""
    open_still = [ask for ask in asks if ask.finish is None and ask.tokens]
    going = [ask for ask in open_still if 4 <= len(ask.tokens) <= ask.max_tokens - 40]
    return len(open_still) == len(going) == PLACES


def test_the_choice_given_back_shifts_at_once_and_no_stream_notices(
    service: RunningService, tiny_model: Path
) -> None:
    best = service.until(serves("a100:3")).gear
    assert best is not None and best.layout() != SLOW
    ask(service.directory, ShiftAsk(to=SLOW), 30.0)
    service.until(lambda s: gear_of(s) == SLOW and s.state == "serving")

    with Load(service, streams(), STREAMS) as load:
        service.until(lambda s: len(s.measured.get("windows", ())) == 2)
        assert gear_of(service.status()) == SLOW, "an operator's gear stays, whatever the load"
        service.until(lambda s: in_the_middle(list(load.begun)))
        ask(service.directory, ShiftAsk(to="best"), 30.0)
        status = service.until(lambda s: gear_of(s) == best.layout() and s.state == "serving")
        last = status.shifts[-1]
    check(load.begun, Oracle(tiny_model)(load.begun))

    assert "the choice was given back" in str(last["why"]), last
    assert last["outcome"] == "committed", last
    assert float(last["sequences_recomputed"]) <= 1, last  # one that begins right before the pause
    assert "shift" in [decision["verdict"] for decision in status.decisions]
    assert f"shift: {last['why']}" in render_status(status)
    figures = service.status().figures
    assert figures["requests_succeeded"] == 1.0
    assert 0.0 < float(figures["time_shifting"] or 0) < 1.0
    kept = figures["throughput_kept_during"]  # none where the load itself changed meanwhile
    assert kept is None or float(kept) >= 0.0

    def counted(status: StatusAnswer) -> bool:
        lines = [x for x in metrics(service).splitlines() if x.startswith("flexslurm_shifts_total")]
        return sum(float(x.rpartition(" ")[2]) for x in lines) == len(status.shifts)

    service.until(counted)  # the page is as of the last sample
    page = metrics(service)
    assert 'outcome="committed"} ' in page and "flexslurm_shift_duration_seconds_count" in page
    for name in ("requests_succeeded", "time_shifting"):
        assert f"flexslurm_{name}_ratio{{" in page, name


def metrics(service: RunningService) -> str:
    with urllib.request.urlopen(f"{service.endpoint}/metrics", timeout=60) as answer:
        return str(answer.read().decode())


def test_cordon_and_drain_outlive_the_head(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path
) -> None:
    """One pilot of three is cordoned, one drained; the head is killed and launched again."""
    home = tmp_path_factory.mktemp("cordons")
    with running(
        home, tiny_service(tiny_model, [("a100", 1, 3)], lost_after="10s"), tiny_site()
    ) as service:
        service.until(lambda s: s.state == "serving" and used(s) == {"a100-1", "a100-2", "a100-3"})
        ask(service.directory, CordonAsk(fragment="a100-2"), 30.0)
        ask(service.directory, DrainAsk(fragment="a100-3"), 30.0)
        service.until(lambda s: used(s) == {"a100-1"} and s.state == "serving")
        here = {"serving", "ready", "cordoned", "leaving"}
        gone = service.until(lambda s: states(s).get("a100-3") not in here)
        assert states(gone)["a100-2"] == "cordoned"
        before = gone.head
        service.kill("flexslurm.head.main")
        said: list[str] = []
        submitting.execute(service.plan, said.append)
        launching.wait_until_serving(service.plan, said.append, 90)
        again = service.until(lambda s: s.head != before and states(s).get("a100-2") == "cordoned")
        assert used(again) == {"a100-1"}
        deadline = time.monotonic() + 3  # as long as a pilot that may be used takes to be
        while time.monotonic() < deadline:
            assert used(service.status()) == {"a100-1"}
            time.sleep(0.1)
        ask(service.directory, CordonAsk(fragment="a100-2", cordon=False), 30.0)
        service.until(lambda s: used(s) == {"a100-1", "a100-2"} and s.state == "serving")


def used(status: StatusAnswer) -> set[str]:
    return {f.name for f in status.fragments if any(gpu.slot for gpu in f.gpus)}


def states(status: StatusAnswer) -> dict[str, str]:
    return {f.name: f.state for f in status.fragments}
