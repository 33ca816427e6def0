"""Makes the gear table of a service, within a bound on its size and on the time it takes.

Where the pool has too many allocations, the table holds the full pool's neighbourhood: what is left
when Slurm takes a pilot or two of each kind, and what the first few of each make.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from math import prod

from flexslurm.config.service import Service
from flexslurm.gear import Shape, Signature
from flexslurm.planner.planner import Planner
from flexslurm.planner.table import GearTable
from flexslurm.planner.tabulate import PilotKind, make_table, pilots_signature

MOST_ENTRIES = 10_000
MOST_S = 60.0
"""After this long the next smaller table is made."""

Progress = Callable[[int, int], None]


class _TooLong(Exception):
    """The table is not done in time."""


def pilot_kinds(service: Service) -> tuple[PilotKind, ...]:
    """The service's pilots by what they hold."""
    kinds: Counter[Signature] = Counter()
    for entry in service.pool:
        shape = Shape(entry.gpu_type, entry.gpus)
        kinds[Signature(((shape, entry.nodes),))] += entry.most
    return tuple(PilotKind(nodes, kinds[nodes]) for nodes in sorted(kinds, key=lambda s: s.counts))


def full_pool(service: Service) -> Signature:
    """The allocation with every pilot of the service's pool."""
    return _all_of(pilot_kinds(service))


def _all_of(kinds: Sequence[PilotKind]) -> Signature:
    return pilots_signature(kinds, [kind.count for kind in kinds])


def selections(kinds: Sequence[PilotKind], most: int) -> Iterator[tuple[PilotKind, ...]]:
    """What tables may hold, the largest first; each has the full pool, none over `most` entries.

    A part of the pool that comes and goes as one is a pilot to the table.
    """
    if entries(kinds) <= most:
        yield tuple(kinds)
    for margin in (2, 1):
        apart = [PilotKind(kind.nodes, min(margin, kind.count)) for kind in kinds]
        rest = [PilotKind(k.nodes, k.count - a.count) for k, a in zip(kinds, apart, strict=True)]
        chosen = tuple(apart)
        if any(kind.count for kind in rest):
            chosen = (PilotKind(_all_of(rest), 1), *chosen)
        if entries(chosen) <= most:
            yield chosen
    yield (PilotKind(_all_of(kinds), 1),)


def entries(kinds: Sequence[PilotKind]) -> int:
    return prod(kind.count + 1 for kind in kinds)


def make_service_table(
    planner: Planner,
    kinds: Sequence[PilotKind],
    progress: Progress,
    *,
    most: int = MOST_ENTRIES,
    most_s: float = MOST_S,
    now: Callable[[], float] = time.monotonic,
) -> bytes:
    """The largest table that is done in time; that of the full pool alone is always made."""
    *tables, last = selections(kinds, most)
    for chosen in tables:
        deadline = now() + most_s

        def watched(done: int, total: int, deadline: float = deadline) -> None:
            progress(done, total)
            if done < total and now() > deadline:
                raise _TooLong

        try:
            return make_table(planner, chosen, watched)
        except _TooLong:
            continue
    return make_table(planner, last, progress)


def fits(table: GearTable, inputs: str, kinds: Sequence[PilotKind]) -> bool:
    """Whether the table was made from the same inputs, for pilots of these kinds."""
    if table.header.inputs != inputs or table.find(_all_of(kinds)) is None:
        return False
    return entries(kinds) > MOST_ENTRIES or all(table.find(k.nodes) is not None for k in kinds)
