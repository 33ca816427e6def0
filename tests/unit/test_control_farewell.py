"""All GPUs are taken with notice: the gear serves while it can, then its KV is parked in time."""

from __future__ import annotations

from flexslurm.control.actions import DropAway, ParkAway, Record
from flexslurm.control.events import Heard, ParkedAway, PilotStays
from flexslurm.control.installed import ReplicaKey
from flexslurm.messages import AgentBye, LeaveNotice, ReleaseAgent, Retire
from tests.unit.control_planners import OneReplicaPerNode, OneStagePerNode
from tests.unit.control_world import World


def stranded(needs_s: float | None, grace_s: float = 15.0, *, replicas: bool = False) -> World:
    """Two nodes that are both needed, and both must leave."""
    planner = OneReplicaPerNode(least=1) if replicas else OneStagePerNode(least=4)
    planner.needs_s = needs_s
    world = World(planner=planner)
    for name in ("a", "b"):
        world.join(name)
    world.run(3)
    world.log.clear()
    for name in ("a", "b"):
        world.take(Heard(name, LeaveNotice(incarnation=name, source="SIGTERM", grace_s=grace_s)))
    return world


def parked(world: World) -> list[ParkAway]:
    return [action for action in world.log if isinstance(action, ParkAway)]


def test_it_serves_until_parking_must_begin() -> None:
    world = stranded(needs_s=4.0)
    world.run(10.0)
    assert not parked(world) and not world.paused and world.drivers
    world.run(1.0)
    [park] = parked(world)
    assert park.replicas == (ReplicaKey(1, 0),) and 3.0 < park.deadline_s <= 4.0
    assert world.paused == world.drivers == {ReplicaKey(1, 0)}


def test_when_all_is_parked_the_gpus_are_given_back_at_once() -> None:
    world = stranded(needs_s=4.0)
    world.run(11.0)
    world.take(ParkedAway())
    assert not world.drivers and world.detached() == [ReplicaKey(1, 0)]
    assert len(world.told(Retire)) == 4
    assert sorted(send.to for send in world.told(ReleaseAgent)) == ["a", "b"]
    assert all(send.message.give_back for send in world.told(ReleaseAgent))  # type: ignore[attr-defined]
    world.run(2.0)
    assert world.control.shift is None and not world.drivers, "nothing is installed on them again"
    assert world.control.state == "waiting"


def test_parking_that_does_not_end_is_cut_short_by_the_notice() -> None:
    world = stranded(needs_s=4.0)
    world.run(14.3)
    assert world.drivers
    world.run(0.5)
    assert not world.drivers
    [record] = [
        a.record for a in world.log if isinstance(a, Record) and a.record["event"] == "parked"
    ]
    assert record["in_time"] is False


def test_a_notice_that_is_taken_back_resumes_the_streams() -> None:
    world = stranded(needs_s=4.0)
    world.run(11.0)
    world.take(PilotStays("a", "test"))
    assert world.paused, "b still leaves, and the gear needs it"
    world.take(PilotStays("b", "test"))
    assert any(isinstance(action, DropAway) for action in world.log)
    assert world.drivers == {ReplicaKey(1, 0)} and not world.paused


def test_a_member_that_goes_early_ends_the_parking() -> None:
    world = stranded(needs_s=4.0)
    world.run(11.0)
    world.take(Heard("a", AgentBye(incarnation="a", reason="killed")))
    assert not world.drivers and not world.paused
    world.take(ParkedAway())
    world.run(1.0)
    assert world.control.current is None


def test_without_a_directory_it_serves_to_the_end() -> None:
    world = stranded(needs_s=None)
    world.run(14.0)
    assert not parked(world) and world.drivers and not world.paused


def test_where_something_else_fits_nothing_is_parked() -> None:
    """Only b leaves, and a's replica can hold the model alone."""
    planner = OneReplicaPerNode()
    planner.needs_s = 100.0
    world = World(planner=planner)
    for name in ("a", "b"):
        world.join(name)
    world.run(3)
    world.take(Heard("b", LeaveNotice(incarnation="b", source="SIGTERM", grace_s=5.0)))
    world.run(2)
    assert not parked(world) and world.serving() == "a100:2"


def test_what_comes_back_is_installed() -> None:
    world = stranded(needs_s=4.0)
    world.run(11.0)
    world.take(ParkedAway())
    for name in ("a", "b"):
        world.take(Heard(name, AgentBye(incarnation=name, reason="given back")))
        world.join(f"{name}2", fragment=name)
    world.run(3)
    assert world.serving() == "a100:2x2" and world.control.state == "serving"


def test_what_is_still_here_long_after_it_had_to_go_stays() -> None:
    """A SIGTERM by hand, or a preemption that Slurm has thought better of."""
    world = World(least=3, overstay_s=60.0)
    world.join("a")
    world.join("b")
    world.run(3)
    notice = LeaveNotice(incarnation="b", source="SIGTERM", grace_s=5.0)
    world.take(Heard("b", notice))
    world.run(60.0, step=1.0)
    assert "b on node-b must leave" in world.control.reason
    world.run(10.0, step=1.0)
    assert world.control.members.agents["b"].state == "ready"
    assert "must leave" not in world.control.reason
    assert len(world.opened()) == 1 and not world.detached(), "it served on all the time"
    world.take(Heard("b", notice))
    assert world.control.members.agents["b"].state == "leaving", "the next notice counts again"


def test_what_was_given_back_does_not_stay() -> None:
    world = World(overstay_s=60.0)
    world.join("a")
    world.join("b")
    world.run(3)
    world.take(Heard("b", LeaveNotice(incarnation="b", source="SIGTERM", grace_s=5.0)))
    world.run(3)
    assert world.told(ReleaseAgent, "b")
    world.take(PilotStays("b", "test"))
    world.run(90.0, step=1.0)
    assert world.serving() == "a100:2", "it has been told to end"
