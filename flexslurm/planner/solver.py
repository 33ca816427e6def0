"""The best plans of one tier: by the lattice, by HiGHS, or with generated pipelines and a bound.

Where the pool's pipelines can all be listed, plans are exact. Else those of few stages are, and
pipelines are generated as signatures need them; every plan then comes with what its prices prove.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cached_property

import msgspec

from flexslurm.gear import Signature
from flexslurm.planner.columns import (
    Column,
    Multisets,
    columns,
    key_worth,
    multisets,
    stage_kinds,
)
from flexslurm.planner.generate import Bound, close_gap, generate
from flexslurm.planner.integer import Programme
from flexslurm.planner.lattice import Lattice
from flexslurm.planner.pricing import Pricer
from flexslurm.planner.problem import Problem, StageKind, Tier

MAX_DEPTH = 16
"""Stages of a pipeline that are looked at, where the weakest GPU type does not need more."""
MOST_CELLS = 600_000
"""Multisets that are listed, times stage kinds."""
MOST_NEAR = 4000
"""Pipelines that are listed to close a gap."""
GAP = 0.004
"""Plans that are not exact are proved to be within this share of the best."""


class Solution(msgspec.Struct, frozen=True):
    """A plan and how it was found."""

    tier: Tier
    plan: dict[Column, int]
    key: int
    bound_tokens_per_s: float
    """No plan is worth more."""
    reason: str = ""

    @property
    def gap(self) -> float:
        """No plan is better by more than this share of itself; 0: it is exact."""
        found, most = key_worth(self.key), self.bound_tokens_per_s
        return round(1 - found / most, 6) if most > found else 0.0


class Solver:
    """All plans of one tier for the signatures that a pool covers."""

    def __init__(self, problem: Problem, pool: Signature, tier: Tier) -> None:
        self.problem, self.pool, self.tier = problem, pool, tier
        self.depth = max_depth(problem, pool)
        most = most_multisets(problem, pool)
        found = multisets(problem, pool, self.depth, most)
        self.complete = found.complete
        if not found.complete:
            found = multisets(problem, pool, self.depth, most // 20)
        self._columns: dict[object, Column] = {}
        self._listed = 0
        """Pipelines of so many stages are all known, or stand for others worth as much."""
        self._bounds: list[Bound] = []
        self._list(found)

    @property
    def columns(self) -> list[Column]:
        return list(self._columns.values())

    @cached_property
    def lattice(self) -> Lattice | None:
        """Of all pipelines known; None where it would have too many states."""
        return Lattice.build(self.columns, self.pool)

    @cached_property
    def programme(self) -> Programme:
        return Programme(self.columns, [shape for shape, _ in self.pool.counts])

    @cached_property
    def pricer(self) -> Pricer:
        kinds = stage_kinds(self.problem, self.pool)
        return Pricer(self.problem, kinds, self.tier, self.depth)

    # ------------------------------------------------------------------------------- choosing

    def choose(self, signature: Signature) -> Solution:
        """The best plan; pipelines that are missing are generated."""
        if not signature.counts:
            return Solution(self.tier, {}, 0, 0.0)
        if self.complete and self.lattice is not None:
            return self._of_lattice(self.lattice, signature)
        choice = self.solve(signature)
        if self._knows(signature) or _near(choice):
            return choice
        self.generate(signature)
        choice = self.solve(signature)
        return choice if _near(choice) else self._close(signature, choice)

    def chosen_in_table(self, signature: Signature) -> Solution | None:
        """The best plan of the pipelines known, if that takes no solving; after `prepare`."""
        if self.lattice is None:
            return None
        return self._of_lattice(self.lattice, signature)

    def solve(self, signature: Signature) -> Solution:
        """The best plan of the pipelines known, by HiGHS."""
        known = self._knows(signature)
        solved = self.programme.solve(signature, 0.0 if known else GAP / 4)
        bound = solved.bound_tokens_per_s if known else self.bound(signature)
        return Solution(self.tier, solved.plan, solved.key, max(bound, key_worth(solved.key)))

    def bound(self, signature: Signature) -> float:
        """No plan of the signature is worth more, as far as prices have proved it."""
        return min((bound.of(signature) for bound in self._bounds), default=float("inf"))

    def _of_lattice(self, lattice: Lattice, signature: Signature) -> Solution:
        plan, key = dict(lattice.plan(signature)), lattice.key(signature)
        found = key_worth(key)
        bound = found if self._knows(signature) else max(found, self.bound(signature))
        return Solution(self.tier, plan, key, bound)

    def _knows(self, signature: Signature) -> bool:
        """Whether all pipelines are known that the signature has GPUs for."""
        return self.complete or signature.gpus() <= self._listed

    # ------------------------------------------------------------------------- more pipelines

    def prepare(self) -> None:
        """Get to know what plans of the pool and all its parts need."""
        if self.complete or self._bounds:
            return
        most = most_multisets(self.problem, self.pool)
        self._list(multisets(self.problem, self.pool, self.depth, most))
        self.generate(self.pool)
        types = sorted({shape.gpu_type for shape, _ in self.pool.counts})
        for some in (*itertools.combinations(types, 1), *itertools.combinations(types, 2)):
            counts = [(s, n) for s, n in self.pool.counts if s.gpu_type in some]
            if len(counts) < len(self.pool.counts):
                self.generate(Signature(tuple(counts)))

    def generate(self, signature: Signature) -> None:
        """Add the pipelines that a signature's plan needs, and a bound."""
        found, bound = generate(self.problem, self.pricer, signature, self.columns)
        self._bounds.append(bound)
        self._add(found)

    def _close(self, signature: Signature, choice: Solution) -> Solution:
        """Close a gap by knowing all pipelines that a better plan could use, if that can be."""
        own = multisets(
            self.problem, signature, self.depth, most_multisets(self.problem, signature)
        )
        found: list[Column] | None
        if own.complete:
            found = columns(self.problem, own, self.tier)
        else:
            bound = min(self._bounds, key=lambda bound: bound.of(signature))
            loss = bound.of(signature) - key_worth(choice.key)
            found = close_gap(self.problem, self.pricer, bound, loss, MOST_NEAR)
        if found is None:
            return choice
        self._add(found)
        solved = self.programme.solve(signature, 0.0)
        if solved.key < choice.key:
            return choice
        return Solution(self.tier, solved.plan, solved.key, solved.bound_tokens_per_s)

    def _list(self, found: Multisets) -> None:
        self._listed = max(self._listed, found.depth)
        self._add(columns(self.problem, found, self.tier))

    def _add(self, found: list[Column]) -> None:
        self._columns.update((column.need, column) for column in found)
        for stale in ("programme", "lattice"):
            self.__dict__.pop(stale, None)


