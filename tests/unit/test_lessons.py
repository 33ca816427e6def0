"""What shifts took corrects what is expected of the next; pulls are timed where they arrive."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexslurm.engine.memory_plan import MemoryVerdict
from flexslurm.engine.reshard import LinkKind
from flexslurm.engine.routing import LiveKv
from flexslurm.engine.shift_plan import LinkRates, ShiftFacts, ShiftPlan, plan_shift
from flexslurm.head.lessons import LessonPart, Lessons
from flexslurm.head.move_plan import in_parts, rate_beside
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
        lessons.learn(nominal, nominal.transfer_s + 0.3, nominal.pause_s / 2)
    found = lessons.corrected(nominal)
    assert found.transfer_s == pytest.approx(nominal.transfer_s + 0.3)
    assert found.pause_s == pytest.approx(nominal.pause_s / 2)
    assert msgspec.structs.replace(nominal, transfer_s=0, pause_s=0) == msgspec.structs.replace(
        found, transfer_s=0, pause_s=0
    )


def test_kinds_of_shifts_are_held_apart() -> None:
    lessons, beside, stop = Lessons(), plan(), plan(arena=1000)
    assert (beside.memory.verdict, stop.memory.verdict) == (
        MemoryVerdict.BESIDE,
        MemoryVerdict.STOP,
    )
    lessons.learn(stop, stop.transfer_s, stop.pause_s + 9.0)
    assert lessons.corrected(beside).pause_s == beside.pause_s
    assert lessons.corrected(stop).pause_s == pytest.approx(stop.pause_s + 9.0)


def test_one_bad_shift_changes_little_and_old_ones_are_forgotten() -> None:
    lessons, nominal = Lessons(), plan()
    for more in (0.1, 0.1, 60.0, 0.1, 0.1):
        lessons.learn(nominal, nominal.transfer_s, nominal.pause_s + more)
    assert lessons.more_s(MemoryVerdict.BESIDE, LessonPart.PAUSE) == pytest.approx(0.1)
    for _ in range(5):
        lessons.learn(nominal, nominal.transfer_s, nominal.pause_s + 2.0)
    assert lessons.more_s(MemoryVerdict.BESIDE, LessonPart.PAUSE) == pytest.approx(2.0)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30), st.floats(0, 1e6))
def test_no_time_is_expected_to_be_negative(found: list[float], before: float) -> None:
    lessons, nominal = Lessons(), plan()
    for seconds in found:
        lessons.learn(nominal, seconds, seconds)
    asked = msgspec.structs.replace(nominal, transfer_s=before, pause_s=before)
    corrected = lessons.corrected(asked)
    assert corrected.transfer_s >= 0.0 and corrected.pause_s >= 0.0


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


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 50)), max_size=60), st.integers(1, 20))
def test_parts_have_the_blocks_of_the_sequences(found: list[tuple[int, int]], most: int) -> None:
    live = [LiveKv(f"s{n}", r, b, 4 * b, n, 4 * b + 8) for n, (r, b) in enumerate(found)]
    parts = in_parts(live, most)
    for number in range(4):
        before = [one for one in live if one.replica == number]
        after = [one for one in parts if one.replica == number]
        assert sum(one.blocks for one in before) == sum(one.blocks for one in after)
        assert {one.seq_id for one in after} <= {one.seq_id for one in before}
    assert len(parts) <= most + 4
    assert in_parts(live, 60) == tuple(live), "few are looked at one by one"


def test_what_a_source_may_send_is_bound_by_the_slowest_link_in_use() -> None:
    rates = LinkRates(node=2e9, network=10e9)
    inside = plan()
    assert {flow.link for flow in inside.weights} >= {LinkKind.NODE}
    assert rate_beside(inside, rates) == pytest.approx(0.6 * 2e9)
    old = (at(1, 0, replica((1, 0, LAYERS)), ["a/0"]),)
    new = (at(2, 0, replica((1, 0, LAYERS)), ["b/0"]),)
    arenas = dict.fromkeys(["a/0", "b/0"], 1 << 30)
    facts = ShiftFacts(old=old, new=new, kept={}, live=(), arenas=arenas)
    across = plan_shift(shard_map(), facts)
    assert rate_beside(across, rates) == pytest.approx(0.6 * 10e9)
    limited = msgspec.structs.replace(rates, limit=50e6)
    assert rate_beside(across, limited) == rate_beside(inside, limited) == 50e6
