"""Cuts a gear's KV cache to cards with less memory than it was planned for; plans nothing anew."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from flexslurm.gear import Gear, Replica, Stage
from flexslurm.planner.model_spec import ModelSpec
from flexslurm.planner.workload import EngineLimits

WORDS = "its KV cache cut to the memory that the cards really have"


def fit_gear(
    spec: ModelSpec, limits: EngineLimits, memory: Mapping[str, int], gear: Gear
) -> Gear | None:
    """The same layout with no more KV blocks than fit; None where not even one does.

    `memory`: bytes of every card of a type, where that is less than gears are planned with. A gear
    that fits is given back as it is.
    """
    if not any(stage.gpu_type in memory for one in gear.replicas for stage in one.stages):
        return gear
    replicas = []
    for replica in gear.replicas:
        fitting = _fit_replica(spec, limits, memory, replica)
        if fitting is None:
            return None
        replicas.append(fitting)
    if tuple(replicas) == gear.replicas:
        return gear
    kv_tokens = sum(replica.kv_blocks for replica in replicas) * gear.block_tokens
    estimates = msgspec.structs.replace(gear.estimates, kv_tokens=kv_tokens, memory_margin_bytes=())
    reason = f"{gear.reason}; {WORDS}" if gear.reason else WORDS
    return msgspec.structs.replace(
        gear, replicas=tuple(replicas), estimates=estimates, reason=reason
    )


def _fit_replica(
    spec: ModelSpec, limits: EngineLimits, memory: Mapping[str, int], replica: Replica
) -> Replica | None:
    stages = tuple(_fit_stage(spec, limits, memory, stage) for stage in replica.stages)
    if min(stage.kv_blocks for stage in stages) < 1:
        return None
    if stages == replica.stages:
        return replica
    fitting = msgspec.structs.replace(replica, stages=stages)
    longest = fitting.kv_blocks * limits.block_tokens
    return msgspec.structs.replace(fitting, max_context=min(replica.max_context, longest))


def _fit_stage(
    spec: ModelSpec, limits: EngineLimits, memory: Mapping[str, int], stage: Stage
) -> Stage:
    if stage.gpu_type not in memory:
        return stage
    arena = limits.arena_bytes(memory[stage.gpu_type])
    page = spec.page_bytes(limits.block_tokens)
    blocks = min(
        (arena - spec.stage_weight_bytes(stage.lo, stage.hi, stage.tp, rank))
        // (stage.layers * spec.kv_heads_on(stage.tp, rank) * page)
        for rank in range(stage.tp)
    )
    return msgspec.structs.replace(stage, kv_blocks=max(0, min(stage.kv_blocks, blocks)))
