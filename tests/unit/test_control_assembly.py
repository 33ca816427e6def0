"""What is made of a new gear before the old one pauses, where both do not fit."""

from __future__ import annotations

import pytest

from flexslurm.control.actions import MeetEpoch, ParkAhead, ParkAll, Send
from flexslurm.control.events import PREEMPT_TIME, Heard, PilotLeaving
from flexslurm.control.installed import ReplicaKey
from flexslurm.control.phases import Mode, Phase
from flexslurm.messages import (
    AgentBye,
    Assemble,
    Install,
    InstallFailed,
    LeaveNotice,
    Message,
    Retire,
)
from tests.unit.control_world import World

OLD, NEW = ReplicaKey(1, 0), ReplicaKey(2, 0)


def leaving_world(mode: Mode, *unready: str, grace_s: float = 100.0) -> World:
    """One replica over nodes a and b, which is to be moved off b."""
    world = World()
    world.join("a")
    world.join("b")
    world.run(3)
    world.mode = mode
    world.unready |= set(unready)
    world.log.clear()
    notice = LeaveNotice(incarnation="b", source="SIGTERM", grace_s=grace_s)
    world.take(Heard("b", notice))
    return world


def place(world: World, kind: type[object]) -> int:
    """Where in the log the first such action or message is."""
    found = (
        n
        for n, action in enumerate(world.log)
        if isinstance(action, kind)
        or (isinstance(action, Send) and isinstance(action.message, kind))
    )
    return next(found)


def epoch_of(message: Message) -> int:
    return message.install.epoch if isinstance(message, Assemble) else -1


def test_a_gear_is_assembled_before_the_old_one_pauses() -> None:
    world = leaving_world(Mode.PARK)
    world.run(1)
    assert place(world, MeetEpoch) < place(world, Assemble) < place(world, ParkAll)
    assert place(world, Retire) < place(world, Install)
    assert sum(isinstance(action, MeetEpoch) for action in world.log) == 1
    early, late = world.told(Assemble), world.told(Install)
    assert [(send.to, epoch_of(send.message)) for send in early] == [(s.to, 2) for s in late]
    assert world.drivers == {NEW} and world.serving() == "a100:2"


def test_full_blocks_are_copied_aside_while_the_old_gear_serves() -> None:
    world = leaving_world(Mode.PARK)
    world.run(1)
    assert place(world, Assemble) < place(world, ParkAhead) < place(world, ParkAll)
    assert sum(isinstance(action, ParkAhead) for action in world.log) == 1


def test_copies_that_are_not_made_in_time_are_not_waited_for() -> None:
    world = leaving_world(Mode.PARK, grace_s=9.0)
    world.mute |= {ParkAhead}
    world.run(0.2)
    assert world.drivers == {OLD} and not world.paused
    world.run(6)
    assert world.drivers == {NEW}


@pytest.mark.parametrize("mode", [Mode.BESIDE, Mode.RECOMPUTE])
def test_other_shifts_have_nothing_to_assemble(mode: Mode) -> None:
    world = leaving_world(mode)
    world.run(1)
    assert not world.told(Assemble) and world.drivers == {NEW}


def test_the_old_gear_serves_while_the_new_one_is_assembled() -> None:
    world = leaving_world(Mode.PARK, "a")
    world.run(5)
    assert world.control.shift is not None and world.control.shift.phase is Phase.PREPARE
    assert world.drivers == {OLD} and not world.paused and not world.told(Install)


def test_what_is_not_assembled_in_time_is_not_waited_for() -> None:
    world = leaving_world(Mode.PARK, "a", grace_s=9.0)
    world.run(3)
    assert world.drivers == {OLD} and not world.told(Install)
    world.run(3)
    assert world.told(Install) and world.drivers == {NEW}
    assert world.control.history[-1].outcome == "committed"


def test_a_new_worker_that_dies_meanwhile_costs_the_attempt_and_its_epoch_is_closed() -> None:
    world = leaving_world(Mode.PARK, "a")
    world.run(0.5)
    world.log.clear()
    world.kill_worker("a", 1)
    assert "died during the prepare" in world.control.history[-1].outcome
    assert {send.to for send in world.told(Retire) if send.message == Retire(epoch=2)}
    world.mend()
    world.run(10)
    assert world.serving() == "a100:2" and world.control.current is not None
    assert not any(held.epoch == 2 for held in world.control.holdings)


def test_a_gear_that_cannot_be_assembled_leaves_the_old_one_serving() -> None:
    world = leaving_world(Mode.PARK, "a")
    world.run(0.5)
    worker = world.told(Assemble)[0].to
    world.take(Heard(worker, InstallFailed(worker=worker, epoch=2, reason="no groups")))
    assert "no groups" in world.control.history[-1].outcome
    assert world.drivers == {OLD} and not world.paused
    assert not any(isinstance(action, ParkAll) for action in world.log)


def test_an_old_member_that_is_lost_meanwhile_leaves_nothing_to_wait_for() -> None:
    world = leaving_world(Mode.PARK, "a")
    world.run(0.5)
    world.take(Heard("b", AgentBye(incarnation="b", reason="killed")))
    world.run(1)
    assert world.drivers == {NEW} and world.serving() == "a100:2"
    assert len({send.to for send in world.told(Install)}) == 2


def test_who_is_assembled_waits_for_room_as_long_as_the_slowest_may_take() -> None:
    """One that lacks nothing is assembled at once; others fetch weights for minutes."""
    world = leaving_world(Mode.PARK, "a", grace_s=10_000.0)
    world.transfer_s = 200.0
    world.run(0.2)
    shift = world.control.shift
    assert shift is not None and shift.assemble_by is not None
    ahead_s = shift.assemble_by - world.now
    assert ahead_s > 400.0
    settings = shift.settings
    latest_s = ahead_s + settings.park_timeout_s + settings.close_timeout_s + 1.0
    for send in world.told(Assemble):
        assert isinstance(send.message, Assemble) and send.message.room_s > latest_s


def test_each_is_told_how_many_share_its_host() -> None:
    world = leaving_world(Mode.PARK)
    world.run(1)
    orders = [send.message for send in world.told(Install) if isinstance(send.message, Install)]
    new = [order for order in orders if order.epoch == 2]
    assert len(new) == 2 and {order.host_workers for order in new} == {len(new)}


def test_a_notice_that_comes_meanwhile_leaves_time_to_park() -> None:
    """Without it, what is made ahead may take minutes."""
    world = World()
    world.join("a")
    world.join("b")
    world.run(3)
    world.mode, world.transfer_s, world.mute = Mode.PARK, 100.0, {ParkAhead}
    world.take(PilotLeaving("b", PREEMPT_TIME, 10_000.0))
    world.run(1)
    assert world.control.shift is not None and world.drivers == {OLD}
    world.take(Heard("b", LeaveNotice(incarnation="b", source="SIGTERM", grace_s=9.0)))
    world.run(5)
    assert place(world, ParkAll) and world.drivers == {NEW}
    assert world.control.history[-1].outcome == "committed"
