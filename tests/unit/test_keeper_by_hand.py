"""Pilots that an operator drains and has back, and nodes that are given back."""

from __future__ import annotations

from flexslurm.control.keeper import PoolKeeper
from flexslurm.control.keeper_load import pool_lines, resize
from flexslurm.control.keeper_values import (
    KeeperSettings,
    PilotShape,
    PoolEntry,
    Resize,
)
from flexslurm.slurm.states import JobState
from tests.keeper_world import World, entry


def test_what_an_operator_drained_stays_away_until_the_load_asks() -> None:
    world = World(entry(2, 2, 2))
    world.step(times=4)
    world.join()
    world.keeper.drained_by_hand("a100-2")
    world.step(times=3)
    world.queue.end(world.job("a100-2"), JobState.COMPLETED, 0)
    world.step(times=100)
    assert world.names() == ["a100-1"]
    resize(world.keeper, -1, "idle")
    assert world.keeper.wanted == [1]
    resize(world.keeper, 1, "busy")
    world.step(times=3)
    assert world.names() == ["a100-1", "a100-2"]


def test_a_drain_that_is_taken_back() -> None:
    world = World(entry(2, 2, 2))
    world.step(times=4)
    world.join()
    world.keeper.drained_by_hand("a100-2")
    world.keeper.taken_back("a100-2")
    world.step(times=20)
    assert world.names() == ["a100-1", "a100-2"] and len(world.queue.submissions) == 2


def test_a_drained_pilot_that_has_ended_is_had_back() -> None:
    world = World(entry(2, 2, 2))
    world.step(times=4)
    world.join()
    world.keeper.drained_by_hand("a100-2")
    world.step(times=3)
    assert not world.keeper.bring_back("a100-2"), "it is still here: its cordon is lifted instead"
    world.queue.end(world.job("a100-2"), JobState.COMPLETED, 0)
    world.step(times=20)
    assert world.names() == ["a100-1"]
    [line] = pool_lines(world.keeper, world.queue.now)
    assert "drained: a100-2" in line
    assert not world.keeper.bring_back("a100-1") and world.keeper.bring_back("a100-2")
    world.step(times=3)
    assert world.names() == ["a100-1", "a100-2"] and len(world.queue.submissions) == 3
    assert not world.keeper.bring_back("a100-2"), "once"
    assert "drained" not in pool_lines(world.keeper, world.queue.now)[0]


def test_what_was_drained_stays_away_under_the_next_head() -> None:
    world = World(entry(2, 2, 2))
    world.step(times=4)
    world.keeper.drained_by_hand("a100-2")
    world.queue.end(world.job("a100-2"), JobState.COMPLETED, 0)
    world.step(times=3)
    before = world.keeper
    world.keeper = PoolKeeper(
        before.entries, KeeperSettings(), before.pilots(), world.queue.now, before.wanted,
        {**before.away, "of-no-entry": 7},
    )  # fmt: skip
    world.step(times=20)
    assert world.names() == ["a100-1"] and len(world.queue.submissions) == 2
    assert "drained: a100-2 (" in pool_lines(world.keeper, world.queue.now)[0]
    assert world.keeper.bring_back("a100-2")
    world.step(times=3)
    assert world.names() == ["a100-1", "a100-2"]


def test_one_pilot_is_told_of_as_one() -> None:
    world = World(entry(1, 2, 2))
    resize(world.keeper, -1, "idle")
    world.step()
    assert any("a100: 1 pilot instead of 2: idle" in line for line in world.said)


def test_the_load_takes_the_place_of_one_that_was_drained() -> None:
    world = World(entry(2, 2, 2))
    world.step(times=4)
    world.keeper.drained_by_hand("a100-2")
    world.queue.end(world.job("a100-2"), JobState.COMPLETED, 0)
    world.step(times=3)
    resize(world.keeper, 1, "busy")
    assert not world.keeper.bring_back("a100-2") and world.keeper.wanted == [2]


# ------------------------------------------------------------------------- nodes given back


def test_a_node_is_taken_from_its_job_once_its_agent_has_ended() -> None:
    shapes = (PilotShape(4, 2),)
    world = World(PoolEntry("a100", "scavenge", shapes, 1, 1, 1))
    world.step(times=2)
    world.queue.set("1", JobState.RUNNING, nodes=("n1", "n2"), batch_host="n1")
    world.step()
    world.keeper.part("a100-1", "n2")
    call = world.keeper.next_call(world.queue.now)
    assert call == Resize("a100-1", "1", ("n1",))
    world.keeper.resized("a100-1", ("n1",))
    assert world.keeper.kept["a100-1"].pilot.nodes == 1
    assert world.keeper.next_call(world.queue.now) is None


def test_a_site_that_forbids_it_is_said_and_the_pilot_goes_on() -> None:
    world = World(PoolEntry("a100", "scavenge", (PilotShape(4, 2),), 1, 1, 1))
    world.step(times=2)
    world.queue.set("1", JobState.RUNNING, nodes=("n1", "n2"), batch_host="n1")
    world.step()
    world.keeper.part("a100-1", "n2")
    world.keeper.resized("a100-1", (), "Requested operation is presently disabled")
    world.step(times=5)
    assert any("cannot be given back: Requested operation" in line for line in world.said)
    assert world.keeper.kept["a100-1"].pilot.nodes == 2
    assert len(world.queue.submissions) == 1


def test_the_name_of_one_that_went_is_free_for_another() -> None:
    """A successor is nobody's successor once the old pilot is gone."""
    world = World(entry(2, 2, 2, handover_s=300.0))
    world.walltime_s = 3600
    world.step(times=4)
    world.join()
    for _ in range(900):
        world.step(20)
        world.join()
        for name in [n for n, k in world.keeper.kept.items() if k.draining]:
            world.queue.end(world.job(name), JobState.COMPLETED, 0)
            world.present.pop(name, None)
        replaced = {k.pilot.replaces for k in world.keeper.kept.values()} - {""}
        assert replaced <= world.keeper.kept.keys()
        assert len(world.names()) <= 4
    assert len(world.names()) == 2
    assert len(world.queue.submissions) in range(11, 15)  # each lives for 55 minutes of 5 hours


def test_a_pilot_that_was_draining_when_the_head_died_is_not_cancelled() -> None:
    world = World(entry(2, 2, 2))
    world.step(times=4)
    written = world.keeper.pilots()
    again = World(entry(2, 2, 2), pilots=written)
    again.queue = world.queue
    again.keeper.wanted = [1]
    again.keeper.drained_by_hand("a100-2", before=True)
    assert again.act() is None
    again.step(times=10)
    assert again.keeper.wanted == [1] and again.names() == ["a100-1", "a100-2"]
    again.queue.end(again.job("a100-2"), JobState.COMPLETED, 0)
    again.step(times=30)
    assert again.names() == ["a100-1"]
