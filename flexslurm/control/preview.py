"""A shift before it is begun: who would be where; starts nothing."""

from __future__ import annotations

from collections.abc import Mapping

from flexslurm.control.actions import PlanShift
from flexslurm.control.installed import (
    InstalledGear,
    InstalledReplica,
    ReplicaKey,
    SeatedWorker,
)
from flexslurm.control.members import GpuAt, Members
from flexslurm.control.observing import GearSource
from flexslurm.errors import CapacityError
from flexslurm.gear import Gear, Slot, replica_slots
from flexslurm.planner.placement import match_replicas


def place_gear(
    gear: Gear, planner: GearSource, members: Members, current: InstalledGear | None
) -> dict[Slot, GpuAt] | None:
    """GPUs for a gear, of members that are to stay if these can hold it; None: none can."""
    for leaving in (False, True):
        try:
            return planner.place(gear, members.usable(leaving=leaving), current)
        except CapacityError:
            continue
    return None


def kept_replicas(
    old: InstalledGear | None, gear: Gear, placement: Mapping[Slot, GpuAt]
) -> dict[int, InstalledReplica]:
    """Replicas that stay as they are where they are, by their numbers in the new gear."""
    if old is None:
        return {}
    same = match_replicas(old.gear, old.placement, gear, placement)
    return {new: old.replicas[before] for new, before in same.items()}


def preview_shift(
    now: float,
    epoch: int,
    members: Members,
    old: InstalledGear | None,
    gear: Gear,
    placement: Mapping[Slot, GpuAt],
    memory_fraction: float,
) -> PlanShift:
    """What the shell would be asked to plan; workers that are not there yet are made up."""
    replicas = kept_replicas(old, gear, placement)
    for number, one in enumerate(gear.replicas):
        if number not in replicas:
            seats = tuple(_seat(members, placement[slot]) for slot in replica_slots(one, number))
            replicas[number] = InstalledReplica(ReplicaKey(epoch, number), one, seats)
    new = InstalledGear(gear, dict(sorted(replicas.items())))
    return shift_request(now, epoch, members, old, new, memory_fraction)


def shift_request(
    now: float,
    epoch: int,
    members: Members,
    old: InstalledGear | None,
    new: InstalledGear,
    memory_fraction: float,
) -> PlanShift:
    """The facts about the members of both gears that a plan of the moves depends on."""
    both = [*new.replicas.values(), *(old.replicas.values() if old is not None else ())]
    at = {seat.worker: seat.at for one in both for seat in one.seats}
    ends = {worker: members.agents[place.agent].leaves_at for worker, place in at.items()}
    return PlanShift(
        epoch,
        old,
        new,
        arenas={w: members.arena_bytes(place, memory_fraction) for w, place in at.items()},
        leaving_s={w: max(end - now, 0.0) for w, end in ends.items() if end is not None},
    )


def _seat(members: Members, at: GpuAt) -> SeatedWorker:
    record, hello = members.worker_at(at), members.agents[at.agent].hello
    if record is None:
        return SeatedWorker(at, f"{hello.fragment}:{at.gpu}", hello.node, hello.address, 1)
    return SeatedWorker(at, record.worker, hello.node, hello.address, record.data_port or 1)
