"""Random schedules of shifts, faults, requests and cancels on real processes, by their seeds."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from flexslurm.errors import ServiceError
from tests.service_harness import Ask, finish, oracle, some_asks, tiny_service, tiny_site
from tests.shift_ground import Ground, ground, layout, leave_after

pytestmark = [pytest.mark.shared_service]
LONG = 90
ASKS = 6
PHASES = ("shift.prepare", "shift.install", "shift.transfer", "shift.cutover", "shift.commit",
          "shift.close")  # fmt: skip
GEARS = (
    layout(2), layout(1, 1), layout(2, 2), layout((2, 4), (1, 2)), f"2x({layout(2)})",
    layout(1, 1, 1), f"{layout(1, 1)} + {layout(2)}", layout((1, 1), (2, 5)),
)  # fmt: skip
ANYWHERE = (
    "transfer.chunk:1+:raise", "transfer.chunk:2:raise", "transfer.corrupt:1:spoil",
    "transfer.chunk:1+:slow", "transfer.connect:1:raise", "install.groups:1:raise",
    "install.weights:1:raise", "install.weights:1:exit", "cutover.pull:1:raise",
    "cutover.pull:1:exit", "step:4:raise", "step:4:exit", "retire:1:exit",
)  # fmt: skip


@pytest.fixture(scope="module")
def field(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Ground]:
    """Two nodes of two virtual GPUs."""
    settings = tiny_service(tiny_model, [("a100", 2, 2)], install_timeout="5s")
    expected = oracle(tiny_model, some_asks(ASKS, LONG))
    home = tmp_path_factory.mktemp("schedules")
    with ground(home, tiny_model, settings, tiny_site(), expected, LONG) as field:
        field.shift_to(layout(2, 2))
        yield field


def a_fault(rng: random.Random, field: Ground) -> str:
    """Something at any point, or something that is done to a process in any phase."""
    if rng.random() < 0.4:
        return rng.choice(ANYWHERE)
    deed = rng.choice(("kill", "kill", "stop"))
    seats = rng.choice((field.used, field.idle))() or field.used()
    seat = rng.choice(seats)
    pid = seat.gpu.pid
    if not pid or (deed == "kill" and rng.random() < 0.25):
        deed, pid = "kill", field.agent(seat.fragment)
    return f"{rng.choice(PHASES)}:1:{deed}={pid}"


def run_schedule(field: Ground, seed: int) -> None:
    rng = random.Random(seed)
    field.restore(2, rng.choice(GEARS))
    asks = some_asks(ASKS, LONG)
    leaving = {n: rng.randint(1, 60) for n in range(ASKS) if rng.random() < 0.25}
    first = rng.randint(1, ASKS - 1)
    told = f"seed {seed}: leaving {leaving}, {first} first"

    def start(numbers: range) -> list[threading.Thread]:
        field_asks = [asks[n] for n in numbers if n not in leaving]
        made = field.service.start(field_asks)
        for n in numbers:
            if n in leaving:
                args = (field.service.endpoint, asks[n], leaving[n])
                made.append(threading.Thread(target=leave_after, args=args, daemon=True))
                made[-1].start()
        return made

    threads = start(range(first))
    for _ in range(rng.randint(1, 2)):
        fault, gear = a_fault(rng, field), rng.choice(GEARS)
        told += f"; {fault} on the way to {gear}"
        field.arm(fault)
        with contextlib.suppress(ServiceError):  # what is here just now may not hold it
            field.ask_for(gear)
        field.service.until(lambda s: s.state == "serving")
    threads += start(range(first, ASKS))
    try:
        finish(threads, 90)
        _check(asks, field.expected, set(leaving))
        field.restore(2, rng.choice(GEARS))
    except AssertionError as error:
        error.add_note(told)
        raise


def _check(asks: list[Ask], expected: list[list[int]], leaving: set[int]) -> None:
    for n, (one, tokens) in enumerate(zip(asks, expected, strict=True)):
        if n in leaving:
            assert one.tokens == tokens[: len(one.tokens)], n
            continue
        assert (one.error, one.finish, one.tokens) == ("", "length", tokens), n


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("part", range(2))
def test_random_schedules(field: Ground, part: int) -> None:
    for seed in range(5 * part, 5 * part + 5):
        run_schedule(field, seed)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_hundred_random_schedules(field: Ground, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in range(100, 200):
        with capsys.disabled():
            print(f"seed {seed}", flush=True)
        run_schedule(field, seed)
