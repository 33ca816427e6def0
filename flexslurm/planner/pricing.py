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
import numpy.typing as npt

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

    def glance(self, prices: Mapping[StageKind, float], tolerance: float) -> list[Need]:
        """Some pipelines worth more than their price by more than `tolerance`; it may miss others.

        Kinds without a price are not to be had.
        """
        which, cost = self._costs(prices)
        found = (grid.glance(which, cost, tolerance) for grid in self.grids)
        return list(dict.fromkeys(need for needs in found for need in needs))

    def price(self, prices: Mapping[StageKind, float], tolerance: float) -> Priced:
        """Pipelines worth more than their price; those within `tolerance` of it count as not."""
        which, cost = self._costs(prices)
        needs: dict[Need, None] = {}
        excess = 0.0
        for grid in self.grids:
            found, most = grid.best(which, cost, tolerance)
            excess = max(excess, most)
            needs.update(dict.fromkeys(found))
        return Priced(list(needs), excess)

    def near(self, prices: Mapping[StageKind, float], loss: float, most: int) -> list[Need] | None:
        """All pipelines that may be worth no less than their price less `loss`.

        Some that are worth less may be among them. None where there are more than `most`.
        """
        which, cost = self._costs(prices)
        found: dict[tuple[int, ...], None] = {}
        for grid in self.grids:
            rows = grid.near(which, cost, loss, most)
            if rows is None:
                return None
            found.update(dict.fromkeys(map(tuple, rows.tolist())))
            if len(found) > most:
                return None
        kinds = [self.kinds[i] for i in which]
        return [tuple((k, c) for k, c in zip(kinds, row, strict=True) if c) for row in found]

    def _costs(self, prices: Mapping[StageKind, float]) -> tuple[list[int], Floats]:
        which = [i for i, kind in enumerate(self.kinds) if kind in prices]
        return which, np.array([prices[self.kinds[i]] for i in which])


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
            time = problem.times(kind, slots, depth)
            allowed = (problem.blocks(kind) >= least) & (time <= bound)
            if np.isfinite(full):
                allowed &= problem.full_times(kind, slots) <= full
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
        grid.fastest = [grid._fastest_by_layers(time) for time in grid.times]
        grid.longest = np.array([grid._longest(i, grid.coarse[1:]) for i in range(len(kinds))])
        return grid

    fastest: list[Floats]
    """By kind, the shortest time of a stage of n layers, for n from 1."""

    longest: Ints
    """`[kind, interval]`: the most layers of one stage within the interval's upper end."""

    def _fastest(self, time: Floats, layers: int) -> float:
        size = self.problem.layers + 1
        starts = np.arange(size - layers)
        return float(time[starts, starts + layers].min())

    def _fastest_by_layers(self, time: Floats) -> Floats:
        best = [np.diagonal(time, n).min() for n in range(1, len(time))]
        return np.asarray(np.maximum.accumulate(best))

    def _longest(self, kind: int, bounds: Floats) -> Ints:
        """Most layers of a stage within each bound, over all starts."""
        result: Ints = np.searchsorted(self.fastest[kind], bounds, side="right")
        return result

    def glance(self, which: Sequence[int], cost: Floats, tolerance: float) -> list[Need]:
        """The best of some pipelines worth more than they cost; it may miss others."""
        ends = self.coarse[1:]
        wanted = self._worth(ends) > self._hull(cost, self.longest[which]) * (1 + tolerance)
        if not wanted.any():
            return []
        found = self._cover(which, cost, ends[wanted])
        gain = self._worth(ends[wanted]) - found.cost * (1 + tolerance)
        return [self._need(found, int(gain.argmax()))] if gain.max() > 0 else []

    def best(
        self, which: Sequence[int], cost: Floats, tolerance: float
    ) -> tuple[list[Need], float]:
        """Pipelines of the kinds `which` worth more than they cost, and the largest excess."""
        starts, ends = self.coarse[:-1], self.coarse[1:]
        wanted = self._worth(starts) > self._hull(cost, self.longest[which]) * (1 + tolerance)
        starts, ends, _ = self._uncovered(which, cost, starts[wanted], ends[wanted], tolerance)
        if len(starts) == 0:
            return [], 0.0
        fine = np.concatenate([_ladder(a, b) for a, b in zip(starts, ends, strict=True)])
        longest = np.array([self._longest(i, fine[:, 1]) for i in which])
        wanted = self._worth(fine[:, 0]) > self._hull(cost, longest) * (1 + tolerance)
        fine = fine[wanted]
        starts, ends, found = self._uncovered(which, cost, fine[:, 0], fine[:, 1], tolerance)
        if found is None or len(starts) == 0:
            return [], 0.0
        gain = self._worth(ends) - found.cost
        needs = [self._need(found, int(gain.argmax()))] if gain.max() > 0 else []
        if found.cost.min() <= 0:
            return needs, float("inf")
        return needs, float((self._worth(starts) / found.cost).max() - 1)

    def near(self, which: Sequence[int], cost: Floats, loss: float, most: int) -> Ints | None:
        """Counts of kinds, by row, of pipelines that may be worth their cost less `loss`.

        For each interval the relaxation's best price of a layer leaves every kind a slack, and a
        pipeline's slacks may add up to no more than what its worth and the loss leave.
        """
        ceiling = self._worth(self.coarse[:-1]) + loss
        longest = self.longest[which]
        bound, slope = self._hull_and_slope(cost, longest)
        found = [np.zeros((0, len(which)), dtype=np.int64)]
        total = 0
        for at in np.flatnonzero(ceiling >= bound):
            reduced = np.where(longest[:, at] > 0, cost - slope[at] * longest[:, at], np.inf)
            budget = ceiling[at] - slope[at] * self.problem.layers - self.depth * reduced.min()
            rows = _within(reduced - reduced.min(), self.depth, budget, most)
            if rows is None:
                return None
            rows = rows[rows @ longest[:, at] >= self.problem.layers]
            total += len(rows)
            found.append(rows)
            if total > 8 * most:
                found, total = _distinct(found)
        rows = np.unique(np.concatenate(found), axis=0)
        return rows if len(rows) <= most else None

    def _uncovered(
        self, which: Sequence[int], cost: Floats, starts: Floats, ends: Floats, tolerance: float
    ) -> tuple[Floats, Floats, _Trace | None]:
        """The intervals in which some pipeline is worth more than it costs, and its trace."""
        if len(starts) == 0:
            return starts, ends, None
        trace = self._cover(which, cost, ends)
        keep = self._worth(starts) > trace.cost * (1 + tolerance)
        return starts[keep], ends[keep], trace.only(keep)

    def _worth(self, bounds: Floats) -> Floats:
        cycle = self.problem.cycle_s(self.depth, bounds)
        return np.asarray(self.problem.tokens_per_s(self.batch, cycle))

    def _hull(self, cost: Floats, longest: Ints) -> Floats:
        """By interval, a lower bound on the cost of covering the layers with `depth` stages."""
        return self._hull_and_slope(cost, longest)[0]

    def _hull_and_slope(self, cost: Floats, longest: Ints) -> tuple[Floats, Floats]:
        """As `_hull`, and the price of a layer that gives it.

        The dual of the relaxation: any price of a layer gives a bound, and slopes between two
        kinds include the best.
        """
        layers, depth = self.problem.layers, self.depth
        best = np.where(longest.max(axis=0) * depth >= layers, 0.0, np.inf)
        slopes_of_best = np.zeros(len(best))
        usable = np.where(longest > 0, cost[:, None], np.inf)
        with np.errstate(divide="ignore", invalid="ignore"):
            for a in range(len(cost)):
                gap = longest - longest[a]
                slopes = np.where(gap != 0, (cost - cost[a])[:, None] / gap, np.nan)
                # The price of a layer at which `a` lies on the hull, if it does.
                slope = np.where(longest > longest[a], slopes, np.inf).min(axis=0)
                slope = np.where(np.isfinite(slope) & (slope > 0), slope, 0.0)
                bound = slope * layers + depth * (usable - slope * longest).min(axis=0)
                better = np.isfinite(bound) & (bound > best)
                best[better], slopes_of_best[better] = bound[better], slope[better]
        return best, slopes_of_best

    def _cover(self, which: Sequence[int], cost: Floats, bounds: Floats) -> _Trace:
        """By bound, the cheapest `depth` stages that cover all layers."""
        size, count = self.problem.layers + 1, len(bounds)
        starts = np.stack([self._starts(self.times[i], bounds) for i in which])
        trace = _Trace([self.kinds[i] for i in which])
        # `reach` is the least cost of getting at least so far; a last column says never.
        reach = np.full((count, size + 1), np.inf)
        reach[:, 0] = 0.0
        row = (np.arange(count) * (size + 1))[None, :, None]
        never = starts >= np.arange(size)
        for stage in range(self.depth):
            if stage <= 1:
                # What may begin with the model may as well begin after its first layer.
                starts = np.maximum(starts, stage)
                never |= starts >= np.arange(size)
                place = np.where(never, size, starts) + row
            value = reach.ravel()[place] + cost[:, None, None]
            chosen = value.argmin(axis=0)
            best = np.take_along_axis(value, chosen[None], axis=0)[0]
            if stage < self.depth - 1:
                best[:, -1] = np.inf  # only the last stage holds the head
            trace.add(starts, best, chosen)
            # Reaching further also reaches less far, since stages may be shorter.
            reach[:, :size] = np.minimum.accumulate(best[:, ::-1], axis=1)[:, ::-1]
        trace.cost, trace.rows = reach[:, size - 1].copy(), np.arange(count)
        return trace

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
        layer, row = self.problem.layers, int(trace.rows[bound])
        for stage in range(self.depth - 1, -1, -1):
            # The cheapest way to reach at least this far may reach further.
            layer += int(trace.best[stage][row, layer:].argmin())
            kind = int(trace.kind[stage][row, layer])
            kinds[trace.kinds[kind]] += 1
            layer = int(trace.starts[stage][kind, row, layer])
        return tuple(sorted(kinds.items()))


