"""What shifts took corrects what is expected of the next; pulls are timed where they arrive."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexslurm.engine.memory_plan import Verdict
from flexslurm.engine.shift_plan import ShiftFacts, ShiftPlan, plan_shift
from flexslurm.head.lessons import Lessons, Part
from flexslurm.head.pulls import Pulls
from flexslurm.messages import KvPulled
from tests.reshard_cases import LAYERS, at, replica, shard_map


def plan(arena: int = 1 << 30) -> ShiftPlan:
    old = (at(1, 0, replica((1, 0, LAYERS)), ["a/0"]),)
    new = (at(2, 0, replica((2, 0, LAYERS)), ["a/0", "a/1"]),)
    arenas = dict.fromkeys(["a/0", "a/1"], arena)
    return plan_shift(
        shard_map(), ShiftFacts(old=old, new=new, kept={}, live=(), arenas=arenas, step_s=0.02)
    )


def test_what_was_measured_is_expected_next_time() -> None:
    lessons, nominal = Lessons(), plan()
    assert lessons.corrected(nominal) == nominal, "nothing is known yet"
    for _ in range(2):
        lessons.learn(nominal, 50 * nominal.transfer_s, 0.5 * nominal.pause_s)
    found = lessons.corrected(nominal)
    if nominal.transfer_s >= 1e-4:
        assert found.transfer_s == pytest.approx(50 * nominal.transfer_s)
    assert found.pause_s == pytest.approx(0.5 * nominal.pause_s)


def test_kinds_of_shifts_are_held_apart() -> None:
    lessons, beside, stop = Lessons(), plan(), plan(arena=1000)
    assert (beside.memory.verdict, stop.memory.verdict) == (Verdict.BESIDE, Verdict.STOP)
    lessons.learn(stop, stop.transfer_s, 9 * stop.pause_s)
    assert lessons.corrected(beside).pause_s == beside.pause_s
    assert lessons.corrected(stop).pause_s == pytest.approx(9 * stop.pause_s)


def test_one_bad_shift_does_not_outweigh_all_before() -> None:
    lessons, nominal = Lessons(), plan()
    for took in (1.0, 1.0, 1.0, 16.0):
        lessons.learn(nominal, 0.0, took * nominal.pause_s)
    assert lessons.factor(Verdict.BESIDE, Part.PAUSE) == pytest.approx(4.0)
    assert lessons.factor(Verdict.BESIDE, Part.TRANSFER) == 1.0, "nothing was moved"


@given(st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=30))
def test_factors_stay_between_what_was_seen(found: list[float]) -> None:
    lessons, nominal = Lessons(), plan()
    for ratio in found:
        lessons.learn(nominal, 1.0, ratio * nominal.pause_s)
    factor = lessons.factor(Verdict.BESIDE, Part.PAUSE)
    least, most = min(max(min(found), 1e-3), 1e3), max(min(max(found), 1e3), 1e-3)
    assert least * (1 - 1e-9) <= factor <= most * (1 + 1e-9)


def answer(worker: str, seconds: float, nbytes: int = 10) -> KvPulled:
    return KvPulled(worker=worker, epoch=2, ticket=1, moved_bytes=nbytes, seconds=seconds)


def test_pulls_side_by_side_count_once() -> None:
    pulls = Pulls()
    assert pulls.longest_s == 0.0
    for now, seconds in ((10.0, 2.0), (11.0, 2.0), (10.5, 0.5), (20.0, 1.0)):
        pulls.add(now, answer("w-1", seconds))
    assert pulls.longest_s == pytest.approx(3.0 + 1.0)
    pulls.add(30.0, answer("w-2", 9.0))
    assert pulls.longest_s == pytest.approx(9.0)
    assert pulls.moved_bytes == 50
