"""What the controller decides to have done; the shell performs it, in order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flexslurm.control.installed import InstalledGear, InstalledReplica, ReplicaKey
from flexslurm.messages import Message


@dataclass(frozen=True, slots=True)
class Send:
    """A message to an agent or a worker, by incarnation."""

    to: str
    message: Message


@dataclass(frozen=True, slots=True)
class Detach:
    """Close the drivers of these replicas; their sequences wait with the head."""

    replicas: tuple[ReplicaKey, ...]
    reason: str
    failed: bool = False
    """They could not go on: what was in a step may be why."""


@dataclass(frozen=True, slots=True)
class MeetEpoch:
    """Open the epoch's rendezvous: its workers are about to look for each other."""

    epoch: int


@dataclass(frozen=True, slots=True)
class ForgetEpoch:
    """Drop the epoch's rendezvous keys: nobody may meet there any more."""

    epoch: int


@dataclass(frozen=True, slots=True)
class PlanShift:
    """Work out how to get from the one gear to the other; answered by `ShiftPlanned`."""

    epoch: int
    old: InstalledGear | None
    """What serves; its replicas that are in `new` too, by their keys, stay as they are."""
    new: InstalledGear
    arenas: Mapping[str, int]
    """Bytes that each worker of both gears may use."""
    leaving_s: Mapping[str, float]
    """Seconds that workers on notice have left."""


@dataclass(frozen=True, slots=True)
class ParkAhead:
    """Copy full blocks aside while the replicas that go serve; answered by `ParkedAhead`."""

    epoch: int
    deadline_s: float


@dataclass(frozen=True, slots=True)
class ParkAll:
    """Pause the replicas that go and copy their KV aside; answered by `Parked`."""

    epoch: int


@dataclass(frozen=True, slots=True)
class ParkAway:
    """Pause these replicas and copy their KV to files in this time; answered by `ParkedAway`."""

    replicas: tuple[ReplicaKey, ...]
    deadline_s: float


@dataclass(frozen=True, slots=True)
class DropAway:
    """Forget a `ParkAway`: the replicas go on."""


@dataclass(frozen=True, slots=True)
class BeginTransfer:
    """Move full blocks while the old replicas serve; answered by `Transferred`, or never."""

    epoch: int


@dataclass(frozen=True, slots=True)
class BeginCutover:
    """Pause the replicas that go and move what is left; answered by `CutOver`, or never."""

    epoch: int
    deadline_s: float


@dataclass(frozen=True, slots=True)
class SwitchOver:
    """Serve with these replicas from now on: open the new ones, then close those that go."""

    epoch: int
    gear: InstalledGear
    opened: Mapping[int, InstalledReplica]
    """Those of `gear` that are new, by number."""
    closed: tuple[ReplicaKey, ...]
    """Their sequences go on in the gear, with what was moved of them."""


@dataclass(frozen=True, slots=True)
class DropShift:
    """Forget what was begun for an epoch that is given up; the old replicas go on."""

    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class RoomFree:
    """The memory of what was replaced is free: the epoch's replicas may use all of theirs."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Record:
    """Write this to the journal, on disk before the actions after it."""

    record: dict[str, Any]
    sync: bool = True
    """False: nothing hangs on it, and it is on disk with the next that is awaited."""


@dataclass(frozen=True, slots=True)
class Say:
    """A line for people."""

    text: str
    warning: bool = False


MoveAction = (
    PlanShift
    | ParkAhead
    | ParkAll
    | ParkAway
    | DropAway
    | BeginTransfer
    | BeginCutover
    | SwitchOver
)
"""What moves weights or KV; the head may answer with an event."""
Action = Send | Detach | MeetEpoch | ForgetEpoch | MoveAction | DropShift | RoomFree | Record | Say
