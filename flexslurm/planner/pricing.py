"""The pipeline that is worth most beyond the price of its groups; proves that none is missing.

For S stages, a batch and a bound on the step time, a pipeline's worth is fixed and each stage kind
can take so many layers: the cheapest pipeline is a knapsack that covers the model's layers with S
stages. Bounds are looked at in narrow intervals: worth at the lower end, layers at the upper, so
that nothing between is overlooked. Most intervals are ruled out by a relaxation in which stages may
be split in any proportion (the lower hull of price over layers).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from flexslurm.planner.problem import Floats, Ints, Need, Problem, StageKind, Tier

COARSE, FINE = 1.03, 1.0015
"""Ratio of the ends of an interval, before and after the relaxation has ruled most out."""


class Priced(NamedTuple):
    """What pricing found."""

    needs: list[Need]
    """Pipelines worth more than their price, the best of each depth and batch."""
    excess: float
    """No pipeline is worth more than its price times one plus this."""


class Pricer:
    """Prices pipelines over some stage kinds; keeps what does not depend on the prices."""

    def __init__(
        self, problem: Problem, kinds: Sequence[StageKind], tier: Tier, max_depth: int
    ) -> None:
        self.problem, self.tier = problem, tier
        self.kinds = tuple(kinds)
        self.grids = [
            grid
            for depth in range(1, min(max_depth, problem.layers) + 1)
            for batch in self._batches(depth)
            if (grid := _Grid.of(problem, self.kinds, depth, batch, tier)) is not None
        ]

    def _batches(self, depth: int) -> Iterator[int]:
        for batch in self.problem.batches(depth):
            yield batch
            if not self.tier.context:
                return

    def price(self, prices: Mapping[StageKind, float], tolerance: float) -> Priced:
        """Pipelines worth more than their price; those within `tolerance` of it count as not.

        Kinds without a price are not to be had.
        """
        which = [i for i, kind in enumerate(self.kinds) if kind in prices]
        cost = np.array([prices[self.kinds[i]] for i in which])
        needs: dict[Need, None] = {}
        excess = 0.0
        for grid in self.grids:
            found, most = grid.best(which, cost, tolerance)
            excess = max(excess, most)
            needs.update(dict.fromkeys(found))
        return Priced(list(needs), excess)


class _Grid:
    """All bounds on the step of pipelines of one depth and batch."""

    def __init__(
        self, problem: Problem, kinds: Sequence[StageKind], depth: int, batch: int
    ) -> None:
        self.problem, self.kinds = problem, kinds
        self.depth, self.batch = depth, batch
        self.times: list[Floats] = []
        """By kind `[lo, hi]`, infinite where a stage is not allowed."""
        self.coarse = np.empty(0)

    @classmethod
    def of(
        cls, problem: Problem, kinds: Sequence[StageKind], depth: int, batch: int, tier: Tier
    ) -> _Grid | None:
        """None where no pipeline fits."""
        grid = cls(problem, kinds, depth, batch)
        slots = -(-batch // depth)
        least = max(1, problem.min_blocks(batch, tier))
        full = problem.full_for_ttft(depth, tier)
        bound = problem.slowest_for_tpot(depth, tier)
        for kind in kinds:
            time = problem.times(kind, slots)
            allowed = (problem.blocks(kind) >= least) & (time <= bound)
            if np.isfinite(full):
                allowed &= problem.times(kind, slots, full=True) <= full
            grid.times.append(np.where(allowed, time, np.inf))
        finite = np.concatenate([time[np.isfinite(time)] for time in grid.times])
        if len(finite) == 0:
            return None
        # No stage is faster than the fastest with its share of the layers.
        share = -(-problem.layers // depth)
        low = min(grid._fastest(time, share) for time in grid.times)
        high = float(finite.max())
        if not np.isfinite(low):
            return None
        steps = max(1, int(np.ceil(np.log(high / low) / np.log(COARSE))))
        grid.coarse = np.array([low * COARSE**step for step in range(steps + 1)])
        grid.coarse[-1] = max(grid.coarse[-1], high)
        grid.longest = np.array([grid._longest(time, grid.coarse[1:]) for time in grid.times])
        return grid

    longest: Ints
    """`[kind, interval]`: the most layers of one stage within the interval's upper end."""

    def _fastest(self, time: Floats, layers: int) -> float:
        size = self.problem.layers + 1
        starts = np.arange(size - layers)
        return float(time[starts, starts + layers].min())

    def _longest(self, time: Floats, bounds: Floats) -> Ints:
        """Most layers of a stage within each bound, over all starts."""
        size = len(time)
        best = [np.diagonal(time, n).min() for n in range(1, size)]
        result: Ints = np.searchsorted(np.maximum.accumulate(best), bounds, side="right")
        return result

    def best(
        self, which: Sequence[int], cost: Floats, tolerance: float
    ) -> tuple[list[Need], float]:
        """Pipelines of the kinds `which` worth more than they cost, and the largest excess."""
        low, high = self.coarse[:-1], self.coarse[1:]
        ceiling = self._worth(low)
        wanted = ceiling > self._hull(cost, self.longest[which]) * (1 + tolerance)
        if not wanted.any():
            return [], 0.0
        fine = np.concatenate(
            [_ladder(a, b) for a, b in zip(low[wanted], high[wanted], strict=True)]
        )
        starts, ends = fine[:, 0], fine[:, 1]
        longest = np.array([self._longest(self.times[i], ends) for i in which])
        wanted = self._worth(starts) > self._hull(cost, longest) * (1 + tolerance)
        starts, ends = starts[wanted], ends[wanted]
        if len(starts) == 0:
            return [], 0.0
        cheapest, trace = self._cover(which, cost, ends)
        with np.errstate(divide="ignore", invalid="ignore"):
            excess = np.where(np.isfinite(cheapest), self._worth(starts) / cheapest - 1, -1.0)
            gain = np.where(np.isfinite(cheapest), self._worth(ends) - cheapest, -np.inf)
        needs = []
        best = int(gain.argmax())
        if gain[best] > 0:
            needs.append(self._need(trace, best))
        ratio = int(np.where(gain > 0, excess, -1).argmax())
        if gain[ratio] > 0:
            needs.append(self._need(trace, ratio))
        return needs, max(0.0, float(excess.max()))

    def _worth(self, bounds: Floats) -> Floats:
        cycle = self.problem.cycle_s(self.depth, bounds)
        return np.asarray(self.problem.tokens_per_s(self.batch, cycle))

    def _hull(self, cost: Floats, longest: Ints) -> Floats:
        """By interval, a lower bound on the cost of covering the layers with `depth` stages.

        The dual of the relaxation: any price of a layer gives a bound, and slopes between two
        kinds include the best.
        """
        layers, depth = self.problem.layers, self.depth
        best = np.where(longest.max(axis=0) * depth >= layers, 0.0, np.inf)
        usable = np.where(longest > 0, cost[:, None], np.inf)
        with np.errstate(divide="ignore", invalid="ignore"):
            for a in range(len(cost)):
                gap = longest - longest[a]
                slopes = np.where(gap != 0, (cost - cost[a])[:, None] / gap, np.nan)
                # The price of a layer at which `a` lies on the hull, if it does.
                slope = np.where(longest > longest[a], slopes, np.inf).min(axis=0)
                slope = np.where(np.isfinite(slope) & (slope > 0), slope, 0.0)
                bound = slope * layers + depth * (usable - slope * longest).min(axis=0)
                best = np.maximum(best, np.where(np.isfinite(bound), bound, 0.0))
        return best

    def _cover(self, which: Sequence[int], cost: Floats, bounds: Floats) -> tuple[Floats, _Trace]:
        """By bound, the least cost of exactly `depth` stages that cover all layers, and a trace."""
        size = self.problem.layers + 1
        starts = [self._starts(self.times[i], bounds) for i in which]
        trace = _Trace([self.kinds[i] for i in which], starts)
        reach = np.full((len(bounds), size), np.inf)
        reach[:, 0] = 0.0
        for stage in range(self.depth):
            if stage == 1:
                # What may begin with the model may as well begin after its first layer.
                trace.starts = starts = [np.maximum(start, 1) for start in starts]
            best = np.full((len(bounds), size), np.inf)
            chosen = np.full((len(bounds), size), -1, dtype=np.int64)
            for kind, start in enumerate(starts):
                # `reach` at a start is the least cost of getting at least that far.
                value = np.take_along_axis(reach, start, axis=1) + cost[kind]
                value[start >= np.arange(size)] = np.inf
                better = value < best
                best[better], chosen[better] = value[better], kind
            if stage < self.depth - 1:
                best[:, -1] = np.inf  # only the last stage holds the head
            trace.best.append(best)
            trace.kind.append(chosen)
            # Reaching further also reaches less far, since stages may be shorter.
            reach = np.minimum.accumulate(best[:, ::-1], axis=1)[:, ::-1]
        return reach[:, -1], trace

    def _starts(self, time: Floats, bounds: Floats) -> Ints:
        """`[bound, hi]`: the smallest lo of a stage that ends at hi; hi where there is none."""
        size = len(time)
        if self.problem.uniform:
            return self._starts_alike(time, bounds)
        over = time[None, :, :] > bounds[:, None, None]
        lower = np.tri(size, k=-1, dtype=bool).T
        result: Ints = (over & lower[None]).sum(axis=1)
        return result

    def _starts_alike(self, time: Floats, bounds: Floats) -> Ints:
        size = len(time)
        layers = size - 1
        hi = np.arange(size)
        result = np.broadcast_to(hi, (len(bounds), size)).copy()
        first = np.searchsorted(time[0, 1:layers], bounds, side="right")
        middle = (
            np.searchsorted(time[1, 2:layers], bounds, side="right")
            if layers > 2
            else np.zeros(len(bounds), dtype=np.int64)
        )
        n = np.arange(1, layers)
        last = np.searchsorted(time[layers - n, layers], bounds, side="right")
        inner = np.arange(1, layers)
        result[:, inner] = np.maximum(1, inner[None, :] - middle[:, None])
        result[:, inner] = np.where(middle[:, None] == 0, inner, result[:, inner])
        result[:, inner] = np.where(inner[None, :] <= first[:, None], 0, result[:, inner])
        result[:, layers] = np.where(last == 0, layers, layers - last)
        result[:, layers] = np.where(time[0, layers] <= bounds, 0, result[:, layers])
        return result

    def _need(self, trace: _Trace, bound: int) -> Need:
        kinds: Counter[StageKind] = Counter()
        layer = self.problem.layers
        for stage in range(self.depth - 1, -1, -1):
            # The cheapest way to reach at least this far may reach further.
            layer += int(trace.best[stage][bound, layer:].argmin())
            kind = int(trace.kind[stage][bound, layer])
            kinds[trace.kinds[kind]] += 1
            layer = int(trace.starts[kind][bound, layer]) if stage else 0
        return tuple(sorted(kinds.items()))


class _Trace:
    """How the cheapest cover came about: `best` and `kind` by stage, `[bound, layer]`."""

    def __init__(self, kinds: Sequence[StageKind], starts: list[Ints]) -> None:
        self.kinds, self.starts = kinds, starts
        self.best: list[Floats] = []
        self.kind: list[Ints] = []


def _ladder(low: float, high: float) -> Floats:
    """Intervals `[start, end]` from low to high whose ends have the fine ratio."""
    steps = max(1, int(np.ceil(np.log(high / low) / np.log(FINE))))
    points = np.geomspace(low, high, steps + 1)
    return np.stack([points[:-1], points[1:]], axis=1)
