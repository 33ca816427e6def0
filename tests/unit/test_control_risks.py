"""Losses seen so far and known ends, through the whole controller: what is risky is left."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flexslurm.control.actions import Record
from flexslurm.control.choices import ShiftPrice
from flexslurm.control.events import Cordon, Heard
from flexslurm.control.restore import Memory
from flexslurm.control.watch import WatchSettings
from flexslurm.messages import AgentBye, LeaveNotice
from tests.unit.control_world import World
from tests.unit.measured_world import (
    BOTH,
    POLICY,
    SAFE,
    Table,
    gear,
    installed,
)


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
