"""Whose KV a shift computes anew, and how much of it, read off the plan of its moves; pure."""

from __future__ import annotations

from collections.abc import Mapping

from flexslurm.control.installed import ReplicaKey
from flexslurm.engine.load import RunningKv
from flexslurm.engine.shift_plan import ShiftPlan
from flexslurm.head.move_plan import MovePlan


def redone_tokens(
    found: MovePlan, running: Mapping[ReplicaKey, list[RunningKv]], block_tokens: int
) -> dict[str, int]:
    """Tokens whose KV is there now and will be computed again, by sequence.

    `running`: what the open drivers have. They are of sequences that find no room, that are too
    long, that lost a member, or that a notice is too short for; and of all that are in replicas
    which go, where nothing can be moved. Prompts that are computed in part are among them.
    """
    going = {one.key for one in found.going}
    held = {
        kv.seq_id: kv.computed
        for key, sequences in running.items()
        if key in going
        for kv in sequences
        if kv.computed
    }
    if found.plan is None:
        return held
    lost = _whole(found.plan)
    redone = {seq_id: tokens for seq_id, tokens in held.items() if seq_id in lost}
    if found.ask.leaving_s:
        in_time = {one.seq_id: one.blocks * block_tokens for one in found.plan.scheduled}
        for seq_id in found.plan.routes.to.keys() & held.keys():
            redone[seq_id] = max(held[seq_id] - in_time.get(seq_id, 0), 0)
    return {seq_id: tokens for seq_id, tokens in redone.items() if tokens}


def _whole(plan: ShiftPlan) -> frozenset[str]:
    return frozenset((*plan.routes.evicted, *plan.routes.unfit, *plan.recomputed))
