"""What it costs to compute KV anew from tokens, in tokens that are not given out; pure.

A step with a chunk of prefill is longer than one of decoding, and so is the cycle of every sequence
in the replica: what the replica gives out in that time is lost. So is the token that the sequence
itself would have got. Recomputing as such gives no tokens that anyone waits for.
"""

from __future__ import annotations

import msgspec

from flexslurm.gear import Gear, Replica
from flexslurm.planner.layouts import replica_tokens_per_s
from flexslurm.planner.problem import Problem, StageKind


class RecomputeCost(msgspec.Struct, frozen=True):
    """Of one replica, or of a gear's in the mean."""

    chunk_tokens: int
    """Tokens that are computed in one step."""
    lost_tokens: float
    """Tokens of answers that each such step costs.

    A machine that is slower than estimated takes longer and would have given less meanwhile: the
    product is the same, so that measured speeds do not correct it.
    """

    def of(self, tokens: int) -> float:
        """Tokens of answers that it costs to compute the KV of so many tokens of one sequence."""
        return -(-max(tokens, 0) // self.chunk_tokens) * self.lost_tokens


def recompute_cost(problem: Problem, replica: Replica) -> RecomputeCost:
    """Of a replica with a full batch."""
    depth = len(replica.stages)
    slots = -(-replica.max_batch // depth)
    full_s = decode_s = 0.0
    for s in replica.stages:
        kind = StageKind(s.gpu_type, s.tp)
        full_s = max(full_s, float(problem.full_times(kind, slots)[s.lo, s.hi]))
        decode_s = max(decode_s, float(problem.decode_times(kind, slots)[s.lo, s.hi]))
    longer_s = max(full_s - decode_s, 0.0) * depth
    chunk = min(problem.load.prompt_tokens, problem.limits.max_batch_tokens)
    return RecomputeCost(max(chunk, 1), replica_tokens_per_s(problem, replica) * longer_s + 1.0)


def gear_recompute_cost(problem: Problem, gear: Gear) -> RecomputeCost:
    """In the mean over a gear's replicas, each as often as it takes sequences."""
    costs = [recompute_cost(problem, one) for one in gear.replicas]
    speeds = [replica_tokens_per_s(problem, one) for one in gear.replicas]
    lost = sum(c.lost_tokens * v for c, v in zip(costs, speeds, strict=True)) / sum(speeds)
    return RecomputeCost(costs[0].chunk_tokens, lost)
