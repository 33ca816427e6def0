"""The values a `Mover` works with: phases, the ends of a move, what is under way; no behaviour."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from flexslurm.engine.load import RunningKv, SchedulerLoad
from flexslurm.engine.ownership import ReplicaAt


class MoverPhase(StrEnum):
    """Where a move of sequences is; what may follow is in LEGAL."""

    ROUNDS = "rounds"
    LAST = "last"
    DONE = "done"
    FAILED = "failed"


_P = MoverPhase
LEGAL: Mapping[MoverPhase, frozenset[MoverPhase]] = {
    _P.ROUNDS: frozenset({_P.LAST, _P.FAILED}),
    _P.LAST: frozenset({_P.DONE, _P.FAILED}),
    _P.DONE: frozenset(),
    _P.FAILED: frozenset(),
}


@dataclass(slots=True)
class Tickets:
    """Numbers of what is asked of workers; never the same twice in the life of a head."""

    next: int = 1

    def take(self, count: int) -> int:
        """The first of so many."""
        first, self.next = self.next, self.next + count
        return first


class OldDriver(Protocol):
    """What is asked of a driver whose sequences move."""

    @property
    def idle(self) -> bool: ...
    def running_kv(self) -> list[RunningKv]: ...


class NewDriver(Protocol):
    """What is asked of a driver that sequences move to."""

    @property
    def closed(self) -> bool: ...
    def reserve(self, seq_id: str, count: int) -> tuple[int, ...] | None: ...
    def release(self, seq_id: str) -> None: ...
    def load(self) -> SchedulerLoad: ...


@dataclass(slots=True)
class OldEnd:
    """An old replica. Once `frozen`, its driver is closed, and these were its sequences."""

    at: ReplicaAt
    driver: OldDriver
    frozen: dict[str, RunningKv] | None = None
    pullable: bool = True
    """Whether its pages can still be had: not if it lost a member."""
    directory: str | None = None
    """Where its workers parked its pages in files; None: they have them."""

    def view(self) -> dict[str, RunningKv]:
        if self.frozen is not None:
            return self.frozen
        return {kv.seq_id: kv for kv in self.driver.running_kv()}

    @property
    def idle(self) -> bool:
        return self.frozen is not None or self.driver.idle


@dataclass(slots=True)
class NewEnd:
    """A replica that sequences move to."""

    at: ReplicaAt
    driver: NewDriver


@dataclass(frozen=True, slots=True)
class MoverSettings:
    """Bounds of a move."""

    rate_bytes_per_s: float = 0.0
    """In ROUNDS, for each source; 0: no bound. LAST has none: streams stand still."""
    pull_timeout_s: float = 30.0
    batch_bytes: int = 64 << 20
    """About so much is asked for at once between two replicas."""
    most_rounds: int = 9
    """Passes over all sequences; the first moves all there is, each later one what came since."""
    most_last_blocks: int | None = 4
    """A sequence that lacks more than these in LAST is recomputed from what it has; None: all."""
    most_tries: int = 3


@dataclass(slots=True)
class Move:
    """One sequence on its way."""

    seq_id: str
    old: int
    new: int
    arrival: int
    blocks: list[int] = field(default_factory=list)
    """Reserved in the new replica."""
    done: int = 0
    """The first so many of its blocks are there."""
    tries: int = 0
    in_flight: bool = False
    stuck: bool = False
    """No more of it is moved."""
    gone: bool = False
    """It gave way or has ended: its blocks go back as soon as nothing fills them."""

    @property
    def is_out(self) -> bool:
        return self.stuck or self.gone


@dataclass(slots=True)
class PullBatch:
    """Blocks that are pulled together, and the answers that are missing."""

    pieces: list[tuple[Move, int, int]]
    """A sequence, how many blocks of it, and its tenure when they were asked for."""
    tickets: set[int]
    expires_at: float
    failed: set[int] = field(default_factory=set)
