"""Gears in their places: which replica was installed under which epoch, by which workers; values.

A replica that stays the same over a shift keeps the epoch and the number it was installed under,
so the replicas of one gear may be of several epochs. A `ReplicaKey` never changes; the number of a
replica in its gear may, with each shift.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from flexslurm.control.members import GpuAt, Members
from flexslurm.gear import Gear, Replica, Slot, replica_slots
from flexslurm.messages import Peer


@dataclass(frozen=True, order=True, slots=True)
class ReplicaKey:
    """The epoch a replica was installed under, and its number in that epoch's gear."""

    epoch: int
    index: int

    def __str__(self) -> str:
        return f"e{self.epoch}r{self.index}"


class SeatedWorker(NamedTuple):
    """A worker that fills a slot, where it is, and where it gives out data."""

    at: GpuAt
    worker: str
    node: str
    address: str
    data_port: int


@dataclass(frozen=True, slots=True)
class InstalledReplica:
    """A replica in its place; seats in slot order."""

    key: ReplicaKey
    replica: Replica
    seats: tuple[SeatedWorker, ...]

    @property
    def workers(self) -> tuple[str, ...]:
        return tuple(seat.worker for seat in self.seats)

    @property
    def agents(self) -> frozenset[str]:
        return frozenset(seat.at.agent for seat in self.seats)

    @property
    def slots(self) -> tuple[Slot, ...]:
        """In the numbers it was installed under."""
        return replica_slots(self.replica, self.key.index)

    def peers(self) -> tuple[Peer, ...]:
        """Who fills its slots."""
        return tuple(
            Peer(slot, seat.worker, seat.address)
            for slot, seat in zip(self.slots, self.seats, strict=True)
        )


def seat_of(members: Members, at: GpuAt) -> SeatedWorker:
    """The seat of the worker that is there; there must be one."""
    record, hello = members.worker_at(at), members.agents[at.agent].hello
    assert record is not None, f"no worker at {at}"
    return SeatedWorker(at, record.worker, hello.node, hello.address, record.data_port)


@dataclass(frozen=True, slots=True)
class InstalledGear:
    """A gear in its place; a replica that was lost has no entry. Never without any replica."""

    gear: Gear
    replicas: Mapping[int, InstalledReplica]
    """By number in the gear."""

    @property
    def placement(self) -> dict[Slot, GpuAt]:
        return {slot: seat.at for slot, seat in self._seats()}

    @property
    def workers(self) -> dict[Slot, str]:
        return {slot: seat.worker for slot, seat in self._seats()}

    def _seats(self) -> Iterable[tuple[Slot, SeatedWorker]]:
        for number, replica in sorted(self.replicas.items()):
            yield from zip(replica_slots(replica.replica, number), replica.seats, strict=True)

    @property
    def keys(self) -> frozenset[ReplicaKey]:
        return frozenset(replica.key for replica in self.replicas.values())

    @property
    def agents(self) -> frozenset[str]:
        return frozenset(agent for replica in self.replicas.values() for agent in replica.agents)

    @property
    def lost(self) -> tuple[int, ...]:
        """Numbers of replicas that are no more."""
        return tuple(n for n in range(len(self.gear.replicas)) if n not in self.replicas)

    @property
    def gpus(self) -> int:
        return sum(len(replica.seats) for replica in self.replicas.values())

    def find(self, key: ReplicaKey) -> InstalledReplica | None:
        return next((one for one in self.replicas.values() if one.key == key), None)

    def of_worker(self, worker: str) -> InstalledReplica | None:
        return next((one for one in self.replicas.values() if worker in one.workers), None)

    def without(self, keys: Iterable[ReplicaKey]) -> InstalledGear | None:
        """What is left when these are gone; None where that is nothing."""
        gone = frozenset(keys)
        left = {number: one for number, one in self.replicas.items() if one.key not in gone}
        return InstalledGear(self.gear, left) if left else None
