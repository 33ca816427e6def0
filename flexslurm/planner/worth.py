"""Tokens per second of many pipelines at once, exactly; gives figures, not splits.

Where all layers are alike, the order of the middle stages does not matter: a multiset of kinds
meets a bound on the step time if the layers its stages can each take add up to the model's, with
the best choice of the first and last. The smallest such bound is found for all multisets of one
depth together. Where layers differ, each is searched by `splits`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from flexslurm.planner.problem import Floats, Ints, Need, Problem, StageKind, Tier
from flexslurm.planner.splits import best_split

_NEVER = -(10**6)
"""Layers that a stage which fits none can take: no sum makes up for it."""


class Worth(NamedTuple):
    """By multiset: tokens per second (0: it does not fit), and the batch that gives them."""

    tokens_per_s: Floats
    batch: Ints


def worth(problem: Problem, kinds: Sequence[StageKind], counts: Ints, tier: Tier) -> Worth:
    """Value the multisets `counts[p, k]` of `kinds[k]`.

    For each, the batch with the most tokens per second that meets the tier's demands.
    """
    if not problem.uniform:
        return _one_by_one(problem, kinds, counts, tier)
    result = Worth(np.zeros(len(counts)), np.zeros(len(counts), dtype=np.int64))
    depths = counts.sum(axis=1)
    for depth in range(1, min(problem.layers, int(depths.max(initial=0))) + 1):
        rows = np.flatnonzero(depths == depth)
        if len(rows):
            _one_depth(problem, kinds, counts[rows], depth, tier, result, rows)
    return result


def _one_depth(
    problem: Problem,
    kinds: Sequence[StageKind],
    counts: Ints,
    depth: int,
    tier: Tier,
    result: Worth,
    rows: Ints,
) -> None:
    used = np.flatnonzero(counts.any(axis=0))
    kinds, counts = [kinds[k] for k in used.tolist()], counts[:, used]
    alive = np.arange(len(rows))
    for batch in problem.batches(depth):
        caps = _Caps(problem, kinds, depth, batch, tier)
        slowest = caps.smallest_bound(counts[alive])
        fits = np.isfinite(slowest)
        alive, slowest = alive[fits], slowest[fits]
        if len(alive) == 0:
            return
        rate = problem.tokens_per_s(batch, problem.cycle_s(depth, slowest))
        at = rows[alive]
        better = rate > result.tokens_per_s[at]
        result.tokens_per_s[at[better]] = np.asarray(rate)[better]
        result.batch[at[better]] = batch
        if not tier.context:
            return


class _Caps:
    """How many layers each kind may take as first, middle and last stage, by bound on the step."""

    def __init__(
        self, problem: Problem, kinds: Sequence[StageKind], depth: int, batch: int, tier: Tier
    ) -> None:
        self.layers, self.depth = problem.layers, depth
        slots = -(-batch // depth)
        least = max(1, problem.min_blocks(batch, tier))
        full_bound = problem.full_for_ttft(depth, tier)
        places = []
        for kind in kinds:
            time = problem.times(kind, slots, depth)
            allowed = problem.blocks(kind) >= least
            if np.isfinite(full_bound):
                allowed = allowed & (problem.full_times(kind, slots) <= full_bound)
            places.append(self._places(np.where(allowed, time, np.inf)))
        values = np.unique(np.concatenate([p for place in places for p in place]))
        bound = problem.slowest_for_tpot(depth, tier)
        self.bounds = values[np.isfinite(values) & (values <= bound)]
        self.caps = np.array(
            [[self._count(p) for p in place] for place in places], dtype=np.int64
        )  # [kind, place, bound]

    def _places(self, time: Floats) -> list[Floats]:
        """Step times by number of layers: alone, or as first, middle and last."""
        layers = self.layers
        if self.depth == 1:
            return [time[0, layers:]]
        n = np.arange(1, layers)
        middle = time[1, 2:layers] if layers > 2 else np.empty(0)
        return [time[0, 1:layers], middle, time[layers - n, layers]]

    def _count(self, times: Floats) -> Ints:
        count = np.searchsorted(times, self.bounds, side="right")
        return np.where(count == 0, _NEVER, count)

    def smallest_bound(self, counts: Ints) -> Floats:
        """For each multiset the smallest bound on the step that it meets; infinite for none."""
        result = np.full(len(counts), np.inf)
        if len(self.bounds) == 0:
            return result
        lo = np.zeros(len(counts), dtype=np.int64)
        hi = np.full(len(counts), len(self.bounds) - 1, dtype=np.int64)
        fits = self._meets(counts, hi)
        while True:
            open_rows = np.flatnonzero(fits & (lo < hi))
            if len(open_rows) == 0:
                break
            middle = (lo[open_rows] + hi[open_rows]) // 2
            meets = self._meets(counts[open_rows], middle)
            hi[open_rows[meets]] = middle[meets]
            lo[open_rows[~meets]] = middle[~meets] + 1
        result[fits] = self.bounds[lo[fits]]
        return result

    def _meets(self, counts: Ints, at: Ints) -> npt.NDArray[np.bool_]:
        present = counts > 0
        if self.depth == 1:
            alone = self.caps[:, 0, :][:, at].T
            fits: npt.NDArray[np.bool_] = np.where(present, alone, 0).sum(axis=1) > 0
            return fits
        first, middle, last = (self.caps[:, place, :][:, at].T for place in range(3))
        extra_first = np.where(present, first - middle, 10 * _NEVER)
        extra_last = np.where(present, last - middle, 10 * _NEVER)
        total = (counts * middle).sum(axis=1) + _best_ends(counts, extra_first, extra_last)
        enough: npt.NDArray[np.bool_] = total >= self.layers
        return enough


def _best_ends(counts: Ints, first: Ints, last: Ints) -> Ints:
    """The best sum of `first[a] + last[b]` over two different stages of each multiset."""
    rows = np.arange(len(counts))
    a1, b1 = first.argmax(axis=1), last.argmax(axis=1)
    same = (a1 == b1) & (counts[rows, a1] < 2)
    best: Ints = first[rows, a1] + last[rows, b1]
    if same.any():
        others_first, others_last = first[same].copy(), last[same].copy()
        r = np.arange(len(others_first))
        others_first[r, a1[same]] = others_last[r, b1[same]] = 100 * _NEVER
        best[same] = np.maximum(
            others_first.max(axis=1) + last[same].max(axis=1),
            first[same].max(axis=1) + others_last.max(axis=1),
        )
    return best


def _one_by_one(problem: Problem, kinds: Sequence[StageKind], counts: Ints, tier: Tier) -> Worth:
    result = Worth(np.zeros(len(counts)), np.zeros(len(counts), dtype=np.int64))
    for row, multiset in enumerate(counts.tolist()):
        need: Need = tuple((k, c) for k, c in zip(kinds, multiset, strict=True) if c)
        depth = sum(multiset)
        for batch in problem.batches(depth):
            split = best_split(problem, need, batch, tier)
            if split is None:
                break
            rate = float(problem.tokens_per_s(batch, problem.cycle_s(depth, split.slowest_s)))
            if rate > result.tokens_per_s[row]:
                result.tokens_per_s[row], result.batch[row] = rate, batch
            if not tier.context:
                break
    return result
