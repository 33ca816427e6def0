"""Gears written out as text, the way `Gear.layout` prints them; reads, seats and estimates them.

    2x(a100 tp2 [0,20) → l40s tp1 [20,30)) + a100 tp4 [0,30)

Stages of a replica are joined by `→` or `->`, replicas by `+`; `tp1` may be left out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from flexslurm.errors import CapacityError, ConfigError
from flexslurm.gear import Estimates, Gear, Replica, Signature, Stage, check_gear
from flexslurm.planner.problem import Problem, StageKind

_REPLICAS = re.compile(r"^(?:(?P<count>\d+)\s*x\s*)?\((?P<inside>.*)\)$", re.S)
_STAGE = re.compile(
    r"^(?P<type>[A-Za-z0-9_.-]+)(?:\s+tp(?P<tp>\d+))?\s+\[\s*(?P<lo>\d+)\s*,\s*(?P<hi>\d+)\s*\)$"
)
_MOST_REPLICAS = 4096


class StageText(msgspec.Struct, frozen=True):
    """One stage as it was written."""

    gpu_type: str
    tp: int
    lo: int
    hi: int

    @property
    def kind(self) -> StageKind:
        return StageKind(self.gpu_type, self.tp)


def is_layout(text: str) -> bool:
    """Whether the text means a layout rather than a name."""
    return "[" in text


def parse_layout(text: str) -> tuple[tuple[StageText, ...], ...]:
    """The replicas of a layout. Raises ConfigError with the part that cannot be read."""
    replicas: list[tuple[StageText, ...]] = []
    for part in text.split("+"):
        found = _REPLICAS.match(part.strip())
        inside = found["inside"] if found is not None else part
        stages = tuple(_stage(piece) for piece in re.split(r"→|->", inside))
        count = int(found["count"] or 1) if found is not None else 1
        if not 1 <= count <= _MOST_REPLICAS - len(replicas):
            raise _unreadable(part)
        replicas += [stages] * count
    return tuple(replicas)


def _stage(text: str) -> StageText:
    found = _STAGE.match(text.strip())
    if found is None or int(found["tp"] or 1) < 1:
        raise _unreadable(text)
    return StageText(found["type"], int(found["tp"] or 1), int(found["lo"]), int(found["hi"]))


def _unreadable(text: str) -> ConfigError:
    return ConfigError(
        f"cannot read '{text.strip()}' as part of a layout",
        hint="write stages as status shows them, such as 'a100 tp2 [0,20) → l40s tp1 [20,30)'",
    )


def gear_of_layout(problem: Problem, signature: Signature, text: str) -> Gear:
    """The gear of a layout on an allocation, with its KV and its estimates.

    Raises ConfigError for what cannot be read, CapacityError for what does not fit.
    """
    replicas = parse_layout(text)
    known = {shape.gpu_type for shape, _ in signature.counts}
    for stage in (stage for stages in replicas for stage in stages):
        if stage.gpu_type not in known:
            types = ", ".join(sorted(known)) or "no GPUs"
            raise ConfigError(f"there is no '{stage.gpu_type}' here", hint=f"there are {types}")
        if stage.kind not in problem.kinds(stage.gpu_type, stage.tp):
            raise CapacityError(f"the model cannot be cut into tp{stage.tp}")
        if not 0 <= stage.lo < stage.hi <= problem.layers:
            raise ConfigError(f"layers [{stage.lo},{stage.hi}) of {problem.layers}")
    seats = _seats(signature, replicas)
    made = tuple(_replica(problem, one, nodes) for one, nodes in zip(replicas, seats, strict=True))
    gear = Gear(
        name=text.strip(),  # until it is known to be one, for what is refused
        signature=signature,
        block_tokens=problem.limits.block_tokens,
        replicas=made,
        estimates=_estimates(problem, made),
        reason="written out by an operator",
    )
    check_gear(gear, problem.layers)
    return msgspec.structs.replace(gear, name=gear.layout())


def _seats(signature: Signature, replicas: Sequence[Sequence[StageText]]) -> list[tuple[int, ...]]:
    """A node for every stage, those of one replica near each other; first fit."""
    shapes = signature.nodes()
    free = [shape.gpus for shape in shapes]
    found: list[tuple[int, ...]] = []
    for stages in replicas:
        mine: list[int] = []
        for stage in stages:
            fit = [
                node
                for node, shape in enumerate(shapes)
                if shape.gpu_type == stage.gpu_type and free[node] >= stage.tp
            ]
            if not fit:
                raise CapacityError(
                    f"no node has {stage.tp} free {stage.gpu_type} for [{stage.lo},{stage.hi})"
                )
            near = [node for node in reversed(mine) if node in fit]
            node = near[0] if near else min(fit, key=lambda n: (free[n], n))
            free[node] -= stage.tp
            mine.append(node)
        found.append(tuple(mine))
    return found


def _replica(problem: Problem, stages: Sequence[StageText], nodes: Sequence[int]) -> Replica:
    blocks = [int(problem.blocks(stage.kind)[stage.lo, stage.hi]) for stage in stages]
    for stage, count in zip(stages, blocks, strict=True):
        if count < 1:
            raise CapacityError(
                f"{stage.gpu_type} tp{stage.tp} cannot hold layers [{stage.lo},{stage.hi}) "
                "and a block of KV"
            )
    limits = problem.limits
    return Replica(
        stages=tuple(
            Stage(s.gpu_type, s.tp, s.lo, s.hi, count, node)
            for s, count, node in zip(stages, blocks, nodes, strict=True)
        ),
        max_batch=limits.max_batch,
        max_batch_tokens=limits.max_batch_tokens,
        max_context=min(problem.max_context, min(blocks) * limits.block_tokens),
    )


def _slowest_s(problem: Problem, replica: Replica, *, full: bool = False) -> float:
    """The slowest stage's step in a full batch; `full`: with as much prefill as a step may hold."""
    depth = len(replica.stages)
    slots = -(-replica.max_batch // depth)
    steps = []
    for s in replica.stages:
        kind = StageKind(s.gpu_type, s.tp)
        times = problem.full_times(kind, slots) if full else problem.times(kind, slots, depth)
        steps.append(float(times[s.lo, s.hi]))
    return max(steps)


def replica_cycle_s(problem: Problem, replica: Replica) -> float:
    """Time from one token of a sequence to its next in a full batch."""
    return float(problem.cycle_s(len(replica.stages), _slowest_s(problem, replica)))


def replica_first_token_s(problem: Problem, replica: Replica) -> float:
    """Time to the first token of a sequence that comes into an otherwise full batch."""
    return float(problem.ttft_s(len(replica.stages), _slowest_s(problem, replica, full=True)))


def replica_tokens_per_s(problem: Problem, replica: Replica) -> float:
    """Output tokens per second of a replica in a full batch."""
    return float(problem.tokens_per_s(replica.max_batch, replica_cycle_s(problem, replica)))


def _estimates(problem: Problem, replicas: Sequence[Replica]) -> Estimates:
    spec, limits = problem.spec, problem.limits
    load_s = max(
        spec.stage_weight_bytes(s.lo, s.hi, s.tp, rank)
        / problem.topology.gpu(s.gpu_type).storage_bandwidth
        for one in replicas
        for s in one.stages
        for rank in range(s.tp)
    )
    return Estimates(
        tokens_per_s=sum(replica_tokens_per_s(problem, one) for one in replicas),
        ttft_s=max(
            problem.ttft_s(len(one.stages), _slowest_s(problem, one, full=True)) for one in replicas
        ),
        tpot_s=max(replica_cycle_s(problem, one) for one in replicas),
        kv_tokens=sum(one.kv_blocks for one in replicas) * limits.block_tokens,
        load_s=load_s,
    )
