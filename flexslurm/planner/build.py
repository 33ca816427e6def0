"""From the pipelines of a plan to a gear with seats and estimates; or why there is none."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from flexslurm.gear import Estimates, Gear, NoGear, Replica, Signature, Stage
from flexslurm.planner.columns import Column
from flexslurm.planner.packing import seat
from flexslurm.planner.problem import Problem, Tier
from flexslurm.planner.splits import PlannedStage, best_split


class Pipeline(msgspec.Struct, frozen=True):
    """A column with its split, batch limits and estimates."""

    stages: tuple[PlannedStage, ...]
    batch: int
    max_batch: int
    tokens_per_s: float
    ttft_s: float
    tpot_s: float
    load_s: float
    margins: tuple[int, ...]

    @property
    def kv_blocks(self) -> int:
        return min(stage.kv_blocks for stage in self.stages)


class Builder:
    """Makes gears of one problem; remembers the pipelines it has worked out."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._pipelines: dict[tuple[Column, Tier], Pipeline] = {}

    def pipeline(self, column: Column, tier: Tier) -> Pipeline:
        key = (column, tier)
        if key not in self._pipelines:
            self._pipelines[key] = self._work_out(column, tier)
        return self._pipelines[key]

    def _work_out(self, column: Column, tier: Tier) -> Pipeline:
        problem, depth = self.problem, column.depth
        split = best_split(problem, column.need, column.batch, tier)
        assert split is not None, f"{column.need} was valued but has no split"
        slots = -(-column.batch // depth)
        full = max(problem.full_times(s.kind, slots)[s.lo, s.hi] for s in split.stages)
        cycle = float(problem.cycle_s(depth, split.slowest_s))
        return Pipeline(
            stages=split.stages,
            batch=column.batch,
            max_batch=self._most(split.stages, column.batch, tier),
            tokens_per_s=float(problem.tokens_per_s(column.batch, cycle)),
            ttft_s=problem.ttft_s(depth, float(full)),
            tpot_s=cycle,
            load_s=self._load_s(split.stages),
            margins=self._margins(split.stages),
        )

    def _most(self, stages: tuple[PlannedStage, ...], batch: int, tier: Tier) -> int:
        """The largest batch whose steps meet the targets, whatever the KV holds."""
        problem, depth = self.problem, len(stages)
        step, full = problem.slowest_for_tpot(depth, tier), problem.full_for_ttft(depth, tier)
        most = batch
        for larger in problem.batches(depth):
            slots = -(-larger // depth)
            if all(
                problem.times(s.kind, slots, depth)[s.lo, s.hi] <= step
                and problem.full_times(s.kind, slots)[s.lo, s.hi] <= full
                for s in stages
            ):
                most = max(most, larger)
        return most

    def _load_s(self, stages: tuple[PlannedStage, ...]) -> float:
        """Seconds in which the slowest GPU reads its weights from shared storage."""
        return max(self._stage_load_s(stage) for stage in stages)

    def _stage_load_s(self, stage: PlannedStage) -> float:
        kind, profile = stage.kind, self.problem.profiles.get(stage.kind)
        if profile is not None and profile.load_layer_s > 0:
            return profile.load_layer_s * (stage.hi - stage.lo)
        most = max(
            self.problem.spec.stage_weight_bytes(stage.lo, stage.hi, kind.tp, rank)
            for rank in range(kind.tp)
        )
        return most / self.problem.topology.gpu(kind.gpu_type).storage_bandwidth

    def _margins(self, stages: tuple[PlannedStage, ...]) -> tuple[int, ...]:
        """Bytes of each stage's fullest GPU that neither weights nor the replica's KV take."""
        spec, limits = self.problem.spec, self.problem.limits
        page = spec.page_bytes(limits.block_tokens)
        blocks = min(stage.kv_blocks for stage in stages)
        return tuple(
            min(
                limits.arena_bytes(self.problem.topology.gpu(s.kind.gpu_type).memory_bytes)
                - spec.stage_weight_bytes(s.lo, s.hi, s.kind.tp, rank)
                - blocks * (s.hi - s.lo) * spec.kv_heads_on(s.kind.tp, rank) * page
                for rank in range(s.kind.tp)
            )
            for s in stages
        )

    def gear(
        self, signature: Signature, plan: Mapping[Column, int], tier: Tier, reason: str
    ) -> Gear:
        """The gear of a plan, its largest replicas first."""
        ordered = sorted(plan, key=lambda c: (-c.tokens_per_s, c.need))
        pipelines = [self.pipeline(c, tier) for c in ordered for _ in range(plan[c])]
        seats = seat(signature, [[s.kind for s in p.stages] for p in pipelines])
        return Gear(
            name=str(signature),
            signature=signature,
            block_tokens=self.problem.limits.block_tokens,
            replicas=tuple(
                self._replica(pipeline, nodes)
                for pipeline, nodes in zip(pipelines, seats, strict=True)
            ),
            estimates=self.estimates(pipelines),
            reason=reason,
        )

    def _replica(self, pipeline: Pipeline, nodes: tuple[int, ...]) -> Replica:
        limits = self.problem.limits
        return Replica(
            stages=tuple(
                Stage(s.kind.gpu_type, s.kind.tp, s.lo, s.hi, s.kv_blocks, node)
                for s, node in zip(pipeline.stages, nodes, strict=True)
            ),
            max_batch=pipeline.max_batch,
            max_batch_tokens=limits.max_batch_tokens,
            max_context=min(self.problem.max_context, pipeline.kv_blocks * limits.block_tokens),
        )

    def estimates(self, pipelines: list[Pipeline]) -> Estimates:
        total = sum(p.tokens_per_s for p in pipelines)
        return Estimates(
            tokens_per_s=total,
            # Each replica serves in proportion to its rate.
            ttft_s=sum(p.ttft_s * p.tokens_per_s for p in pipelines) / total,
            tpot_s=sum(p.tpot_s * p.tokens_per_s for p in pipelines) / total,
            kv_tokens=sum(p.kv_blocks for p in pipelines) * self.problem.limits.block_tokens,
            load_s=max(p.load_s for p in pipelines),
            memory_margin_bytes=tuple(p.margins for p in pipelines),
        )


def no_gear(problem: Problem, signature: Signature) -> NoGear:
    """Why nothing fits: the memory there is, the memory the model takes, and the difference."""
    spec, limits, need = problem.spec, problem.limits, problem.least_bytes
    have = sum(
        limits.arena_bytes(problem.topology.gpu(shape.gpu_type).memory_bytes) * shape.gpus * count
        for shape, count in signature.counts
    )
    if not signature.counts:
        return NoGear(signature, f"there are no GPUs; {spec.name} takes {need:,} bytes", need)
    if need > have:
        return NoGear(
            signature,
            f"{spec.name} takes {need:,} bytes with one KV block; {signature} has {have:,} bytes "
            f"for it and is {need - have:,} bytes short",
            need - have,
        )
    return NoGear(signature, _misfit(problem, signature, need, have), 0)


def _misfit(problem: Problem, signature: Signature, need: int, have: int) -> str:
    spec = problem.spec
    kinds = {k for shape, _ in signature.counts for k in problem.kinds(shape.gpu_type, shape.gpus)}
    if any(problem.blocks(kind)[0, problem.layers] >= 1 for kind in kinds):
        return (
            f"{spec.name} fits on {signature}, but by these figures it gives less than a "
            "thousandth of a token per second"
        )
    extra = ""
    if spec.tied:
        head = spec.last_bytes() - spec.last_bytes(alone=True)
        extra = f" (over several stages {head:,} more for the second copy of the tied head)"
    return (
        f"{spec.name} takes {need:,} bytes with one KV block{extra}; {signature} has "
        f"{have:,} bytes for it, but no split into whole layers and KV heads fits"
    )
