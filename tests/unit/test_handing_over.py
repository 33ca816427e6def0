"""The controller's side of the pool: a successor takes a place, a node is given back."""

from __future__ import annotations

import pytest

from flexslurm.control.events import Cordon, Heard, PartNode
from flexslurm.control.members import GpuAt
from flexslurm.messages import LeaveNotice, ReleaseAgent
from tests.unit.control_world import World


def serving_agents(world: World) -> set[str]:
    current = world.control.current
    return set(current.agents) if current is not None else set()


def released(world: World) -> list[tuple[str, bool]]:
    return [(sent.to, sent.message.give_back) for sent in world.told(ReleaseAgent)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("warned", [False, True])
def test_a_successor_relieves_a_pilot_whose_walltime_ends(warned: bool) -> None:
    """One shift, from the old one to the new; the old one ends and is not requeued.

    Slurm's own warning of the walltime may have come already.
    """
    world = World()
    world.join("a")
    world.run(3)
    assert serving_agents(world) == {"a"}
    if warned:
        world.take(Heard("a", LeaveNotice(incarnation="a", source="SIGUSR1", grace_s=60.0)))
    world.run(1)
    shifts = len(world.opened())
    world.join("b")
    world.take(Cordon("a", cordon=True, drain=True))
    world.run(5)
    assert serving_agents(world) == {"b"}
    assert len(world.opened()) == shifts + 1
    assert released(world) == [("a", False)]


def test_a_node_that_is_given_back_is_left_first() -> None:
    """Whatever serves there goes on elsewhere; then its agent ends, and no other does."""
    world = World()
    world.join("a")
    world.join("b")
    world.run(3)
    assert serving_agents(world) == {"a", "b"}
    node = world.control.members.agents["b"].hello.node
    world.take(PartNode(node))
    world.run(5)
    assert serving_agents(world) == {"a"}
    assert released(world) == [("b", False)]
    assert world.control.members.usable() == [world.control.members.agents["a"]]
    assert world.control.members.worker_at(GpuAt("a", 0)) is not None


def test_a_node_that_nothing_can_do_without_serves_on() -> None:
    world = World(least=3)
    world.join("a")
    world.join("b")
    world.run(3)
    world.take(PartNode(world.control.members.agents["b"].hello.node))
    world.run(5)
    assert serving_agents(world) == {"a", "b"} and released(world) == []
