"""Shifts, phase by phase: what stays untouched, what is moved, and what each failure comes to."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from flexslurm.control.actions import (
    BeginCutover,
    BeginTransfer,
    Detach,
    DropShift,
    ParkAll,
    Send,
    SwitchOver,
)
from flexslurm.control.events import (
    Cordon,
    CutOver,
    Heard,
    MoveFailed,
    Parked,
    ShiftWanted,
    Transferred,
)
from flexslurm.control.installed import ReplicaKey
from flexslurm.control.phases import LEGAL, Mode, Phase
from flexslurm.gear import Signature
from flexslurm.messages import AgentBye, Install, LeaveNotice, ReleaseAgent, Retire, StopWorkers
from tests.unit.control_planners import OneReplicaPerNode, OneStagePerNode
from tests.unit.control_world import World

ONE_NODE = Signature.parse("a100:2")


def replicas_world(*names: str, mode: Mode = Mode.RECOMPUTE) -> World:
    world = World(planner=OneReplicaPerNode())
    world.mode = mode
    for name in names:
        world.join(name)
    world.run(3)
    assert len(world.drivers) == len(names)
    return world


def shift_world(mode: Mode, mute: type | None = None) -> World:
    """One replica over nodes a and b that is about to be moved off b."""
    world = World()
    world.join("a")
    world.join("b")
    world.run(3)
    world.mode = mode
    if mute is not None:
        world.mute.add(mute)
    world.log.clear()
    return world


def leave(world: World, name: str, grace_s: float = 15.0) -> None:
    world.take(Heard(name, LeaveNotice(incarnation=name, source="SIGTERM", grace_s=grace_s)))


def kinds(world: World) -> list[str]:
    """The moves and messages of a shift in order, each once."""
    seen = []
    for action in world.log:
        if isinstance(
            action, ParkAll | BeginTransfer | BeginCutover | SwitchOver | Detach | DropShift
        ):
            seen.append(type(action).__name__)
        elif isinstance(action, Send) and isinstance(action.message, Install | Retire):
            seen.append(type(action.message).__name__)
    return [kind for kind, _ in itertools.groupby(seen)]


# --------------------------------------------------------------------------------- replicas


def test_a_lost_replica_pauses_only_itself() -> None:
    world = replicas_world("a", "b")
    survivor = world.control.current.replicas[0].key  # type: ignore[union-attr]
    world.log.clear()
    world.take(Heard("b", AgentBye(incarnation="b", reason="killed")))
    assert world.detached() == [ReplicaKey(1, 1)]
    assert world.drivers == {survivor}
    world.run(2)
    assert world.serving() == "a100:2"
    assert world.drivers == {survivor}, "what stays keeps its epoch"
    assert not world.told(Install), "there was nothing to install"
    assert not world.told(Retire, "a/")
    assert "lost replica 1" in world.control.history[-1].why


def test_a_replica_whose_worker_crashed_is_installed_anew_beside_the_other() -> None:
    world = replicas_world("a", "b")
    world.log.clear()
    world.kill_worker("b", 1)
    world.run(2)
    assert world.drivers == {ReplicaKey(1, 0), ReplicaKey(2, 1)}
    assert {send.to.split("/")[0] for send in world.told(Install)} == {"b"}
    assert not world.told(Retire, "a/")
    assert world.control.current is not None and not world.control.current.lost


def test_growing_by_a_replica_touches_nobody() -> None:
    world = replicas_world("a")
    world.log.clear()
    world.join("b")
    world.run(3)
    assert world.drivers == {ReplicaKey(1, 0), ReplicaKey(2, 1)}
    assert not world.detached() and not world.told(Retire)
    assert not world.told(Install, "a/")
    assert kinds(world) == ["Install", "SwitchOver"]


def test_shrinking_by_a_replica_with_notice_moves_its_sequences_to_the_other() -> None:
    world = replicas_world("a", "b", mode=Mode.BESIDE)
    world.log.clear()
    leave(world, "b")
    world.run(1)
    assert world.drivers == {ReplicaKey(1, 0)}
    assert kinds(world) == ["BeginTransfer", "BeginCutover", "SwitchOver", "Retire"]
    [switch] = world.opened()
    assert not switch.opened and switch.closed == (ReplicaKey(1, 1),)
    assert [send.to for send in world.told(ReleaseAgent)] == ["b"]


def test_a_replica_that_was_to_stay_and_is_lost_restarts_the_decision() -> None:
    world = replicas_world("a", "b")
    world.slow.add("c")
    world.join("c")
    world.run(1.5)
    assert world.control.shift is not None and world.control.shift.phase is Phase.INSTALL
    world.kill_worker("a")
    assert world.control.shift is None
    assert "to stay is lost" in world.control.history[-1].outcome
    world.slow.clear()
    world.run(3)
    assert world.serving() == "a100:2x3" and len(world.drivers) == 3


def test_losing_the_last_replica_leaves_nothing_in_place() -> None:
    world = replicas_world("a", "b")
    world.dead |= {"a", "b"}
    for name in ("a", "b"):
        world.take(Heard(name, AgentBye(incarnation=name, reason="killed")))
    assert world.control.current is None and not world.drivers
    world.run(1)
    assert world.control.state == "waiting"


# ------------------------------------------------------------------------------ three ways


@pytest.mark.parametrize(
    ("mode", "course"),
    [
        (
            Mode.BESIDE,
            ["Install", "BeginTransfer", "BeginCutover", "SwitchOver", "Retire"],
        ),
        (
            Mode.PARK,
            ["ParkAll", "Detach", "Retire", "Install", "BeginCutover", "SwitchOver"],
        ),
        (Mode.RECOMPUTE, ["Detach", "Retire", "Install", "SwitchOver"]),
    ],
)
def test_the_course_of_a_shift(mode: Mode, course: list[str]) -> None:
    world = shift_world(mode)
    leave(world, "b")
    world.run(1)
    assert kinds(world) == course
    assert world.serving() == "a100:2" and world.drivers == {ReplicaKey(2, 0)}
    assert world.control.history[-1].outcome == "committed"
    assert world.control.history[-1].mode == mode
    assert world.room_freed() == [2]


def test_only_what_moves_beside_serves_until_the_new_one_does() -> None:
    world = shift_world(Mode.BESIDE, mute=BeginTransfer)
    leave(world, "b")
    world.run(1)
    assert world.drivers == {ReplicaKey(1, 0)} and not world.paused
    world.take(Transferred(2))
    assert world.drivers == {ReplicaKey(2, 0)}


def test_room_is_free_only_when_the_old_epoch_is_closed_everywhere() -> None:
    world = shift_world(Mode.BESIDE)
    world.hung |= {world.worker("a", 0), world.worker("b", 1)}
    leave(world, "b")
    world.run(1)
    assert world.drivers == {ReplicaKey(2, 0)}
    assert not world.room_freed() and not world.told(ReleaseAgent)
    world.run(5)
    # b's worker is killed; a's serves the new epoch, so it is left to end by itself
    killed = [send.to for send in world.told(StopWorkers)]
    assert killed == ["b"]
    assert [send.to for send in world.told(ReleaseAgent)] == ["b"]
    assert not world.room_freed()
    world.kill_worker("a", 0)
    world.run(1)
    assert world.room_freed()[0] == 2


def test_one_that_serves_and_never_closes_what_was_is_ended_at_last() -> None:
    """Every later shift would wait for its room."""
    world = shift_world(Mode.BESIDE)
    hung = world.worker("a", 0)
    world.hung.add(hung)
    leave(world, "b")
    world.run(20)
    assert world.drivers == {ReplicaKey(2, 0)} and not world.told(StopWorkers)
    world.run(30)
    assert [send.to for send in world.told(StopWorkers)] == ["a"]
    assert world.room_freed()[0] == 2 and world.worker("a", 0) != hung
    assert world.serving() is not None


# ------------------------------------------------------------------- every phase, every loss


PHASES = [
    (Mode.BESIDE, Phase.INSTALL, None),
    (Mode.BESIDE, Phase.TRANSFER, BeginTransfer),
    (Mode.BESIDE, Phase.CUTOVER, BeginCutover),
    (Mode.PARK, Phase.PARK, ParkAll),
    (Mode.PARK, Phase.CLOSE, None),
    (Mode.PARK, Phase.INSTALL, None),
    (Mode.PARK, Phase.CUTOVER, BeginCutover),
    (Mode.RECOMPUTE, Phase.CLOSE, None),
    (Mode.RECOMPUTE, Phase.INSTALL, None),
]


def stopped_in(mode: Mode, phase: Phase, mute: type | None) -> World:
    """A shift off b that goes no further than this phase."""
    world = shift_world(mode, mute)
    if phase is Phase.INSTALL:
        world.slow.add("a")
    if phase is Phase.CLOSE:
        world.hung.add(world.worker("a"))
    leave(world, "b", 100.0)
    world.run(0.5)
    assert world.control.shift is not None and world.control.shift.phase is phase
    return world


def mend(world: World) -> None:
    world.mend()
    world.run(30, step=0.5)


@pytest.mark.parametrize(("mode", "phase", "mute"), PHASES)
def test_a_new_member_is_lost(mode: Mode, phase: Phase, mute: type | None) -> None:
    world = stopped_in(mode, phase, mute)
    old_serves = ReplicaKey(1, 0) in world.drivers
    world.kill_worker("a")
    # a's worker was of the old gear too, so that is broken as well, wherever it still served
    assert not world.drivers
    assert world.detached() == ([ReplicaKey(1, 0)] if old_serves else world.detached())
    mend(world)
    assert world.serving() == "a100:2" and len(world.drivers) == 1


@pytest.mark.parametrize(("mode", "phase", "mute"), PHASES)
def test_an_old_member_is_lost(mode: Mode, phase: Phase, mute: type | None) -> None:
    world = stopped_in(mode, phase, mute)
    epoch = world.control.epoch
    world.take(Heard("b", AgentBye(incarnation="b", reason="killed")))
    assert ReplicaKey(1, 0) not in world.drivers, "the old gear is broken"
    mend(world)
    assert world.serving() == "a100:2"
    if phase is not Phase.CLOSE:
        assert world.control.epoch == epoch, "the shift away from it went on"


@pytest.mark.parametrize(("mode", "phase", "mute"), PHASES)
def test_nothing_answers_any_more(mode: Mode, phase: Phase, mute: type | None) -> None:
    """Every phase has a deadline, and what follows it serves in the end."""
    world = stopped_in(mode, phase, mute)
    world.run(130, step=0.5)
    aborted = [r for r in world.control.history if "took too long" in r.outcome]
    assert aborted or world.control.history[-1].outcome == "committed"
    for drop in [a for a in world.log if isinstance(a, DropShift)]:
        assert drop.reason
    mend(world)
    assert world.serving() == "a100:2" and not world.paused


@pytest.mark.parametrize(
    ("mode", "phase", "mute"),
    [p for p in PHASES if p[0] is Mode.BESIDE or p[1] is Phase.PARK],
)
def test_until_the_cutover_ends_an_abort_leaves_the_old_gear_serving(
    mode: Mode, phase: Phase, mute: type | None
) -> None:
    world = stopped_in(mode, phase, mute)
    world.take(MoveFailed(world.control.epoch, "test"))
    assert world.drivers == {ReplicaKey(1, 0)} and not world.paused
    assert "test" in world.control.history[-1].outcome
    new = [held for held in world.control.holdings if held.epoch == 2]
    assert not new or world.hung, "the new epoch is retired"
    mend(world)
    assert world.serving() == "a100:2"


def test_answers_of_a_shift_that_is_over_are_dropped() -> None:
    world = stopped_in(Mode.BESIDE, Phase.TRANSFER, BeginTransfer)
    epoch = world.control.epoch
    world.take(MoveFailed(epoch, "test"))
    world.run(1)
    assert world.control.epoch > epoch
    for late in (Transferred(epoch), CutOver(epoch), Parked(epoch), MoveFailed(epoch, "late")):
        world.take(late)
        shift = world.control.shift
        assert shift is not None and shift.phase is Phase.TRANSFER


# --------------------------------------------------------------------------------- deadlines


def test_the_transfer_ends_before_the_leaving_member_does() -> None:
    world = shift_world(Mode.BESIDE, mute=BeginTransfer)
    leave(world, "b", grace_s=6.0)
    world.run(4.5)
    assert world.drivers == {ReplicaKey(1, 0)}
    world.run(1.0)  # a second of the notice is kept for the cut-over
    assert world.drivers == {ReplicaKey(2, 0)}
    assert any(isinstance(action, BeginCutover) for action in world.log)


def test_a_transfer_that_never_ends_is_cut_short() -> None:
    world = shift_world(Mode.BESIDE, mute=BeginTransfer)
    world.take(Cordon("b", True))
    world.run(115, step=0.5)
    assert world.drivers == {ReplicaKey(1, 0)}
    world.run(10, step=0.5)
    assert world.drivers == {ReplicaKey(2, 0)}


def test_parking_that_takes_too_long_is_given_up_and_recomputed() -> None:
    world = shift_world(Mode.PARK, mute=ParkAll)
    leave(world, "b", grace_s=4.0)
    world.run(5)
    assert kinds(world) == ["ParkAll", "Detach", "Retire", "Install", "SwitchOver"]


def test_the_table_has_an_end_that_every_phase_can_reach() -> None:
    ends = {phase for phase, after in LEGAL.items() if not after}
    assert ends == {Phase.COMMIT, Phase.ABORT}
    for phase, after in LEGAL.items():
        assert phase in ends or Phase.ABORT in after


@pytest.mark.parametrize("mute", [BeginTransfer, BeginCutover])
def test_asking_for_the_gear_in_place_calls_off_what_has_not_paused_it(mute: type) -> None:
    world = shift_world(Mode.BESIDE, mute)
    assert world.control.current is not None
    here = world.control.current.gear
    other = msgspec.structs.replace(
        here, name="other", replicas=OneStagePerNode().replicas(ONE_NODE)
    )
    world.take(ShiftWanted(other, "test"))
    world.run(1)
    shift = world.control.shift
    assert shift is not None and shift.gear == other
    world.take(ShiftWanted(here, "test"))
    world.run(1)
    if mute is BeginTransfer:
        assert world.control.shift is None
        assert "called off" in world.control.history[-1].outcome
    else:
        assert world.control.shift is shift, "in the pause it is quickest to go on"
    world.mend()
    world.run(5)
    assert world.control.current is not None and world.control.current.gear == here
    assert world.control.pinned == here and not world.paused
