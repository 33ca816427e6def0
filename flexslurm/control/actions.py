"""What the controller decides to have done; the shell performs it, in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flexslurm.gear import Gear
from flexslurm.messages import Message, Peer


@dataclass(frozen=True, slots=True)
class Send:
    """A message to an agent or a worker, by incarnation."""

    to: str
    message: Message


@dataclass(frozen=True, slots=True)
class Detach:
    """Close the drivers of the serving epoch; their sequences wait with the head."""

    reason: str


@dataclass(frozen=True, slots=True)
class OpenEpoch:
    """Start drivers for an installed gear; waiting sequences go on there."""

    epoch: int
    gear: Gear
    peers: tuple[tuple[Peer, ...], ...]
    """By replica: all slots in slot order, with the worker that fills each."""


@dataclass(frozen=True, slots=True)
class MeetEpoch:
    """Open the epoch's rendezvous: its workers are about to look for each other."""

    epoch: int


@dataclass(frozen=True, slots=True)
class ForgetEpoch:
    """Drop the epoch's rendezvous keys: nobody may meet there any more."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Record:
    """Write this to the journal, on disk before the actions after it."""

    record: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Say:
    """A line for people."""

    text: str
    warning: bool = False


Action = Send | Detach | OpenEpoch | MeetEpoch | ForgetEpoch | Record | Say
