"""What a gear can give within the TTFT and TPOT targets, by the cost model; pure.

A plan that meets the targets gives all it can within them. One that was made because none does, or
that an operator wrote out, may still meet them with smaller batches, at a lower load.
"""

from __future__ import annotations

import msgspec

from flexslurm.gear import Gear, Replica
from flexslurm.planner.layouts import (
    replica_cycle_s,
    replica_first_token_s,
    replica_tokens_per_s,
)
from flexslurm.planner.problem import Problem


def gear_within_targets(problem: Problem, gear: Gear, speed: float) -> float:
    """Tokens per second of all replicas; `speed`: what machines do over what was estimated."""
    known: dict[Replica, float] = {}
    total = 0.0
    for one in gear.replicas:
        stages = tuple(msgspec.structs.replace(stage, node=0) for stage in one.stages)
        bare = msgspec.structs.replace(one, stages=stages)
        if bare not in known:
            known[bare] = replica_within_targets(problem, bare, speed)
        total += known[bare]
    return total


def replica_within_targets(problem: Problem, replica: Replica, speed: float) -> float:
    """With the largest batch that meets both targets; 0 where not even the smallest does."""
    slo, best = problem.slo, 0.0
    sizes = [b for b in problem.batches(len(replica.stages)) if b < replica.max_batch]
    for batch in (*sizes, replica.max_batch):
        one = msgspec.structs.replace(replica, max_batch=batch)
        if slo.tpot_s is not None and replica_cycle_s(problem, one) > slo.tpot_s * speed:
            continue
        if slo.ttft_s is not None and replica_first_token_s(problem, one) > slo.ttft_s * speed:
            continue
        best = max(best, replica_tokens_per_s(problem, one) * speed)
    return best
