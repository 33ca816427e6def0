"""Load, losses and known ends through the whole controller: samples in, decisions out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexslurm.control.actions import PlanShift, Record
from flexslurm.control.events import Cordon, Heard, ShiftWanted
from flexslurm.control.policy import PolicySettings, ShiftPrice
from flexslurm.control.restore import Memory
from flexslurm.control.watch import WatchSettings
from flexslurm.gear import Estimates, Gear, NoGear, Replica, Signature, Stage
from flexslurm.messages import AgentBye, LeaveNotice
from tests.unit.control_planners import LAYERS, OneStagePerNode
from tests.unit.control_world import World

POLICY = PolicySettings(min_action_gap_s=0.0, migration_benefit_ratio=1.3)
WINDOW = 300.0


def gear(signature: str, tokens_per_s: float, name: str = "", load_s: float = 1.0) -> Gear:
    """One replica on an allocation, told apart from others by its batch."""
    sized = Signature.parse(signature)
    nodes = sized.nodes()
    cuts = [LAYERS * i // len(nodes) for i in range(len(nodes) + 1)]
    stages = tuple(
        Stage(node.gpu_type, node.gpus, cuts[i], cuts[i + 1], 64, i) for i, node in enumerate(nodes)
    )
    one = Replica(stages, max_batch=int(tokens_per_s), max_batch_tokens=64, max_context=256)
    estimates = Estimates(tokens_per_s, 0.1, 0.01, 1000, load_s)
    return Gear(name or signature, sized, 16, (one,), estimates)


class Table(OneStagePerNode):
    """Gears written down by allocation, and some that were named for use."""

    def __init__(
        self,
        gears: Mapping[str, Gear],
        named: Sequence[Gear] = (),
        prices: Mapping[str, ShiftPrice] | None = None,
    ) -> None:
        super().__init__()
        self.gears = {str(Signature.parse(key)): one for key, one in gears.items()}
        self.named, self.prices = tuple(named), dict(prices or {})

    def choose(self, signature: Signature) -> Gear | NoGear:
        found = self.gears.get(str(signature))
        return found or NoGear(signature, f"nothing is written down for {signature}")

    def options(self, signature: Signature) -> Sequence[Gear]:
        return [one for one in self.named if signature.covers(one.signature)]

    def price(self, ask: PlanShift) -> ShiftPrice:
        return self.prices.get(ask.new.gear.name, ShiftPrice())


SLOW, FAST = gear("a100:2", 100.0, "slow"), gear("a100:2", 200.0, "fast")


def in_slow_gear(policy: PolicySettings = POLICY) -> World:
    """Two gears for the same GPUs; the slower serves, and the choice is the policy's again."""
    world = World(planner=Table({"a100:2": FAST}, [SLOW]), policy=policy)
    world.join("a")
    world.run(3)
    world.take(ShiftWanted(SLOW, "test"))
    world.measure(10, 0.0, busy=0.0, full=0.0)
    world.take(ShiftWanted(None, "test"))
    assert installed(world) == "slow"
    return world


def installed(world: World) -> str:
    assert world.control.current is not None
    return world.control.current.gear.name


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


# --------------------------------------------------------------------------------------- risks

SAFE, BOTH = gear("a100:2", 1000.0), gear("a100:2,l40s:2", 1500.0)


def kind_of(fragment: str) -> str:
    return "l40s@scavenge" if fragment.startswith("s") else ""


def scavenging() -> World:
    table = Table({"a100:2": SAFE, "a100:2,l40s:2": BOTH})
    world = World(planner=table, policy=POLICY, watch=WatchSettings(kind_of=kind_of))
    world.join("a")
    world.run(3)
    return world


def lose_often(world: World, times: int) -> None:
    """The scavenged pilot comes, and is lost two minutes later without a word."""
    for number in range(times):
        world.join(f"s{number}", "l40s", 2, fragment="s")
        world.measure(120, 1500.0)
        world.take(Heard(f"s{number}", AgentBye(incarnation=f"s{number}", reason="killed")))
        world.measure(30, 1000.0)


def test_a_pool_that_is_often_lost_is_no_longer_gone_for() -> None:
    world = scavenging()
    lose_often(world, 1)
    assert [r.after for r in world.control.history].count(BOTH.layout()) == 1
    lose_often(world, 60)
    before = len(world.control.history)
    world.join("last", "l40s", 2, fragment="s")
    world.run(30)
    assert installed(world) == "a100:2", world.control.reason
    assert len(world.control.history) == before
    assert "a loss every" in world.control.reason
    assert "below the benefit ratio" in world.control.reason


