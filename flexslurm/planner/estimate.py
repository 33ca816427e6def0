"""What any gear should do under a workload, by the figures that gears are planned with."""

from __future__ import annotations

import msgspec

from flexslurm.gear import Gear, Replica
from flexslurm.planner.problem import Problem, StageKind


class ReplicaEstimate(msgspec.Struct, frozen=True):
    """One replica at the batch that gives most within its limits."""

    batch: int
    tokens_per_s: float
    ttft_s: float
    tpot_s: float


def estimate(problem: Problem, gear: Gear) -> tuple[ReplicaEstimate, ...]:
    """By replica; the targets are not looked at, the KV and batch limits of the gear are."""
    return tuple(_replica(problem, replica) for replica in gear.replicas)


def _replica(problem: Problem, replica: Replica) -> ReplicaEstimate:
    depth = len(replica.stages)
    room = replica.kv_blocks // problem.sequence_blocks
    batches = [b for b in problem.batches(depth) if b <= min(room, replica.max_batch)]
    return max(
        (at_batch(problem, replica, batch) for batch in batches or [1]),
        key=lambda found: found.tokens_per_s,
    )


def at_batch(problem: Problem, replica: Replica, batch: int) -> ReplicaEstimate:
    """A replica with `batch` sequences running."""
    depth = len(replica.stages)
    slots = -(-batch // depth)

    def slowest(*, full: bool) -> float:
        return max(
            float(problem.times(StageKind(s.gpu_type, s.tp), slots, full=full)[s.lo, s.hi])
            for s in replica.stages
        )

    cycle = float(problem.cycle_s(depth, slowest(full=False)))
    return ReplicaEstimate(
        batch=batch,
        tokens_per_s=float(problem.tokens_per_s(batch, cycle)),
        ttft_s=problem.ttft_s(depth, slowest(full=True)),
        tpot_s=cycle,
    )
