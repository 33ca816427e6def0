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
from flexslurm.planner.generate import Bound, close_gap, generate
from flexslurm.planner.integer import Programme
from flexslurm.planner.lattice import Lattice
from flexslurm.planner.model_spec import ModelSpec
from flexslurm.planner.objectives import SAFETY, fewest_gpus
from flexslurm.planner.pricing import Pricer
from flexslurm.planner.problem import Problem, StageKind, Tier
from flexslurm.planner.profiles import Profile
from flexslurm.planner.topology import Topology
from flexslurm.planner.workload import Goal, Objective, Slo

MAX_DEPTH = 16
"""Stages of a pipeline that are looked at, where the weakest GPU type does not need more."""
MOST_CELLS = 600_000
"""Multisets that are listed, times stage kinds."""
MOST_NEAR = 4000
"""Pipelines that are listed to close a gap."""
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
    reason: str = ""

    @property
    def gap(self) -> float:
        """No plan is better by more than this share of itself; 0: it is exact."""
        found, most = key_worth(self.key), self.bound_tokens_per_s
        return round(1 - found / most, 6) if most > found else 0.0


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
        profiles: Mapping[StageKind, Profile] | None = None,
    ) -> None:
        for shape, _ in pool.counts:
            topology.gpu(shape.gpu_type)
        self.pool = pool
        self.problem = Problem(spec, topology, goal, acted, profiles)
        self.builder = Builder(self.problem)
        self._solvers: dict[Tier, Solver] = {}

    def plan(self, signature: Signature) -> Gear | NoGear:
        """The best gear of a signature within the pool."""
        return self.gear_of(signature, self.choose(signature))

    def gear_of(self, signature: Signature, choice: Choice | None) -> Gear | NoGear:
        """The gear of a plan; without one, why there is none."""
        if choice is None:
            return no_gear(self.problem, signature)
        return self.builder.gear(signature, choice.plan, choice.tier, choice.reason)

    def choose(self, signature: Signature) -> Choice | None:
        """The best plan of a signature, or None where the model does not fit."""
        for tier in TIERS:
            choice = self.solver(tier).choose(signature)
            if choice.plan:
                return self.adapt(choice, signature)
        return None

    def adapt(self, best: Choice, signature: Signature) -> Choice:
        """From the plan with most tokens per second to the one for the goal's objective."""
        goal = self.problem.goal
        best = msgspec.structs.replace(best, reason=TIERS[best.tier])
        rate = goal.workload.rate
        wanted = rate * self.problem.workload.output_tokens if rate else 0.0
        if goal.objective is Objective.THROUGHPUT:
            return best
        if wanted > key_worth(best.key) * (1 + SAFETY):
            return msgspec.structs.replace(
                best, reason=f"{best.reason}; the rate of {rate:g}/s is more than these GPUs give"
            )
        if goal.objective is Objective.GPUS:
            return self._fewest(best, signature, wanted)
        return self._quickest(best, signature, wanted)

    def _fewest(self, best: Choice, signature: Signature, wanted: float) -> Choice:
        solver = self.solver(best.tier)
        plan = fewest_gpus(solver.programme, signature, wanted)
        if not plan:
            return best
        key = sum(column.key * times for column, times in plan.items())
        return Choice(best.tier, plan, key, key_worth(key), "fewest GPUs that keep up")

    def _quickest(self, best: Choice, signature: Signature, wanted: float) -> Choice:
        """Lower the TPOT target as far as the rate, or any pipeline, can still be had."""
        low, found = 0.0, best
        high = self._tpot_s(found)
        for _ in range(40):
            near = low > high * 0.995
            middle = high * (1 - 1e-9) if near else (max(low, high / 8) * high) ** 0.5
            slower = self._within(middle, best.tier, signature)
            if slower.plan and key_worth(slower.key) >= wanted * (1 - SAFETY):
                found, high = slower, self._tpot_s(slower)
            elif near:
                break
            else:
                low = middle
        return msgspec.structs.replace(
            found, bound_tokens_per_s=key_worth(found.key), reason="lowest time per token"
        )

    def _within(self, tpot_s: float, tier: Tier, signature: Signature) -> Choice:
        """The plan with most tokens per second under this TPOT target."""
        goal = self.problem.goal
        slo = msgspec.structs.replace(goal.slo, tpot_s=tpot_s)
        if not tier.slo:
            slo = Slo(None, tpot_s)
        problem = self.problem.with_goal(msgspec.structs.replace(goal, slo=slo))
        return Solver(problem, signature, Tier(context=tier.context)).choose(signature)

    def _tpot_s(self, choice: Choice) -> float:
        """The slowest pipeline's."""
        return max(self.builder.pipeline(c, choice.tier).tpot_s for c in choice.plan)

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
            found = multisets(problem, pool, self.depth, most // 20)
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
        if self.complete or _near(choice):
            return choice
        self.generate(signature)
        choice = self.solve(signature)
        return choice if _near(choice) else self._exact(signature, choice)

    def bound(self, signature: Signature) -> float:
        """No plan of the signature is worth more, as far as prices have proved it."""
        return min((bound.of(signature) for bound in self._bounds), default=float("inf"))

    def generate(self, signature: Signature) -> None:
        """Add the pipelines that a signature's plan needs, and a bound."""
        found, bound = generate(self.problem, self.pricer, signature, self.columns)
        self._columns.update((column.need, column) for column in found)
        self._bounds.append(bound)
        self.__dict__.pop("programme", None)

    def _exact(self, signature: Signature, choice: Choice) -> Choice:
        """List all pipelines that a better plan could use, where they are not too many."""
        bound = min(self._bounds, key=lambda bound: bound.of(signature))
        loss = bound.of(signature) - key_worth(choice.key)
        found = close_gap(self.problem, self.pricer, bound, loss, MOST_NEAR)
        if found is None:
            return choice
        self._columns.update((column.need, column) for column in found)
        self.__dict__.pop("programme", None)
        solved = self.programme.solve(signature, 0.0)
        if solved.key < choice.key:
            return choice
        return Choice(self.tier, solved.plan, solved.key, solved.bound_tokens_per_s)

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
