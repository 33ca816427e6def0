"""Parks live KV in files when all GPUs are taken, and lends it to what serves next.

The deciding is in `control.farewell` and `parking`; what is stored, in `stored`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from flexslurm.control.events import ParkedAway
from flexslurm.control.installed import InstalledGear, ReplicaKey
from flexslurm.engine.ownership import ReplicaAt, ShardMap
from flexslurm.engine.parking import drop_file
from flexslurm.head.ledger import Ledger
from flexslurm.head.move_plan import replica_at
from flexslurm.head.moving import OldEnd, Tickets
from flexslurm.head.parking import Parking
from flexslurm.head.replicas import Replicas
from flexslurm.head.storage import Storage
from flexslurm.head.stored import Part, Stored
from flexslurm.messages import KvParked, Message, UnparkKv

log = logging.getLogger(__name__)

MOST_FILES = 64
"""That one worker writes of one replica."""
_AGAIN_S, _LATE_S = 1.0, 30.0
_LEAST_S = 1.0
_SLACK = 1.5
"""Parking is begun this much earlier than its bytes need: disks are slower than they say."""


@dataclass(slots=True)
class _UnderWay:
    keys: tuple[ReplicaKey, ...]
    parking: Parking
    told: bool = False


class Away:
    """`storage` None: there is no directory, and nothing is ever parked."""

    def __init__(
        self,
        replicas: Replicas,
        ledger: Ledger,
        storage: Storage | None,
        *,
        shards: Callable[[], ShardMap],
        rate_bytes_per_s: Callable[[Iterable[str]], float],
        tickets: Tickets,
        send: Callable[[str, Message], object],
        now: Callable[[], float],
    ) -> None:
        self._replicas, self._ledger, self._storage = replicas, ledger, storage
        self._shards, self._rate, self._tickets = shards, rate_bytes_per_s, tickets
        self._send, self._now = send, now
        self._places: dict[ReplicaKey, ReplicaAt] = {}
        self._speed = 0.0
        self._under: _UnderWay | None = None
        self._doomed: dict[Part, tuple[float, float]] = {}
        """Files that nobody wants: when they are dropped next, and for the last time."""
        self.stored = Stored("" if storage is None else str(storage.path))

    def needed_s(self, current: InstalledGear) -> float | None:
        """How long parking all live KV takes; None where it cannot be parked."""
        storage = self._storage
        if storage is None or not storage.good_for(current.agents):
            return None
        shards, most = self._shards(), 0
        for one in current.replicas.values():
            driver = self._replicas.open.get(one.key)
            self._places[one.key] = at = replica_at(one)
            if driver is not None:
                blocks = driver.load().used_blocks
                most = max(most, *(blocks * shards.block_bytes(held) for held in at.holdings))
        stages = (s for one in current.replicas.values() for s in one.replica.stages)
        self._speed = self._rate(stage.gpu_type for stage in stages)
        return None if most == 0 else _LEAST_S + _SLACK * most / self._speed

    # ------------------------------------------------------------------ parking

    def park(self, keys: Sequence[ReplicaKey], deadline_s: float) -> ParkedAway | None:
        assert self._storage is not None, "there is nowhere to park"
        found = tuple(key for key in keys if key in self._replicas.open)
        drivers = [self._replicas.open[key] for key in found]
        ends = tuple(
            OldEnd(self._places[key], driver) for key, driver in zip(found, drivers, strict=True)
        )
        for driver in drivers:
            driver.pause()
        parking = Parking(
            ends,
            self._shards().block_tokens,
            self._tickets,
            deadline_s=deadline_s,
            directory=str(self._storage.path),
            rate_bytes_per_s=self._speed,
            most_asks=MOST_FILES,
        )
        self._under = _UnderWay(found, parking)
        return self.advance()

    def advance(self) -> ParkedAway | None:
        """Go on; the answer to `park` when it is there, once."""
        under = self._under
        if under is None:
            return None
        under.parking.advance()
        for worker, message in under.parking.outbox:
            self._send(worker, message)
        under.parking.outbox.clear()
        if under.told or not under.parking.done:
            return None
        under.told = True
        return ParkedAway()

    @property
    def awaits_steps(self) -> bool:
        return self._under is not None

    def take(self, answer: KvParked) -> None:
        if self._under is not None:
            self._under.parking.take(answer)

    def before_detach(self, keys: Iterable[ReplicaKey]) -> None:
        """These drivers are about to be closed: as they are parked, or lost on the way."""
        under = self._under
        if under is None:
            return
        for key in keys:
            if key not in under.keys:
                continue
            number = under.keys.index(key)
            kept, end = under.parking.kept(number), under.parking.old[number]
            parts = under.parking.parts
            self.stored.add(self._now(), end.at, kept, parts)
            useful = {part for seq_id in kept for part in parts[seq_id]}
            mine = {
                (worker, epoch, ticket)  # of sequences that ended meanwhile too
                for found in parts.values()
                for worker, epoch, ticket in found
                if epoch == end.at.epoch and worker in end.at.workers
            }
            self._drop_files(mine - useful)
            log.info("%d sequences of replica %s are parked in files", len(kept), key)
            end.frozen, end.pullable = {}, False
            under.parking.lose(number)
        if not any(end.frozen is None for end in under.parking.old):
            self._under = None

    def drop(self) -> None:
        """The members stay after all: go on."""
        under, self._under = self._under, None
        if under is None:
            return
        for key in under.keys:
            driver = self._replicas.open.get(key)
            if driver is not None:
                driver.resume()
        for worker, epoch in under.parking.workers():
            self._send(worker, UnparkKv(epoch=epoch))  # what is being written too
        self._drop_files([part for parts in under.parking.parts.values() for part in parts])

    # ------------------------------------------------------------------ what is stored

    def ends(self) -> tuple[OldEnd, ...]:
        """What waits in files, as replicas to move from."""
        self.tidy()
        return self.stored.ends()

    def tidy(self, done: Iterable[str] = ()) -> None:
        """Drop what nobody waits for."""
        if self.stored:
            self._drop_files(self.stored.prune(self._now(), self._ledger.waits, frozenset(done)))
        now = self._now()
        for part, (next_s, last_s) in list(self._doomed.items()):
            if now >= next_s:
                self._drop_file(part)
                self._doomed[part] = now + _AGAIN_S, last_s
            if now >= last_s:
                del self._doomed[part]

    def _drop_files(self, parts: Iterable[Part]) -> None:
        """Now, and for a while again: a worker that does not know yet may just finish one."""
        now = self._now()
        for part in parts:
            self._drop_file(part)
            self._doomed[part] = now + _AGAIN_S, now + _LATE_S

    def _drop_file(self, part: Part) -> None:
        assert self._storage is not None
        try:
            drop_file(Path(self._storage.path), *part)
        except OSError as error:
            log.warning("parked KV of %s stays: %s", part[0], error)
