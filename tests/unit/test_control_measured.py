"""Load through the whole controller: samples in, decisions out."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexslurm.control.events import Heard, ShiftWanted
from flexslurm.messages import AgentBye
from tests.unit.control_world import World
from tests.unit.measured_world import (
    BOTH,
    FAST,
    POLICY,
    SAFE,
    SLOW,
    WINDOW,
    Table,
    gear,
    in_slow_gear,
    installed,
)


def test_growing_load_shifts_after_two_windows_and_not_before() -> None:
    world = in_slow_gear()
    world.measure(1200, 30.0, busy=0.3, full=0.1)
    assert installed(world) == "slow"
    assert "fast is estimated at 1.00 times slow" in world.control.reason
    assert "measured over 5 min: 30 tokens/s (P95 30)" in world.control.reason
    world.measure(400, 99.0, waiting=6)
    assert installed(world) == "slow", "one window of load is not enough"
    assert "window before says otherwise" in world.control.reason
    world.measure(500, 99.0, waiting=6)
    assert installed(world) == "fast"
    last = world.control.history[-1]
    assert "fast is estimated at 2.0" in last.why
    assert "saturated, 0.99 times the estimate" in last.why


def test_load_from_the_start_needs_two_windows_too() -> None:
    world = in_slow_gear()
    world.measure(590, 99.0, waiting=6)
    assert installed(world) == "slow"
    world.measure(60, 99.0, waiting=6)
    assert installed(world) == "fast"


@pytest.mark.parametrize("calm", [600.0, 700.0, 750.0, 800.0])
def test_a_blip_is_no_reason_wherever_it_falls(calm: float) -> None:
    """Even one that fills the queue, and lies over the border of two windows."""
    world = in_slow_gear()
    world.measure(calm, 20.0, busy=0.2, full=0.1)
    world.measure(250, 100.0, waiting=500)
    world.measure(1200, 20.0, busy=0.2, full=0.1)
    assert installed(world) == "slow"
    assert [report.outcome for report in world.control.history] == ["committed"] * 2


def test_a_lone_stream_is_no_load() -> None:
    world = in_slow_gear()
    world.measure(1500, 8.0, busy=1.0, full=0.1)
    assert installed(world) == "slow"
    assert not world.control.watch.corrections, "and says nothing of what the gear can do"


def test_the_gap_is_kept_and_then_the_shift_comes() -> None:
    world = in_slow_gear(replace(POLICY, min_action_gap_s=1500.0))
    began = world.control.last_shift_at
    assert began is not None
    world.measure(1400, 99.0, waiting=6)
    assert installed(world) == "slow"
    assert "s too early" in world.control.reason
    world.measure(200, 99.0, waiting=6)
    assert installed(world) == "fast"
    assert world.control.history[-1].started_at - began >= 1500.0


def test_the_benefit_ratio_is_what_the_settings_say() -> None:
    for ratio, wanted in ((2.5, "slow"), (1.9, "fast")):
        world = in_slow_gear(replace(POLICY, migration_benefit_ratio=ratio))
        world.measure(1300, 99.0, waiting=6)
        assert installed(world) == wanted, ratio
        if wanted == "slow":
            assert "below the benefit ratio of 2.5" in world.control.reason


# --------------------------------------------------------------------------------- corrections

A = gear("a100:2", 1000.0, "A")
B = gear("a100:2", 750.0, "B")


def measured_both(a_does: float) -> World:
    """B was in place long enough to be known; then A, which does this much under load."""
    world = World(planner=Table({"a100:2": A}, [B]), policy=POLICY)
    world.join("a")
    world.run(3)
    world.take(ShiftWanted(B, "test"))
    world.measure(700, 750.0, waiting=9)
    world.take(ShiftWanted(A, "test"))
    world.run(3)
    world.take(ShiftWanted(None, "test"))
    assert installed(world) == "A"
    world.measure(700, a_does, waiting=9)
    return world


def test_a_gear_that_does_less_than_was_estimated_is_left() -> None:
    world = measured_both(500.0)
    assert installed(world) == "B"
    assert "B is estimated at 1.50 times A" in world.control.history[-1].why


def test_a_gear_that_does_what_was_estimated_stays() -> None:
    world = measured_both(980.0)
    assert installed(world) == "A"
    assert "A is the best" in world.control.reason or "B is estimated" in world.control.reason


def test_all_gears_are_taken_to_err_alike_until_they_are_measured() -> None:
    world = World(planner=Table({"a100:2": A}, [B]), policy=POLICY)
    world.join("a")
    world.run(3)
    world.measure(1300, 300.0, waiting=9)
    assert installed(world) == "A"
    assert world.control.watch.corrections == {"A": pytest.approx(0.3, abs=0.01)}


def test_a_larger_gear_that_does_less_is_left_for_the_one_before() -> None:
    """As where the links between the nodes are slower than the site file says."""
    table = Table({"a100:2": SAFE, "a100:2,l40s:2": BOTH, "l40s:2": gear("l40s:2", 300.0)})
    world = World(planner=table, policy=POLICY)
    world.join("a")
    world.measure(700, 990.0, waiting=9)
    world.join("b", "l40s", 2)
    world.measure(400, 600.0, waiting=9)
    assert installed(world) == "a100:2,l40s:2"
    world.measure(400, 600.0, waiting=9)
    assert installed(world) == "a100:2"
    assert "a100:2 is estimated at 1.6" in world.control.history[-1].why
    world.measure(1300, 990.0, waiting=9)
    assert installed(world) == "a100:2", "and it does not go back to what it knows is worse"


# ----------------------------------------------------------------------------------- named plans


def test_named_plans_hold_from_the_first_gear_on() -> None:
    """The default plan where it fits, the fallback plan where nothing else does."""
    small = gear("a100:2", 100.0)
    big, other = gear("a100:2,l40s:2", 900.0), gear("l40s:2", 200.0)
    table = Table({"a100:2": small, "l40s:2": other, "a100:2,l40s:2": big}, named=[other, small])
    policy = replace(POLICY, plans=("l40s:2",), default_plan="l40s:2", fallback_plan="a100:2")
    world = World(planner=table, policy=policy)
    world.join("a")
    world.run(3)
    assert installed(world) == "a100:2"
    assert "is the fallback plan" in world.control.history[0].why
    world.join("b", "l40s", 2)
    world.run(3)
    assert installed(world) == "l40s:2"
    assert "is the default plan" in world.control.history[-1].why
    world.measure(1300, 100.0, waiting=9)
    assert installed(world) == "l40s:2", "the default plan is not left for a faster gear"
    assert "is the default plan" in world.control.reason
    world.take(Heard("b", AgentBye(incarnation="b", reason="test")))
    world.run(3)
    assert installed(world) == "a100:2"


# ------------------------------------------------------------------------------------ any order

loads = st.tuples(st.floats(0, 250), st.integers(0, 9), st.floats(0, 1), st.floats(0, 1))
steps = st.lists(
    st.tuples(st.sampled_from(["load", "load", "load", "join", "bye", "wish"]), loads,
              st.integers(1, 40)),
    max_size=12,
)  # fmt: skip


@given(steps, st.sampled_from([0.0, 180.0, 900.0]))
@settings(max_examples=60, deadline=None)
def test_optional_shifts_keep_the_rules_in_any_order(
    happenings: list[tuple[str, tuple[float, int, float, float], int]], gap: float
) -> None:
    both = gear("a100:2,l40s:2", 260.0)
    table = Table({"a100:2": FAST, "l40s:2": gear("l40s:2", 90.0), "a100:2,l40s:2": both}, [SLOW])
    world = World(planner=table, policy=replace(POLICY, min_action_gap_s=gap))
    world.join("a")
    born = 0
    for what, (rate, waiting, busy, full), intervals in happenings:
        here = [a for a in world.control.members.agents.values() if a.hello.fragment == "s"]
        if what == "join" and not here:
            born += 1
            world.join(f"s{born}", "l40s", 2, fragment="s")
        elif what == "bye" and here:
            world.take(Heard(here[0].id, AgentBye(incarnation=here[0].id, reason="test")))
        elif what == "wish":
            world.take(ShiftWanted(SLOW, "test"))
            world.measure(10, 0.0)
            world.take(ShiftWanted(None, "test"))
        world.measure(10.0 * intervals, rate, waiting=waiting, busy=busy, full=full)
    ended = 0.0
    for report in world.control.history:
        assert report.outcome == "committed"
        if "is estimated at" in report.why:
            assert report.started_at - ended >= gap, report
            if "fast is estimated" in report.why and "times slow" in report.why:
                assert report.started_at - ended >= 2 * WINDOW * 0.9, report
        ended = report.started_at + report.took_s
