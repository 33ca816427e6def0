"""Plans gears for the signatures of a pool: exactly where the lattice reaches, else by HiGHS.

What is given up comes in tiers: first nothing, then the targets, then the workload's context. A
signature gets the first tier in which any pipeline fits. Pure: the same inputs give the same gears.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from functools import cached_property

import msgspec

from flexslurm.gear import Gear, NoGear, Signature
from flexslurm.planner.build import Builder, no_gear
from flexslurm.planner.columns import Column, columns, key_worth, multisets, stage_kinds
from flexslurm.planner.generate import Bound, generate
from flexslurm.planner.integer import Programme
from flexslurm.planner.lattice import Lattice
from flexslurm.planner.model_spec import ModelSpec
from flexslurm.planner.pricing import Pricer
from flexslurm.planner.problem import Problem, Tier
from flexslurm.planner.topology import Topology
from flexslurm.planner.workload import Goal

MAX_DEPTH = 8
"""Stages of a pipeline that are looked at, where the weakest GPU type does not need more."""
MOST_CELLS = 240_000
"""Multisets that are listed, times stage kinds."""
GAP = 0.004
"""Plans that are not exact are proved to be within this share of the best."""

TIERS: Mapping[Tier, str] = {
    Tier(): "most tokens per second",
    Tier(slo=False): "no plan meets the targets; most tokens per second without them",
    Tier(slo=False, context=False): (
        "sequences of the workload's length do not fit; most tokens per second with shorter ones"
    ),
}


class Choice(msgspec.Struct, frozen=True):
    """A plan and how it was found."""

    tier: Tier
    plan: dict[Column, int]
    key: int
    bound_tokens_per_s: float
    """No plan is worth more."""


class Planner:
    """Plans for all signatures that `pool` covers."""

    def __init__(
        self,
        spec: ModelSpec,
        topology: Topology,
        goal: Goal,
        pool: Signature,
        *,
        acted: Mapping[str, ModelSpec] | None = None,
    ) -> None:
        for shape, _ in pool.counts:
            topology.gpu(shape.gpu_type)
        self.pool = pool
        self.problem = Problem(spec, topology, goal, acted)
        self.builder = Builder(self.problem)
        self._solvers: dict[Tier, Solver] = {}

    def plan(self, signature: Signature) -> Gear | NoGear:
        """The best gear of a signature within the pool."""
        choice = self.choose(signature)
        if choice is None:
            return no_gear(self.problem, signature)
        return self.builder.gear(signature, choice.plan, choice.tier, TIERS[choice.tier])

    def choose(self, signature: Signature) -> Choice | None:
        """The best plan of a signature, or None where the model does not fit."""
        for tier in TIERS:
            choice = self.solver(tier).choose(signature)
            if choice.plan:
                return choice
        return None

    def solver(self, tier: Tier) -> Solver:
        if tier not in self._solvers:
            self._solvers[tier] = Solver(self.problem, self.pool, tier)
        return self._solvers[tier]


class Solver:
    """All plans of one tier.

    Where the pool's pipelines can all be listed, plans are exact: by the lattice, or by HiGHS where
    the lattice has too many states. Else pipelines are generated as signatures need them, and
    every plan comes with the bound that their prices prove.
    """

    def __init__(self, problem: Problem, pool: Signature, tier: Tier) -> None:
        self.problem, self.pool, self.tier = problem, pool, tier
        self.depth = max_depth(problem, pool)
        most = most_multisets(problem, pool)
        found = multisets(problem, pool, self.depth, most)
        if not found.complete:
            found = multisets(problem, pool, self.depth, most // 8)
        self.complete = found.complete
        self._columns = {c.need: c for c in columns(problem, found, tier)}
        self._bounds: list[Bound] = []

    @property
    def columns(self) -> list[Column]:
        return list(self._columns.values())

    @cached_property
    def lattice(self) -> Lattice | None:
        return Lattice.build(self.columns, self.pool) if self.complete else None

    @cached_property
    def programme(self) -> Programme:
        return Programme(self.columns, [shape for shape, _ in self.pool.counts])

    @cached_property
    def pricer(self) -> Pricer:
        kinds = stage_kinds(self.problem, self.pool)
        return Pricer(self.problem, kinds, self.tier, self.depth)

    def choose(self, signature: Signature) -> Choice:
        if not signature.counts:
            return Choice(self.tier, {}, 0, 0.0)
        if self.lattice is not None:
            plan, key = dict(self.lattice.plan(signature)), self.lattice.key(signature)
            return Choice(self.tier, plan, key, key_worth(key))
        choice = self.solve(signature)
        if not self.complete and not _near(choice):
            self.generate(signature)
            choice = self.solve(signature)
        return choice

    def bound(self, signature: Signature) -> float:
        """No plan of the signature is worth more, as far as prices have proved it."""
        return min((bound.of(signature) for bound in self._bounds), default=float("inf"))

    def generate(self, signature: Signature) -> None:
        """Add the pipelines that a signature's plan needs, and a bound."""
        found, bound = generate(self.problem, self.pricer, signature, self.columns)
        self._columns.update((column.need, column) for column in found)
        self._bounds.append(bound)
        self.__dict__.pop("programme", None)

    def prepare(self) -> None:
        """Generate what plans of the whole pool and of any two of its GPU types need."""
        self.generate(self.pool)
        types = sorted({shape.gpu_type for shape, _ in self.pool.counts})
        for some in (*itertools.combinations(types, 1), *itertools.combinations(types, 2)):
            counts = [(s, n) for s, n in self.pool.counts if s.gpu_type in some]
            if len(counts) < len(self.pool.counts):
                self.generate(Signature(tuple(counts)))

    def solve(self, signature: Signature) -> Choice:
        """The best plan of the pipelines known."""
        solved = self.programme.solve(signature, 0.0 if self.complete else GAP / 4)
        bound = solved.bound_tokens_per_s if self.complete else self.bound(signature)
        return Choice(self.tier, solved.plan, solved.key, max(bound, key_worth(solved.key)))


def _near(choice: Choice) -> bool:
    return key_worth(choice.key) >= choice.bound_tokens_per_s * (1 - GAP)


def most_multisets(problem: Problem, pool: Signature) -> int:
    """Multisets of stage kinds that are valued one and all; beyond, pipelines are generated."""
    return (MOST_CELLS if problem.uniform else 2400) // max(1, len(stage_kinds(problem, pool)))


def max_depth(problem: Problem, pool: Signature) -> int:
    """How deep pipelines may get: enough for the weakest type alone to hold the model."""
    return max([MAX_DEPTH, *_least_depths(problem, pool)])


def _least_depths(problem: Problem, pool: Signature) -> Iterator[int]:
    for name in {shape.gpu_type for shape, _ in pool.counts}:
        kind = problem.kinds(name, 1)[0]
        layers = int((problem.blocks(kind)[1] >= 1).sum())
        if layers:
            yield -(-problem.layers // layers) + 1