def _near(choice: Solution) -> bool:
    return key_worth(choice.key) >= choice.bound_tokens_per_s * (1 - GAP)


def most_multisets(problem: Problem, pool: Signature) -> int:
    """Multisets of stage kinds that are valued one and all; beyond, pipelines are generated."""
    return (MOST_CELLS if problem.uniform else 2400) // max(1, len(stage_kinds(problem, pool)))


def max_depth(problem: Problem, pool: Signature) -> int:
    """How deep pipelines may get: enough for the weakest type alone to hold the model."""
    return max([MAX_DEPTH, *_least_depths(problem, pool)])


def _least_depths(problem: Problem, pool: Signature) -> Iterator[int]:
    """By GPU type: stages that its smallest groups need which can hold the model at all."""
    most: dict[str, int] = {}
    for shape, _ in pool.counts:
        most[shape.gpu_type] = max(most.get(shape.gpu_type, 0), shape.gpus)
    for name, gpus in most.items():
        depths = (_least_depth(problem, kind) for kind in problem.kinds(name, gpus))
        depth = next(filter(None, depths), None)
        if depth is not None:
            yield depth + 1


def _least_depth(problem: Problem, kind: StageKind) -> int:
    """Stages of one kind that hold all layers, each as many as fit; 0: some layer fits on none."""
    fits = (problem.blocks(kind) >= 1).sum(axis=1)
    if problem.uniform:
        return -(-problem.layers // int(fits[1])) if problem.layers > 1 and fits[1] else 0
    at = depth = 0
    while at < problem.layers and fits[at]:
        at, depth = at + int(fits[at]), depth + 1
    return depth if at >= problem.layers else 0
