"""Gears with less room than what is live: said beforehand, nothing hangs, every token is right."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flexslurm.cli.ask import ask
from flexslurm.messages import CordonAsk, DrainAsk, ShiftAnswer, ShiftAsk
from tests.service_harness import SLOWLY, Ask, check, finish, oracle, tiny_service, tiny_site
from tests.shift_ground import Ground, ground, layout, serves

pytestmark = [pytest.mark.shared_service, pytest.mark.timeout(300)]
WIDE, NARROW = layout(1, 1), layout(1)
WANTED = 60
WAIT_S = 30.0


@pytest.fixture(scope="module")
def asks_and_tokens(tiny_model: Path) -> tuple[list[Ask], list[list[int]]]:
    asks = made()
    return asks, oracle(tiny_model, asks)


def made() -> list[Ask]:
    """Six lines, each at most 120 tokens long."""
    return [Ask([(7 * n + 13 * j) % 200 + 1 for j in range(20 + 8 * n)], WANTED) for n in range(6)]


@pytest.fixture(scope="module")
def tight(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_model: Path,
    asks_and_tokens: tuple[list[Ask], list[list[int]]],
) -> Iterator[Ground]:
    """Two pilots of one GPU, on which alone there is room for some 190 tokens of KV."""
    home = tmp_path_factory.mktemp("capacity")
    serving = {"memory_fraction": 1.0, "wait_for_gpus": f"{WAIT_S:g}s", "lost_after": "6s"}
    settings = tiny_service(tiny_model, [("a100", 1, 2)], **serving)
    site = tiny_site(SLOWLY, a100="2000kB")
    with ground(home, tiny_model, settings, site, asks_and_tokens[1], WANTED) as tight:
        yield tight


def begin(field: Ground) -> tuple[list[Ask], list[object]]:
    asks = made()
    threads = field.service.start(asks)
    deadline = time.monotonic() + 60
    while not all(len(one.tokens) >= 2 for one in asks):
        assert time.monotonic() < deadline and not any(one.error for one in asks), asks
        time.sleep(0.01)
    return asks, threads  # type: ignore[return-value]


@pytest.mark.slow
def test_what_has_no_room_is_named_beforehand_and_recomputed(tight: Ground) -> None:
    tight.shift_to(WIDE)
    asks, threads = begin(tight)
    answer = ask(tight.service.directory, ShiftAsk(to=NARROW, dry_run=True), 30.0)
    assert isinstance(answer, ShiftAnswer)
    [counts] = [line for line in answer.lines if line.startswith("sequences:")]
    [named] = [line for line in answer.lines if "wait for room, the newest first: " in line]
    line = tight.shift_to(NARROW)
    assert any(one.finish is None for one in asks), "the streams were too short"
    finish(threads, 120)  # type: ignore[arg-type]
    check(asks, tight.expected)
    said = len(named.split("first: ")[1].split(", "))
    assert f"{said} are evicted" in counts and said >= 2, answer.lines
    assert line["outcome"] == "committed" and float(line["sequences_evicted"]) > 0, line
    tight.check_clean()


@pytest.mark.slow
def test_what_outgrows_the_gear_waits_as_long_as_is_said(tight: Ground) -> None:
    """Longer than the narrow gear holds: it gets what there is room for, and ends as full."""
    tight.shift_to(WIDE)
    long = Ask(list(range(1, 101)), 200)
    threads = tight.service.start([long])
    while len(long.tokens) < 2:
        assert not long.error
        time.sleep(0.01)
    tight.shift_to(NARROW)
    limit = tight.service.status().gear
    assert limit is not None
    most = limit.replicas[0].max_context
    assert most < 300
    late = Ask([j % 200 + 1 for j in range(most - 1)], 50)
    tight.service.run([late], 30)
    assert "context" in late.error and f"{most}" in late.error, late.error
    finish(threads, 60)
    assert long.error == "" and long.finish == "length", long
    assert len(long.prompt) + len(long.tokens) == most
    tight.check_clean()


@pytest.mark.slow
def test_what_outgrew_the_gear_goes_on_in_a_larger_one(tight: Ground, tiny_model: Path) -> None:
    tight.shift_to(WIDE)
    long = Ask(list(range(1, 101)), 200)
    threads = tight.service.start([long])
    while len(long.tokens) < 2:
        assert not long.error
        time.sleep(0.01)
    tight.shift_to(NARROW)
    tight.service.until(lambda s: s.waiting == 1 and s.running == 0)
    tight.shift_to(WIDE)
    finish(threads, 60)
    check([long], oracle(tiny_model, [long]))
    tight.check_clean()


@pytest.mark.slow
def test_a_drained_fragment_leaves_with_its_streams_moved(tight: Ground) -> None:
    tight.shift_to(WIDE)
    asks, threads = begin(tight)
    leaving = tight.used()[0].fragment
    ask(tight.service.directory, DrainAsk(fragment=leaving), 30.0)
    finish(threads, 120)  # type: ignore[arg-type]
    check(asks, tight.expected)
    tight.service.until(lambda s: not list(tight.service.processes(f"--fragment {leaving}")))
    tight.service.until(lambda s: serves(s, NARROW))
    ask(tight.service.directory, CordonAsk(fragment=leaving, cordon=False), 30.0)
    tight.mend(2)
    tight.shift_to(WIDE)
    tight.check_clean()


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    ["kill={pid}", *(pytest.param(one, marks=pytest.mark.long) for one in ("stop={pid}", "exit"))],
)
def test_a_loss_while_serving_stops_for_want_of_memory(tight: Ground, fault: str) -> None:
    """Both gears do not fit beside each other: what is parked is lost with its worker, or not."""
    phases = ["shift.park", "shift.install", "shift.cutover", "shift.commit"]
    points = ["transfer.park", "install.weights", "cutover.pull"] if fault == "exit" else phases
    for number, point in enumerate(points):
        tight.restore(2, WIDE)
        asks, threads = begin(tight)
        pids = [seat.gpu.pid for seat in tight.used()]
        if fault == "exit":  # whichever of them comes there, but not what is started instead
            tight.arm(*(f"{point}@{pid}:1:exit" for pid in pids))
        else:
            tight.arm(f"{point}:1:{fault.format(pid=pids[number % 2])}")
        tight.ask_for(NARROW)
        tight.wait_struck(asks)
        finish(threads, 120)  # type: ignore[arg-type]
        check(asks, tight.expected)
    tight.restore(2, WIDE)


@pytest.mark.slow
@pytest.mark.long
def test_parking_on_a_full_disk_or_with_broken_blocks_costs_a_recompute(tight: Ground) -> None:
    for text in ("transfer.park:1+:full", "transfer.park:2:raise", "cutover.pull:1+:raise"):
        tight.restore(2, WIDE)
        asks, threads = begin(tight)
        tight.arm(text, "step:1+:slow")  # so that the streams are there still
        line = tight.shift_to(NARROW)
        assert text in tight.struck(), text
        tight.disarm()
        finish(threads, 120)  # type: ignore[arg-type]
        check(asks, tight.expected)
        assert line["outcome"] == "committed" and float(line["sequences_recomputed"]) > 0, line
    tight.restore(2, WIDE)
