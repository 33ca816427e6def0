"""KV that waits in files for GPUs to come back, and what may be dropped of it; touches no file.

It is dropped with its request, when the sequence goes on without it, and when it is too old.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from flexslurm.engine.load import RunningKv
from flexslurm.engine.ownership import ReplicaAt
from flexslurm.head.moving import OldDriver, OldEnd

AGE_S = 3600.0

Part = tuple[str, int, int]
"""Worker, epoch and ticket: what names a file."""


class _Closed:
    """The driver of a replica that is no more."""

    @property
    def idle(self) -> bool:
        return True

    def running_kv(self) -> list[RunningKv]:
        return []


@dataclass(slots=True)
class _Sequence:
    at: ReplicaAt
    kv: RunningKv
    parts: frozenset[Part]
    since: float


class Stored:
    """Sequences by name; several may share a file."""

    def __init__(self, directory: str, age_s: float = AGE_S) -> None:
        self.directory = directory
        self._age_s = age_s
        self._sequences: dict[str, _Sequence] = {}

    def add(
        self,
        now: float,
        at: ReplicaAt,
        kept: Mapping[str, RunningKv],
        parts: Mapping[str, Sequence[Part]],
    ) -> None:
        """What was parked of a replica that is about to be closed."""
        for seq_id, kv in kept.items():
            self._sequences[seq_id] = _Sequence(at, kv, frozenset(parts.get(seq_id, ())), now)

    def __contains__(self, seq_id: object) -> bool:
        return seq_id in self._sequences

    def __bool__(self) -> bool:
        return bool(self._sequences)

    def ends(self) -> tuple[OldEnd, ...]:
        """As replicas to move from."""
        by_replica: dict[tuple[int, int], tuple[ReplicaAt, dict[str, RunningKv]]] = {}
        for seq_id, one in self._sequences.items():
            key = (one.at.epoch, one.at.index)
            by_replica.setdefault(key, (one.at, {}))[1][seq_id] = one.kv
        driver: OldDriver = _Closed()
        return tuple(
            OldEnd(at, driver, frozen=found, directory=self.directory)
            for _, (at, found) in sorted(by_replica.items())
        )

    def names(self) -> frozenset[str]:
        return frozenset(self._sequences)

    def prune(
        self, now: float, waits: Callable[[str], bool], done: Collection[str] = ()
    ) -> list[Part]:
        """Forget what no longer waits for it; the files that hold nothing any more."""
        before = self._parts()
        self._sequences = {
            seq_id: one
            for seq_id, one in self._sequences.items()
            if seq_id not in done and waits(seq_id) and now - one.since < self._age_s
        }
        return sorted(before - self._parts())

    def _parts(self) -> set[Part]:
        return {part for one in self._sequences.values() for part in one.parts}