def test_at_the_start_the_safer_gear_is_taken_where_losses_are_frequent() -> None:
    """The same, as a head finds it that was started again: the journal remembers."""
    first = scavenging()
    lose_often(first, 60)
    memory = Memory()
    for action in first.log:
        if isinstance(action, Record):
            memory.take(dict(action.record))
    again = Memory()
    for record in memory.records():
        again.take(record)
    assert again.lives.keys() == {"a100", "l40s@scavenge"}

    world = scavenging()
    world.control.watch.lives.remember(again.lives)
    world.join("s9", "l40s", 2, fragment="s")
    world.run(30)
    assert installed(world) == "a100:2"
    fresh = scavenging()
    fresh.join("s9", "l40s", 2, fragment="s")
    fresh.run(30)
    assert installed(fresh) == "a100:2,l40s:2", "without the memory it would have been taken"


def test_what_leaves_with_notice_counts_and_what_has_come_to_its_walltime_does_not() -> None:
    world = scavenging()
    lives = world.control.watch.lives
    world.join("s1", "l40s", 2, fragment="s")
    world.run(10)
    agent = world.control.members.agents["s1"]
    notice = LeaveNotice(incarnation="s1", source="SIGTERM", grace_s=5)
    world.take(Heard("s1", notice))
    once = lives.hazard_per_s(agent)
    assert once > 0
    world.take(Heard("s1", AgentBye(incarnation="s1", reason="gone")))
    assert lives.hazard_per_s(agent) == pytest.approx(once), "one pilot, one loss"
    world.run(60)
    world.join("s2", "l40s", 2, fragment="s", walltime_s=100.0)
    world.run(10)
    world.take(Heard("s2", AgentBye(incarnation="s2", reason="its time is over")))
    assert lives.hazard_per_s(agent) <= once


def test_what_is_drained_is_no_loss() -> None:
    world = scavenging()
    world.join("s1", "l40s", 2, fragment="s")
    world.run(10)
    agent = world.control.members.agents["s1"]
    world.take(Cordon("s", cordon=True, drain=True))
    world.run(10)
    assert agent.released
    world.take(Heard("s1", AgentBye(incarnation="s1", reason="drained")))
    assert world.control.watch.lives.hazard_per_s(agent) == 0


# ------------------------------------------------------------------------- the worked example

STEADY = gear("l40s:2", 1000.0, "steady")
NIMBLE = gear("a100:2", 750.0, "nimble", load_s=900.0)
COST = ShiftPrice(seconds=90.0, tokens_per_s=300.0)


def twelve_minutes_before_the_end(losses: float) -> World:
    """The steady gear has been measured for two windows; its pilot has 12 minutes left."""
    table = Table(
        {"l40s:2": STEADY, "a100:2,l40s:2": STEADY, "a100:2": NIMBLE}, prices={"nimble": COST}
    )
    world = World(planner=table, policy=replace(POLICY, min_action_gap_s=180.0))
    world.join("s", "l40s", 2, walltime_s=1420.0)
    world.run(3)
    world.join("n")
    world.measure(690, 1000.0, waiting=9)
    world.run(700.0 - world.now, step=1.0)
    assert installed(world) == "steady"
    world.control.watch.lives.remember({"l40s": (10 * 3600.0, losses)})
    world.take(Cordon("nobody", False))  # something happens, and the policy is asked
    return world


def test_twelve_sure_minutes_are_worth_staying_for() -> None:
    world = twelve_minutes_before_the_end(losses=0.0)
    assert installed(world) == "steady"
    assert (
        "nimble is estimated at 0.69 times steady: 499,500 tokens in the next 12 min "
        "(300 tokens/s for 90 s, then 750 tokens/s) against 720,000 (1000 tokens/s), "
        "below the benefit ratio of 1.3"
    ) in world.control.reason
    last = list(world.control.decisions)[-1]
    assert (last.verdict, last.reason) == ("stay", world.control.reason)
    recorded = [a.record for a in world.log if isinstance(a, Record)]
    assert {"event": "decided", "verdict": "stay", "reason": last.reason} in recorded


def test_twelve_minutes_that_may_end_any_time_are_not() -> None:
    # 16 h watched in all: a loss every three minutes or so
    world = twelve_minutes_before_the_end(losses=320.0)
    world.run(5)
    assert installed(world) == "nimble"
    why = world.control.history[-1].why
    assert "499,500 tokens in the next 12 min" in why
    assert "a loss every 3 min" in why


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


def test_a_successor_under_another_name_is_of_the_same_kind() -> None:
    world = scavenging()
    lives = world.control.watch.lives
    for number in range(3):
        world.join(f"s{number}", "l40s", 2, fragment=f"s-{number}")
        world.measure(60, 1500.0)
        world.take(Heard(f"s{number}", AgentBye(incarnation=f"s{number}", reason="killed")))
        world.measure(60, 1000.0)
    assert lives.hourly().keys() == {"a100", "l40s@scavenge"}
    assert lives.hourly()["l40s@scavenge"] == pytest.approx(3 * 3600 / (180 + 6 * 3600), rel=0.02)
    assert lives.hourly()["a100"] == 0.0
