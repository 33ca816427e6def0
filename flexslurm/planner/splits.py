"""The best order and layer split of one pipeline, as stages; looks at one batch size.

Under a bound on the step time, a stage that takes as many layers as it may is never worse than one
that takes fewer, so the furthest layer that each sub-multiset of stages reaches decides whether the
bound can be met. Where layers differ, a stage may be unable to take the one it would
have to begin with, and then all layers that each sub-multiset can end at are looked at. The
smallest bound among the times that occur is found by bisection; then, among
the splits that meet it, the one whose tightest stage has most room for KV.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from flexslurm.planner.problem import Need, Problem, StageKind, Tier

Masks = list[npt.NDArray[np.bool_]]
Values = npt.NDArray[Any]


class PlannedStage(msgspec.Struct, frozen=True):
    """Layers `[lo, hi)` on a stage kind, with as many blocks of KV as fit beside."""

    kind: StageKind
    lo: int
    hi: int
    kv_blocks: int


class LayerSplit(msgspec.Struct, frozen=True):
    """Stages in layer order, and the slowest one's step."""

    stages: tuple[PlannedStage, ...]
    slowest_s: float


def best_split(problem: Problem, need: Need, batch: int, tier: Tier) -> LayerSplit | None:
    """The split with the fastest slowest stage at this batch, or None where none fits."""
    return _SplitSearch(problem, need, batch, tier).run()


class _SplitSearch:
    def __init__(self, problem: Problem, need: Need, batch: int, tier: Tier) -> None:
        self.kinds = [kind for kind, _ in need]
        self.counts = tuple(count for _, count in need)
        self.layers, self.depth = problem.layers, sum(self.counts)
        slots = -(-batch // self.depth)
        self.times = [problem.times(kind, slots, self.depth) for kind in self.kinds]
        self.blocks = [problem.blocks(kind) for kind in self.kinds]
        least = max(1, problem.min_blocks(batch, tier))
        self.allowed: Masks = [blocks >= least for blocks in self.blocks]
        bound = problem.full_for_ttft(self.depth, tier)
        if bound != float("inf"):
            for index, kind in enumerate(self.kinds):
                self.allowed[index] &= problem.full_times(kind, slots) <= bound
        self.bound = problem.slowest_for_tpot(self.depth, tier)
        self.uniform = problem.uniform
        self.states = sorted(itertools.product(*(range(c + 1) for c in self.counts)), key=sum)

    def run(self) -> LayerSplit | None:
        if self.depth > self.layers:
            return None
        for index, time in enumerate(self.times):
            self.allowed[index] &= time <= self.bound
        slowest = self._first(_sorted(self.times, self.allowed), self._faster)
        if slowest is None:
            return None
        self.allowed = self._faster(slowest)
        room = self._first(_sorted(self.blocks, self.allowed)[::-1], self._roomier)
        assert room is not None
        stages = self._stages(self._roomier(room))
        assert stages is not None
        return LayerSplit(stages, slowest)

    def _faster(self, bound: float) -> Masks:
        return [a & (time <= bound) for time, a in zip(self.times, self.allowed, strict=True)]

    def _roomier(self, least: float) -> Masks:
        return [a & (room >= least) for room, a in zip(self.blocks, self.allowed, strict=True)]

    def _first(self, values: Values, masks: Callable[[float], Masks]) -> float | None:
        """The first of `values` that leaves a split; each leaves all that the one before does."""
        if len(values) == 0 or self._stages(masks(values[-1])) is None:
            return None
        lo, hi = 0, len(values) - 1
        while lo < hi:
            middle = (lo + hi) // 2
            if self._stages(masks(values[middle])) is not None:
                hi = middle
            else:
                lo = middle + 1
        return float(values[lo])

    def _stages(self, allowed: Masks) -> tuple[PlannedStage, ...] | None:
        # Layers a stage can take from each start; the model's end is kept for the last stage.
        reach = [mask[:, : self.layers].sum(axis=1).tolist() for mask in allowed]
        ends = [mask[:, self.layers].tolist() for mask in allowed]
        furthest: dict[tuple[int, ...], tuple[int, int]] = {self.states[0]: (0, -1)}
        for state in self.states[1:]:
            left = self.depth - sum(state)
            best = (-1, -1)
            for index in range(len(state)):
                start = furthest[_less(state, index)][0] if state[index] else -1
                if start < 0:
                    continue
                if left:
                    hi = min(start + reach[index][start], self.layers - left)
                else:
                    hi = self.layers if ends[index][start] else -1
                if hi > start and hi > best[0]:
                    best = (hi, index)
            furthest[state] = best
        if furthest[self.counts][0] == self.layers:
            return self._walk_back(furthest)
        if self.uniform or not self._could(allowed):
            return None
        return self._any_stages(reach, ends)

    def _could(self, allowed: Masks) -> bool:
        """Whether the stages reach the model's end where they may also be left empty."""
        reach = [mask.sum(axis=1).tolist() for mask in allowed]
        furthest = {self.states[0]: 0}
        for state in self.states[1:]:
            before = [(index, furthest[_less(state, index)]) for index, n in enumerate(state) if n]
            furthest[state] = max(start + reach[index][start] for index, start in before)
        return furthest[self.counts] >= self.layers

    def _any_stages(
        self, reach: Sequence[Sequence[int]], ends: Sequence[Sequence[bool]]
    ) -> tuple[PlannedStage, ...] | None:
        """As `_stages`, from all layers that each sub-multiset can end at."""
        found: dict[tuple[int, ...], dict[int, tuple[int, int]]] = {self.states[0]: {0: (-1, -1)}}
        for state in self.states[1:]:
            left = self.depth - sum(state)
            mine = found.setdefault(state, {})
            for index in (index for index, count in enumerate(state) if count):
                for start in found[_less(state, index)]:
                    if not left and ends[index][start]:
                        mine.setdefault(self.layers, (index, start))
                    most = min(start + reach[index][start], self.layers - left) if left else -1
                    for hi in range(start + 1, most + 1):
                        mine.setdefault(hi, (index, start))
        if self.layers not in found[self.counts]:
            return None
        state, hi, stages = self.counts, self.layers, []
        while any(state):
            index, lo = found[state][hi]
            blocks = int(self.blocks[index][lo, hi])
            stages.append(PlannedStage(self.kinds[index], lo, hi, blocks))
            state, hi = _less(state, index), lo
        return tuple(reversed(stages))

    def _walk_back(
        self, furthest: Mapping[tuple[int, ...], tuple[int, int]]
    ) -> tuple[PlannedStage, ...]:
        state, stages = self.counts, []
        while any(state):
            hi, index = furthest[state]
            before = _less(state, index)
            lo = furthest[before][0]
            blocks = int(self.blocks[index][lo, hi])
            stages.append(PlannedStage(self.kinds[index], lo, hi, blocks))
            state = before
        return tuple(reversed(stages))


def _sorted(tables: Sequence[Values], allowed: Masks) -> Values:
    found = [table[mask] for table, mask in zip(tables, allowed, strict=True)]
    return np.unique(np.concatenate(found))


def _less(state: tuple[int, ...], index: int) -> tuple[int, ...]:
    return (*state[:index], state[index] - 1, *state[index + 1 :])
