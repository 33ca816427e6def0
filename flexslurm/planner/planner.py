"""Plans gears for the signatures of a pool: exactly where the lattice reaches, else by HiGHS.

What is given up comes in tiers: first nothing, then the targets, then the workload's context. A
signature gets the first tier in which any pipeline fits. Pure: the same inputs give the same gears.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from flexslurm.gear import Gear, NoGear, Signature
from flexslurm.planner.build import Builder, no_gear
from flexslurm.planner.columns import key_worth
from flexslurm.planner.model_spec import ModelSpec
from flexslurm.planner.objectives import SAFETY, fewest_gpus
from flexslurm.planner.problem import Problem, StageKind, Tier
from flexslurm.planner.profiles import Profile
from flexslurm.planner.solver import Solution, Solver
from flexslurm.planner.topology import Topology
from flexslurm.planner.workload import Goal, Objective, Slo

TIERS: Mapping[Tier, str] = {
    Tier(): "most tokens per second",
    Tier(slo=False): "no plan meets the targets; most tokens per second without them",
    Tier(slo=False, context=False): (
        "sequences of the workload's length do not fit; most tokens per second with shorter ones"
    ),
}


class Planner:
    """Plans for all signatures that `pool` covers.

    Raises ConfigError for a GPU type of the pool that the topology does not define.
    """

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
        """The best gear of a signature within the pool.

        Where nothing meets the targets, the best that misses them; where nothing holds the
        workload's sequences, what holds shorter ones; its reason says so. NoGear where the model
        does not fit.
        """
        return self.gear_of(signature, self.choose(signature))

    def gear_of(self, signature: Signature, choice: Solution | None) -> Gear | NoGear:
        """The gear of a plan; without one, why there is none."""
        if choice is None:
            return no_gear(self.problem, signature)
        return self.builder.gear(signature, choice.plan, choice.tier, choice.reason)

    def choose(self, signature: Signature) -> Solution | None:
        """The best plan of a signature, or None where the model does not fit."""
        for tier in TIERS:
            choice = self.solver(tier).choose(signature)
            if choice.plan:
                return self.adapt(choice, signature)
        return None

    def adapt(self, best: Solution, signature: Signature) -> Solution:
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

    def _fewest(self, best: Solution, signature: Signature, wanted: float) -> Solution:
        solver = self.solver(best.tier)
        plan = fewest_gpus(solver.programme, signature, wanted)
        if not plan:
            return best
        key = sum(column.key * times for column, times in plan.items())
        return Solution(best.tier, plan, key, key_worth(key), "fewest GPUs that keep up")

    def _quickest(self, best: Solution, signature: Signature, wanted: float) -> Solution:
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

    def _within(self, tpot_s: float, tier: Tier, signature: Signature) -> Solution:
        """The plan with most tokens per second under this TPOT target."""
        goal = self.problem.goal
        slo = msgspec.structs.replace(goal.slo, tpot_s=tpot_s)
        if not tier.slo:
            slo = Slo(None, tpot_s)
        problem = self.problem.with_goal(msgspec.structs.replace(goal, slo=slo))
        return Solver(problem, signature, Tier(context=tier.context)).choose(signature)

    def _tpot_s(self, choice: Solution) -> float:
        """The slowest pipeline's."""
        return max(self.builder.pipeline(c, choice.tier).tpot_s for c in choice.plan)

    def solver(self, tier: Tier) -> Solver:
        if tier not in self._solvers:
            self._solvers[tier] = Solver(self.problem, self.pool, tier)
        return self._solvers[tier]
