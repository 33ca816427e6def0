"""What the pool keeper knows and wants, as values; nothing here decides or acts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from flexslurm.slurm.jobs import JobInfo
from flexslurm.wire.service_dir import Pilot


@dataclass(frozen=True, slots=True)
class PilotShape:
    """What one pilot holds."""

    gpus: int
    """On each of its nodes."""
    nodes: int = 1


@dataclass(frozen=True, slots=True)
class PoolEntry:
    """An entry of the pool: pilots of one GPU type in one partition."""

    gpu_type: str
    partition: str | None
    shapes: tuple[PilotShape, ...]
    """The one liked best first."""
    least: int
    wanted: int
    """At the start; the load moves it between `least` and `most`."""
    most: int
    walltime_s: float | None = None
    handover_s: float | None = None
    """How long before its walltime a pilot's successor is submitted; None: as waits have been."""


@dataclass(frozen=True, slots=True)
class KeeperSettings:
    """Times in seconds; see `KeepingSettings` of the service file."""

    retry_s: float = 15.0
    retry_most_s: float = 900.0
    quick_death_s: float = 60.0
    failures: int = 3
    give_up_s: float = 3600.0
    waiting_s: float = 1800.0
    unsure_s: float = 60.0
    """How long after a submission without an answer its job may still show up."""
    unknown_s: float = 60.0
    """How long Slurm must say that it does not know a job before it is taken for ended."""
    hole_s: float = 120.0
    """A job for a hole that waits longer has missed it."""
    most_unsure: int = 2
    """Submissions without an answer that may be open at once."""


@dataclass(frozen=True, slots=True)
class Look:
    """One answer of Slurm about all our jobs."""

    infos: Mapping[str, JobInfo]
    """By the ids that were asked for."""
    ours: tuple[JobInfo, ...] = ()
    """All jobs of the service that are not over, by whatever id."""


@dataclass(frozen=True, slots=True)
class Present:
    """What the head sees of a fragment."""

    ready: bool
    """All its agents are here and none of them is faulty or leaving."""
    serving: bool
    """Part of the gear that serves."""


class PilotStage(StrEnum):
    """Where a kept pilot is."""

    INTENT = "intent"
    """Written down, not yet submitted, or nobody knows whether it was."""
    WAITING = "waiting"
    """Submitted; it has not run yet, or is being requeued."""
    RUNNING = "running"
    ENDING = "ending"
    """It shall end, by our own doing."""


@dataclass(slots=True)
class KeptPilot:
    """A pilot and what is known of its job. Times are the head's."""

    pilot: Pilot
    since: float
    stage: PilotStage = PilotStage.INTENT
    unsure: bool = False
    """An intent of which nobody knows whether it was carried out."""
    info: JobInfo | None = None
    running_since: float | None = None
    unknown_since: float | None = None
    ending: str = ""
    """Why it shall end."""
    cancel: bool = False
    """To be cancelled with the next call."""
    joined: bool = False
    """Its agents have been ready since it began to run."""
    here: bool = False
    """It has agents that speak to the head."""
    serving: bool = False
    draining: bool = False
    """The service has been told to move off it."""
    drained: bool = False
    """An operator has drained it: its place is not filled again."""
    ends_at: float | None = None
    """By its walltime."""
    part_with: frozenset[str] = frozenset()
    """Nodes that it is to give back, and whose agents have ended."""
    told: frozenset[str] = frozenset()
    """What has been said of it."""

    @property
    def fragment(self) -> str:
        return self.pilot.fragment


# ---------------------------------------------------------------------------------- outgoing


@dataclass(frozen=True, slots=True)
class Tell:
    """A line for people, journalled."""

    text: str
    warning: bool = False
    record: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Drain:
    """Move the service off a fragment; its pilot ends when nothing of it is used."""

    fragment: str
    why: str


@dataclass(frozen=True, slots=True)
class Forget:
    """A fragment is no more: whatever was said of it (cordons) does not hold for the next."""

    fragment: str


@dataclass(frozen=True, slots=True)
class PilotEnded:
    """A pilot's job has ended, as far as is known."""

    fragment: str
    why: str


Word = Tell | Drain | Forget | PilotEnded


@dataclass(frozen=True, slots=True)
class Submit:
    """Submit this pilot, once it is written down; answer with its fate."""

    pilot: Pilot


@dataclass(frozen=True, slots=True)
class CancelJobs:
    """End these jobs, in one call."""

    jobs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Resize:
    """Leave a running job these nodes only; answer whether Slurm did."""

    fragment: str
    job: str
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SeekHoles:
    """The next of the calls that show where a short job would fit."""


Call = Submit | CancelJobs | Resize | SeekHoles
"""What asks Slurm: one at a time."""
