"""The groups one worker is in for one epoch; never decides when they end.

Stages are joined by links: groups of two, the sender first, one for each rank that takes hidden
state from another. A link carries broadcasts from the sender, because gloo's send and receive can
only be waited for to the end, and a collective can be called back. A lost peer breaks its own links
and no others; who is not touched goes on until it is told.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from flexslurm.engine.groups import Group, Network
from flexslurm.engine.rendezvous import HeadStore
from flexslurm.errors import StaleEpoch
from flexslurm.gear import Replica, Slot


@dataclass(frozen=True, slots=True)
class Route:
    """A slot's neighbours, by rank in the replica (index in slot order)."""

    rank: int
    source: int | None
    """Who sends the hidden state here; None at the first stage."""
    targets: tuple[int, ...]
    """Whom it is sent to; empty at the last stage, and at ranks that nobody takes from."""
    samples: bool
    """Whether this rank chooses the tokens and answers the head."""


def route(replica: Replica, slot: Slot) -> Route:
    """Rank r of a stage takes from rank r modulo the sender's TP degree: all hold the same."""
    sizes = [stage.tp for stage in replica.stages]
    first = [sum(sizes[:index]) for index in range(len(sizes))]
    stage, tp_rank = slot.stage, slot.tp_rank
    assert 0 <= stage < len(sizes) and 0 <= tp_rank < sizes[stage], slot
    source = None if stage == 0 else first[stage - 1] + tp_rank % sizes[stage - 1]
    targets: tuple[int, ...] = ()
    if stage + 1 < len(sizes):
        takers = range(tp_rank, sizes[stage + 1], sizes[stage])
        targets = tuple(first[stage + 1] + taker for taker in takers)
    samples = stage + 1 == len(sizes) and tp_rank == 0
    return Route(first[stage] + tp_rank, source, targets, samples)


class EpochGroups:
    """The groups of one slot; `abort` may come at any time from any thread, also while forming."""

    def __init__(self, epoch: int, replica: Replica, slot: Slot, network: Network) -> None:
        self._prefix = f"{epoch}/r{slot.replica}"
        self._slot, self._network = slot, network
        self._tp_size = replica.stages[slot.stage].tp
        self._route = route(replica, slot)
        self._lock = threading.Lock()
        self._aborted = False
        self._all: list[Group] = []
        self.tp: Group | None = None
        """Of the stage's ranks; None with one."""
        self.source: Group | None = None
        """The link that the hidden state comes by."""
        self.targets: tuple[Group, ...] = ()
        """The links it leaves by."""

    def form(self, store: HeadStore) -> None:
        """Form all, in an order in which nobody waits in a circle: by stage, the sender's order."""
        slot, here = self._slot, self._route
        if self._tp_size > 1:
            name = f"{self._prefix}/s{slot.stage}"
            self.tp = self._formed(store, name, slot.tp_rank, self._tp_size)
        if here.source is not None:
            self.source = self._formed(store, f"{self._prefix}/{here.source}-{here.rank}", 1, 2)
        self.targets = tuple(
            self._formed(store, f"{self._prefix}/{here.rank}-{target}", 0, 2)
            for target in here.targets
        )

    def _formed(self, store: HeadStore, name: str, rank: int, size: int) -> Group:
        group = Group(name, rank, size, self._network)
        with self._lock:
            if self._aborted:
                raise StaleEpoch(f"{name}: aborted")
            self._all.append(group)
        group.form(store)
        return group

    def abort(self) -> None:
        """Make every operation of these groups fail, here and at the peers; idempotent."""
        with self._lock:
            self._aborted = True
            groups = list(self._all)
        for group in groups:
            group.abort()

    def close(self, timeout_s: float) -> tuple[str, ...]:
        """Close all; returns the names of groups of which something is left."""
        self.abort()
        self.tp = self.source = None
        self.targets = ()
        end = time.monotonic() + timeout_s
        left = tuple(
            group.name for group in self._all if not group.close(max(0.0, end - time.monotonic()))
        )
        self._all.clear()
        return left