class _Trace:
    """How the cheapest covers came about, by stage: `[kind, bound, layer]` and `[bound, layer]`."""

    def __init__(self, kinds: Sequence[StageKind]) -> None:
        self.kinds = kinds
        self.starts: list[Ints] = []
        self.best: list[Floats] = []
        self.kind: list[Ints] = []
        self.cost = np.empty(0)
        self.rows: Ints = np.empty(0, dtype=np.int64)
        """Where each bound stands in the arrays."""

    def add(self, starts: Ints, best: Floats, kind: Ints) -> None:
        self.starts.append(starts)
        self.best.append(best)
        self.kind.append(kind)

    def only(self, keep: npt.NDArray[np.bool_]) -> _Trace:
        """The trace of some of the bounds; shares what it holds with this one."""
        some = _Trace(self.kinds)
        some.starts, some.best, some.kind = self.starts, self.best, self.kind
        some.cost, some.rows = self.cost[keep], self.rows[keep]
        return some


def _within(slack: Floats, depth: int, budget: float, most: int) -> Ints | None:
    """Multisets of `depth` kinds whose slacks add up to no more than `budget`, unless too many."""
    kinds = np.flatnonzero(slack <= budget)
    rows = np.zeros((1, len(slack)), dtype=np.int64)
    spent, last = np.zeros(1), np.zeros(1, dtype=np.int64)
    for _ in range(depth):
        grown, costs, lasts = [], [], []
        for place, kind in enumerate(kinds):
            keep = (last <= place) & (spent + slack[kind] <= budget)
            more = rows[keep].copy()
            more[:, kind] += 1
            grown.append(more)
            costs.append(spent[keep] + slack[kind])
            lasts.append(np.full(len(more), place))
        if not grown:
            return rows[:0]
        rows, spent, last = (np.concatenate(parts) for parts in (grown, costs, lasts))
        if len(rows) > most:
            return None
    return rows


def _distinct(found: list[Ints]) -> tuple[list[Ints], int]:
    rows = np.unique(np.concatenate(found), axis=0)
    return [rows], len(rows)


def _ladder(low: float, high: float) -> Floats:
    """Intervals `[start, end]` from low to high whose ends have the fine ratio."""
    steps = max(1, int(np.ceil(np.log(high / low) / np.log(FINE))))
    points = np.geomspace(low, high, steps + 1)
    return np.stack([points[:-1], points[1:]], axis=1)
