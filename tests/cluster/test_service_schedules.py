"""Random schedules of shifts, faults, requests and cancels on real processes, by their seeds."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from flexslurm.errors import FlexslurmError
from flexslurm.messages import StatusAnswer
from tests.service_harness import finish, oracle, some_asks, tiny_service, tiny_site
from tests.shift_ground import Ground, ground, layout, leave_after

pytestmark = [pytest.mark.shared_service]
LONG = 90
ASKS = 6
MOST_FAILURES = 3
PHASES = ("shift.prepare", "shift.install", "shift.transfer", "shift.cutover", "shift.commit",
          "shift.close")  # fmt: skip
ANYWHERE = (
    "transfer.chunk:1+:raise", "transfer.chunk:2:raise", "transfer.corrupt:1:spoil",
    "transfer.chunk:1+:slow", "transfer.connect:1:raise", "install.groups:1:raise",
    "install.weights:1:raise", "install.weights:1:exit", "cutover.pull:1:raise",
    "cutover.pull:1:exit", "step:4:raise", "step:4:exit", "retire:1:exit",
    "retire:1:raise", "checkpoint.write:1+:full",
)  # fmt: skip
PARKING = ("transfer.park:1+:full", "transfer.park:2:raise", "transfer.park:1:exit")


@dataclass(frozen=True)
class Course:
    """A service, what it may serve in, and what may happen there."""

    field: Ground
    gears: tuple[str, ...]
    phases: tuple[str, ...]
    anywhere: tuple[str, ...]


def course_of(
    home: Path, model: Path, gpus: int, memory: str, course: tuple[tuple[str, ...], ...], first: str
) -> Iterator[Course]:
    """Two nodes of so many virtual GPUs, with a directory for checkpoints."""
    serving = {"memory_fraction": 1.0} if gpus == 1 else {}
    settings = tiny_service(model, [("a100", gpus, 2)], install_timeout="5s", **serving)
    settings["executor"] = {"checkpoint_dir": str(home / "kept")}
    expected = oracle(model, some_asks(ASKS, LONG))
    (home / "kept").mkdir()
    with ground(home, model, settings, tiny_site(a100=memory), expected, LONG) as field:
        field.shift_to(first)
        field.check_clean()
        field.census.begin(field.service.status())
        yield Course(field, *course)


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Course]:
    """Two nodes of two GPUs, in which any two gears fit beside each other."""
    gears = (
        layout(2), layout(1, 1), layout(2, 2), layout((2, 4), (1, 2)), f"2x({layout(2)})",
        layout(1, 1, 1), f"{layout(1, 1)} + {layout(2)}", layout((1, 1), (2, 5)),
    )  # fmt: skip
    home = tmp_path_factory.mktemp("roomy")
    course = (gears, PHASES, ANYWHERE)
    yield from course_of(home, tiny_model, 2, "64MiB", course, layout(2, 2))


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Course]:
    """Two nodes of one GPU, on which two gears do not fit: KV is parked, sequences are evicted."""
    home = tmp_path_factory.mktemp("tight")
    gears, phases = (layout(1, 1), layout(1)), (*PHASES, "shift.park", "shift.park")
    course = (gears, phases, (*ANYWHERE, *PARKING, *PARKING))
    yield from course_of(home, tiny_model, 1, "2000kB", course, layout(1, 1))


class Schedule:
    """One, drawn from a seed."""

    def __init__(self, course: Course, seed: int) -> None:
        self.course, self.field, self.rng = course, course.field, random.Random(seed)
        self.asks = some_asks(ASKS, LONG)
        rng = self.rng
        self.leaving = {n: rng.randint(1, 60) for n in range(ASKS) if rng.random() < 0.25}
        self.headless: set[int] = set()
        """Streams that were under way when the head died: they end with it."""
        self.told = [f"seed {seed}: leaving {self.leaving}"]

    def run(self) -> None:
        rng, field = self.rng, self.field
        field.restore(2, rng.choice(self.course.gears))
        first = rng.randint(1, ASKS - 1)
        threads = self._start(range(first))
        for _ in range(rng.randint(1, 2)):
            self._disturb(range(first))
        threads += self._start(range(first, ASKS))
        finish(threads, 90)
        self._check()
        field.restore(2, rng.choice(self.course.gears))

    def _start(self, numbers: range) -> list[threading.Thread]:
        field, leaving = self.field, self.leaving
        made = field.service.start([self.asks[n] for n in numbers if n not in leaving])
        for n in numbers:
            if n in leaving:
                args = (field.service.endpoint, self.asks[n], leaving[n])
                made.append(threading.Thread(target=leave_after, args=args, daemon=True))
                made[-1].start()
        return made

    def _disturb(self, under_way: range) -> None:
        """A shift, and something in the middle of it."""
        field, rng = self.field, self.rng
        gear, dice = rng.choice(self.course.gears), rng.random()
        fault = f"{rng.choice(PHASES)}:1:exit" if dice < 0.06 else self._fault()
        self.told.append(f"{fault} on the way to {gear}")
        field.arm(fault)
        with contextlib.suppress(FlexslurmError):  # what is here just now may not hold it
            field.ask_for(gear)
        if dice < 0.06:
            self._lose_head(under_way)
        elif dice < 0.2:
            self._notice()
        live = sum(self.asks[n].finish is None for n in under_way)
        field.service.until(lambda status: self._serves_again(status, fault))
        struck = "struck" if field.struck() else "never came"
        self.told[-1] += f" ({struck}; {live} of {len(under_way)} streams under way)"

    def _fault(self) -> str:
        """Something at any point, or something that is done to a process in any phase."""
        field, rng = self.field, self.rng
        if rng.random() < 0.4:
            return rng.choice(self.course.anywhere)
        deed = rng.choice(("kill", "kill", "stop"))
        seats = rng.choice((field.used, field.idle))() or field.used() or field.seats()
        seat = rng.choice(seats)
        pid = seat.gpu.pid
        if not pid or (deed == "kill" and rng.random() < 0.25):
            deed, pid = "kill", field.agent(seat.fragment)
        return f"{rng.choice(self.course.phases)}:1:{deed}={pid}"

    def _lose_head(self, under_way: range) -> None:
        """It ends in the middle; or not, as what was asked for needs no such phase."""
        deadline = time.monotonic() + 3.0
        while not self.field.struck() and time.monotonic() < deadline:
            time.sleep(0.01)
        self.field.disarm()
        if self.field.struck():
            self.headless |= set(under_way)
            self.field.relaunch()

    def _notice(self) -> None:
        """A node must leave: in good time, or before its blocks can have gone."""
        field, rng = self.field, self.rng
        fragment = rng.choice([f.name for f in field.service.status().fragments])
        grace_s = rng.choice((0.1, 0.5, 3.0))
        self.told.append(f"{fragment} leaves in {grace_s} s")
        with contextlib.suppress(FlexslurmError):  # it has ended already
            job = field.service.job_of(fragment)
            field.service.submitter.preempt(job, grace_s=grace_s, away_s=0.5)

    def _serves_again(self, status: StatusAnswer, fault: str) -> bool:
        if fault.endswith(":exit") and self.field.struck():
            self.field.disarm()  # each process counts by itself, and each new one would end too
        self.field.submit_again()
        return status.state == "serving"

    def _check(self) -> None:
        for n, (one, tokens) in enumerate(zip(self.asks, self.field.expected, strict=True)):
            if n in self.leaving or (n in self.headless and one.finish is None):
                assert one.tokens == tokens[: len(one.tokens)], n
            else:
                assert (one.error, one.finish, one.tokens) == ("", "length", tokens), n


def run_schedules(course: Course, seeds: range, capsys: pytest.CaptureFixture[str]) -> None:
    """All of them: one that fails does not keep the others from being run."""
    failures: list[Exception] = []
    for seed in seeds:
        schedule, began, outcome = Schedule(course, seed), time.monotonic(), "passed"
        try:
            schedule.run()
        except (AssertionError, FlexslurmError, OSError, psutil.Error) as error:
            error.add_note("; ".join(schedule.told))
            failures.append(error)
            outcome = f"FAILED: {error!r}"[:2000]
        with capsys.disabled():
            told = "; ".join(schedule.told)
            print(f"\n{time.monotonic() - began:.1f} s: {told}: {outcome}", flush=True)
        if len(failures) >= MOST_FAILURES:
            break
    if failures:
        raise ExceptionGroup("schedules", failures)


Capture = pytest.CaptureFixture[str]


@pytest.mark.slow
@pytest.mark.timeout(480)
@pytest.mark.parametrize("part", range(2))
def test_random_schedules(roomy: Course, part: int, capsys: Capture) -> None:
    """The first of the hundred below."""
    run_schedules(roomy, range(100 + 5 * part, 105 + 5 * part), capsys)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("part", range(7))
def test_a_hundred_random_schedules(roomy: Course, part: int, capsys: Capture) -> None:
    """Seeds 100 to 169; the others are where there is little room."""
    run_schedules(roomy, range(100 + 10 * part, 110 + 10 * part), capsys)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("part", range(3))
def test_a_hundred_random_schedules_where_gears_do_not_fit(
    tight: Course, part: int, capsys: Capture
) -> None:
    """Seeds 170 to 199."""
    run_schedules(tight, range(170 + 10 * part, 180 + 10 * part), capsys)
