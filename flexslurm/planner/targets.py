"""What gears can give within the TTFT and TPOT targets, by the cost model.

A plan that meets the targets gives all it can within them. One that was made because none does, or
that an operator wrote out, may still meet them with smaller batches, at a lower load. Never plans.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import msgspec

from flexslurm.gear import Gear, Replica
from flexslurm.planner.layouts import (
    replica_cycle_s,
    replica_first_token_s,
    replica_tokens_per_s,
)
from flexslurm.planner.placement import bare_replica
from flexslurm.planner.problem import Problem

_MOST_KNOWN = 4096


class BatchTimes(NamedTuple):
    """One batch size of a replica."""

    tokens_per_s: float
    tpot_s: float
    ttft_s: float


class WithinTargets:
    """Answers for one problem; remembers the replicas it has worked out."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._known: dict[Replica, tuple[BatchTimes, ...]] = {}

    def gear(self, gear: Gear, speed: float) -> float:
        """Tokens per second of all replicas; `speed`: what machines do over what was estimated."""
        alike = Counter(map(bare_replica, gear.replicas))
        return sum(times * self.replica(one, speed) for one, times in alike.items())

    def replica(self, replica: Replica, speed: float) -> float:
        """With the best batch that meets both targets; 0 where not even the smallest does."""
        slo = self._problem.slo
        most_tpot_s = float("inf") if slo.tpot_s is None else slo.tpot_s * speed
        most_ttft_s = float("inf") if slo.ttft_s is None else slo.ttft_s * speed
        return max(
            (
                one.tokens_per_s * speed
                for one in self._times(replica)
                if one.tpot_s <= most_tpot_s and one.ttft_s <= most_ttft_s
            ),
            default=0.0,
        )

    def _times(self, replica: Replica) -> tuple[BatchTimes, ...]:
        bare = bare_replica(replica)
        if bare not in self._known:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[bare] = tuple(self._worked_out(bare))
        return self._known[bare]

    def _worked_out(self, replica: Replica) -> list[BatchTimes]:
        problem, most = self._problem, replica.max_batch
        sizes = [batch for batch in problem.batches(len(replica.stages)) if batch < most]
        found = []
        for batch in (*sizes, most):
            one = msgspec.structs.replace(replica, max_batch=batch)
            found.append(
                BatchTimes(
                    replica_tokens_per_s(problem, one),
                    replica_cycle_s(problem, one),
                    replica_first_token_s(problem, one),
                )
            )
        return found
