"""What the next head remembers: epochs, cordons, drained pilots, shifts."""

from __future__ import annotations

from flexslurm.control.actions import Record
from flexslurm.control.events import (
    Cordon,
)
from flexslurm.control.restore import Memory
from flexslurm.control.state import Control
from flexslurm.messages import (
    ReleaseAgent,
)
from tests.unit.control_world import World


def test_a_restarted_head_goes_on_from_its_journal() -> None:
    world = World()
    world.join("a")
    world.run(3)
    world.take(Cordon("b", True))
    records = [a.record for a in world.log if isinstance(a, Record)]
    memory = Memory()
    for record in records:
        memory.take(record)
    assert (memory.epoch, memory.cordoned) == (1, {"b"})


def test_cordon_and_drain_are_remembered_by_the_next_head() -> None:
    def remembered(*events: Cordon) -> Control:
        world = World()
        world.join("a")
        world.join("b")
        for event in events:
            world.take(event)
        memory, again = Memory(), Memory()
        for action in world.log:
            if isinstance(action, Record):
                memory.take(dict(action.record))
        for record in memory.records():  # as in a journal that was shortened
            again.take(record)
        fresh = World().control
        again.restore(fresh)
        return fresh

    drained = remembered(Cordon("a", cordon=True), Cordon("b", cordon=True, drain=True)).members
    assert (drained.cordoned, drained.draining) == ({"a", "b"}, {"b"})
    gone = remembered(Cordon("b", cordon=True), Cordon("b", cordon=False, gone=True)).members
    assert not gone.cordoned and not gone.draining
    undone = remembered(Cordon("b", cordon=True, drain=True), Cordon("b", cordon=False)).members
    assert (undone.cordoned, undone.draining) == (set(), set())
    softened = remembered(Cordon("b", cordon=True, drain=True), Cordon("b", cordon=True)).members
    assert (softened.cordoned, softened.draining) == ({"b"}, set())


def test_a_drained_pilot_that_comes_back_to_a_new_head_is_ended() -> None:
    world = World()
    memory = Memory()
    memory.take({"event": "cordon", "fragment": "b", "cordon": True, "drain": True})
    memory.restore(world.control)
    world.join("a")
    world.join("b")
    world.run(3)
    assert world.serving() == "a100:2"
    assert [sent.to for sent in world.told(ReleaseAgent)] == ["b"]


def test_pilots_of_a_service_that_was_stopped_are_others_than_those_that_were_cordoned() -> None:
    memory = Memory()
    memory.take({"event": "cordon", "fragment": "a", "cordon": True})
    memory.take({"event": "cordon", "fragment": "b", "cordon": True, "drain": True})
    memory.take({"event": "stopped", "pilots_end": False})  # the head alone: its pilots stay
    assert (memory.cordoned, memory.draining) == ({"a", "b"}, {"b"})
    memory.take({"event": "stopped", "pilots_end": True})
    assert (memory.cordoned, memory.draining) == (set(), set())


def test_many_windows_without_a_shift_do_not_push_the_shifts_out_of_memory() -> None:
    memory = Memory()
    for epoch in range(1, 4):
        memory.take({"event": "epoch", "epoch": epoch})
    for number in range(1000):
        memory.take({"event": "decided", "verdict": "stay", "reason": f"window {number}"})
    kept = list(memory.records())
    assert [r["epoch"] for r in kept if r["event"] == "epoch"] == [1, 2, 3]
    stays = [r["reason"] for r in kept if r["event"] == "decided"]
    assert stays[-1] == "window 999" and len(stays) == 50
