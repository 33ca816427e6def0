"""Many durations in few numbers, so that those of minutes can be joined; never keeps each of them.

Durations are counted in classes, each a tenth longer than the one before: a P95 read from them is
at most a tenth too large.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import ceil, floor, log

_STEP = log(1.1)
_LEAST_S, _MOST_S = 1e-5, 1e5


@dataclass(frozen=True, slots=True)
class Spread:
    """Counts by class, and the sum; empty by default."""

    counts: Mapping[int, int] = field(default_factory=dict)
    total_s: float = 0.0

    @staticmethod
    def of(durations_s: Iterable[float]) -> Spread:
        found = [max(duration, 0.0) for duration in durations_s]
        return Spread(Counter(map(_class_of, found)), sum(found))

    @staticmethod
    def joined(spreads: Iterable[Spread]) -> Spread:
        counts: Counter[int] = Counter()
        total_s = 0.0
        for one in spreads:
            counts.update(one.counts)
            total_s += one.total_s
        return Spread(counts, total_s)

    @property
    def count(self) -> int:
        return sum(self.counts.values())

    @property
    def mean_s(self) -> float | None:
        """None where nothing was counted."""
        return self.total_s / self.count if self.counts else None

    def within(self, limit_s: float) -> float:
        """Share of the durations that are at most so long; 1 where nothing was counted.

        A class counts by its middle.
        """
        met = sum(n for number, n in self.counts.items() if 1.1 ** (number + 0.5) <= limit_s)
        return met / self.count if self.counts else 1.0

    @property
    def p95_s(self) -> float | None:
        """What 95 % of the durations do not exceed; the upper end of its class."""
        wanted, seen = ceil(0.95 * self.count), 0
        for number, count in sorted(self.counts.items()):
            seen += count
            if seen >= wanted:
                return float(1.1 ** (number + 1))
        return None


def _class_of(duration_s: float) -> int:
    return floor(log(min(max(duration_s, _LEAST_S), _MOST_S)) / _STEP)
