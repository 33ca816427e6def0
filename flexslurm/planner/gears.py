"""A gear for one signature, or the reason there is none."""

from __future__ import annotations

from collections.abc import Mapping

from flexslurm.gear import Estimates, Gear, NoGear, Replica, Signature, Stage
from flexslurm.planner.model_spec import ModelSpec
from flexslurm.planner.packing import seat
from flexslurm.planner.pipelines import Pipeline, Problem
from flexslurm.planner.search import Chosen, choose, needs
from flexslurm.planner.topology import Topology
from flexslurm.planner.workload import Goal


def plan_gear(
    spec: ModelSpec,
    topology: Topology,
    goal: Goal,
    signature: Signature,
    *,
    acted: Mapping[str, ModelSpec] | None = None,
) -> Gear | NoGear:
    """The best gear for a signature.

    Where nothing meets the targets, the best that misses them; where nothing holds the workload's
    sequences, what holds shorter ones; the gear's reason says so. NoGear where the model does not
    fit. Raises ConfigError for a GPU type that the topology does not define.
    """
    problem = Problem(spec, topology, goal, acted)
    for shape, _ in signature.counts:
        topology.gpu(shape.gpu_type)
    tries: tuple[tuple[dict[str, bool], str], ...] = (
        ({}, "most tokens per second within the targets"),
        ({"relax_slo": True}, "no plan meets the targets; most tokens per second without them"),
        (
            {"relax_slo": True, "any_context": True},
            "sequences as long as the workload's do not fit; shorter ones do",
        ),
    )
    wanted = list(needs(problem, signature))
    for options, reason in tries:
        pipelines = [p for need in wanted if (p := problem.best(need, **options)) is not None]
        chosen = choose(pipelines, signature)
        if chosen is not None:
            return build_gear(problem, signature, chosen, reason)
    return no_gear(problem, signature)


def build_gear(problem: Problem, signature: Signature, chosen: Chosen, reason: str) -> Gear:
    """The gear of chosen pipelines, with its estimates."""
    seats = seat(signature, chosen.pipelines, chosen.cuts)
    replicas = tuple(
        Replica(
            stages=tuple(
                Stage(s.kind.gpu_type, s.kind.tp, s.lo, s.hi, s.kv_blocks, node)
                for s, node in zip(pipeline.stages, nodes, strict=True)
            ),
            max_batch=pipeline.max_batch,
            max_batch_tokens=problem.limits.max_batch_tokens,
            max_context=min(problem.max_context, pipeline.kv_blocks * problem.limits.block_tokens),
        )
        for pipeline, nodes in zip(chosen.pipelines, seats, strict=True)
    )
    estimates = Estimates(
        tokens_per_s=sum(p.tokens_per_s for p in chosen.pipelines),
        ttft_s=max(p.ttft_s for p in chosen.pipelines),
        tpot_s=max(p.tpot_s for p in chosen.pipelines),
        kv_tokens=sum(p.kv_blocks for p in chosen.pipelines) * problem.limits.block_tokens,
        load_s=max(_load_s(problem, p) for p in chosen.pipelines),
        memory_margin_bytes=tuple(_margins(problem, p) for p in chosen.pipelines),
    )
    return Gear(
        name=str(signature),
        signature=signature,
        block_tokens=problem.limits.block_tokens,
        replicas=replicas,
        estimates=estimates,
        reason=reason,
    )


def _load_s(problem: Problem, pipeline: Pipeline) -> float:
    return max(
        problem.spec.stage_weight_bytes(s.lo, s.hi, s.kind.tp, 0)
        / problem.topology.gpu(s.kind.gpu_type).storage_bandwidth
        for s in pipeline.stages
    )


def _margins(problem: Problem, pipeline: Pipeline) -> tuple[int, ...]:
    """Bytes of each stage's fullest GPU that neither weights nor the replica's KV blocks take."""
    page = problem.spec.page_bytes(problem.limits.block_tokens)
    margins = []
    for stage in pipeline.stages:
        gpu = problem.topology.gpu(stage.kind.gpu_type)
        arena = problem.limits.arena_bytes(gpu.memory_bytes)
        tp, layers = stage.kind.tp, stage.hi - stage.lo
        margins.append(
            min(
                arena
                - problem.spec.stage_weight_bytes(stage.lo, stage.hi, tp, rank)
                - pipeline.kv_blocks * layers * problem.spec.kv_heads_on(tp, rank) * page
                for rank in range(tp)
            )
        )
    return tuple(margins)


def no_gear(problem: Problem, signature: Signature) -> NoGear:
    """Why nothing fits: the memory there is, the memory the model takes, and the difference."""
    if not signature.counts:
        return NoGear(signature, "there are no GPUs", problem.spec.weight_bytes())
    have = sum(
        problem.limits.arena_bytes(problem.topology.gpu(shape.gpu_type).memory_bytes)
        * shape.gpus
        * count
        for shape, count in signature.counts
    )
    weights = problem.spec.weight_bytes()
    kv = problem.spec.num_layers * problem.spec.kv_bytes_per_token_layer()
    need = weights + kv * problem.limits.block_tokens
    if need > have:
        return NoGear(
            signature,
            f"{problem.spec.name} takes {need:,} bytes with one KV block, "
            f"{signature} has {have:,} for it: {need - have:,} bytes short",
            need - have,
        )
    return NoGear(
        signature,
        f"{problem.spec.name} takes {need:,} bytes with one KV block and {signature} has {have:,}, "
        "but no split over whole layers and heads fits",
        0,
    )
