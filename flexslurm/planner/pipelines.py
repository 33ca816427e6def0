"""The best way to run one pipeline: layer split and batch for a multiset of stage kinds.

A pipeline of S stages keeps S micro-batches in flight, so each sequence gets a token every
`S * slowest stage + head` seconds. The split minimises the slowest stage under the memory limits;
among equals it leaves most room for KV. Never looks at more than one pipeline.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from flexslurm.errors import ConfigError
from flexslurm.planner.cost import LayerSums, StageCost, stage_cost
from flexslurm.planner.model_spec import ModelSpec
from flexslurm.planner.topology import Topology
from flexslurm.planner.workload import Goal, StepLoad

Matrix = npt.NDArray[np.float64]


class StageKind(NamedTuple):
    """What a stage runs on: `tp` GPUs of one type in one node."""

    gpu_type: str
    tp: int


Need = tuple[tuple[StageKind, int], ...]
"""A multiset of stage kinds, sorted."""


class PlannedStage(msgspec.Struct, frozen=True):
    kind: StageKind
    lo: int
    hi: int
    kv_blocks: int


class Pipeline(msgspec.Struct, frozen=True):
    """One pipeline with its best split and batch."""

    need: Need
    stages: tuple[PlannedStage, ...]
    batch: int
    """Sequences the estimate is for."""
    max_batch: int
    """Sequences it may run at once within the TPOT target."""
    tokens_per_s: float
    ttft_s: float
    tpot_s: float

    @property
    def gpus(self) -> int:
        return sum(kind.tp * count for kind, count in self.need)

    @property
    def kv_blocks(self) -> int:
        return min(stage.kv_blocks for stage in self.stages)

    @property
    def penalty(self) -> int:
        """What makes it less simple than one GPU: types, then stages, then TP, then GPUs."""
        types = len({kind.gpu_type for kind, _ in self.need})
        depth = len(self.stages)
        return 1000 * (types - 1) + 100 * (depth - 1) + 10 * (self.gpus - depth) + self.gpus


class Problem:
    """Everything a pipeline's worth depends on, with the tables computed from it.

    `acted` maps the model names that virtual GPUs act out to their specs.
    """

    def __init__(
        self,
        spec: ModelSpec,
        topology: Topology,
        goal: Goal,
        acted: Mapping[str, ModelSpec] | None = None,
    ) -> None:
        self.spec, self.topology, self.goal = spec, topology, goal
        self.slo, self.limits = goal.slo, goal.limits
        self.acted = acted or {}
        self.max_context = min(spec.max_context, self.limits.max_context or spec.max_context)
        self.workload = goal.workload.clipped(self.max_context)
        self.load = StepLoad.of(self.workload, self.limits.max_batch_tokens)
        self.sequence_blocks = -(-self.workload.tokens // self.limits.block_tokens)
        self._sums: dict[tuple[str, int], LayerSums] = {}
        self._blocks: dict[StageKind, npt.NDArray[np.int64]] = {}
        self._times: dict[tuple[StageKind, int, bool], Matrix] = {}
        self._costs: dict[StageKind, list[list[StageCost | None]]] = {}

    def kinds(self, gpu_type: str, gpus: int) -> tuple[StageKind, ...]:
        """Stage kinds that a node with `gpus` GPUs of the type allows."""
        return tuple(StageKind(gpu_type, tp) for tp in range(1, min(gpus, self.spec.max_tp()) + 1))

    def cost(self, kind: StageKind, lo: int, hi: int) -> StageCost:
        """Coefficients of the stage `[lo, hi)` on this kind."""
        gpu = self.topology.gpu(kind.gpu_type)
        acts = gpu.acts_model
        if acts is not None and acts not in self.acted:
            raise ConfigError(f"GPU type '{kind.gpu_type}' acts '{acts}', which was not loaded")
        key = (acts or "", kind.tp)
        if key not in self._sums:
            self._sums[key] = LayerSums(self.acted[acts] if acts else self.spec, kind.tp)
        served = self.spec.num_layers if acts else None
        return stage_cost(
            self._sums[key], gpu, self.topology.node_link, lo, hi, served_layers=served
        )

    def blocks(self, kind: StageKind) -> npt.NDArray[np.int64]:
        """KV blocks that fit beside the weights of `[lo, hi)`, by `[lo, hi]`; -1: not even they."""
        if kind not in self._blocks:
            self._blocks[kind] = self._count_blocks(kind)
        return self._blocks[kind]

    def _count_blocks(self, kind: StageKind) -> npt.NDArray[np.int64]:
        layers = self.spec.num_layers
        arena = self.limits.arena_bytes(self.topology.gpu(kind.gpu_type).memory_bytes)
        page = self.spec.page_bytes(self.limits.block_tokens)
        result = np.full((layers + 1, layers + 1), np.iinfo(np.int64).max, dtype=np.int64)
        depth = np.arange(layers + 1)[None, :] - np.arange(layers + 1)[:, None]
        for rank in range(kind.tp):
            weights = _weights_matrix(self.spec, kind.tp, rank)
            per_block = np.maximum(depth, 1) * self.spec.kv_heads_on(kind.tp, rank) * page
            free = arena - weights
            np.minimum(result, np.where(free >= 0, free // per_block, -1), out=result)
        result[depth <= 0] = -1
        return result

    def times(self, kind: StageKind, slots: int, *, full: bool) -> Matrix:
        """Seconds of a step of `[lo, hi)` with `slots` sequences; of none, infinity.

        `full`: one of them brings as much prefill as a step may hold.
        """
        key = (kind, slots, full)
        if key not in self._times:
            self._times[key] = self._step_times(kind, slots, full)
        return self._times[key]

    def _step_times(self, kind: StageKind, slots: int, full: bool) -> Matrix:
        layers = self.spec.num_layers
        costs = self._costs.get(kind)
        if costs is None:
            costs = [
                [self.cost(kind, lo, hi) if hi > lo else None for hi in range(layers + 1)]
                for lo in range(layers + 1)
            ]
            self._costs[kind] = costs
        load, budget = self.load, self.limits.max_batch_tokens
        new, context = slots * load.new_tokens, slots * load.context_tokens
        sampled, pairs = slots * load.sampled, slots * load.pairs
        if full:
            chunk = min(load.prompt_tokens, budget)
            others = max(0, min(slots - 1, budget - chunk))
            new, sampled = float(chunk + others), float(others + 1)
            pairs = others * load.context_tokens + chunk * load.prompt_tokens
            context = others * load.context_tokens + load.prompt_tokens
        result = np.full((layers + 1, layers + 1), np.inf)
        for lo, row in enumerate(costs):
            for hi, cost in enumerate(row):
                if cost is not None:
                    result[lo, hi] = cost.step_s(new, context, sampled, pairs)
        return result

    def cycle_s(self, depth: int, slowest_s: float) -> float:
        """Time from one token of a sequence to its next."""
        return depth * slowest_s + self.topology.step_s

    def ttft_s(self, depth: int, slowest_full_s: float) -> float:
        """Time to the first token: half a step of waiting, and a step for each prefill chunk."""
        return (self.load.chunks + 0.5) * depth * slowest_full_s + self.topology.step_s

    def best(self, need: Need, *, relax_slo: bool = False, any_context: bool = False) -> (
        Pipeline | None
    ):  # fmt: skip
        """The batch and split with the most tokens per second, or None where nothing fits.

        `relax_slo`: ignore the targets. `any_context`: one block of KV is enough.
        """
        depth = sum(count for _, count in need)
        if depth > self.spec.num_layers:
            return None
        best: Pipeline | None = None
        for batch in self.batches(depth):
            found = self._at_batch(need, depth, batch, relax_slo, any_context)
            if found is None:
                break
            if best is None or found.tokens_per_s > best.tokens_per_s:
                best = found
            if any_context:
                break
        return best

    def batches(self, depth: int) -> Iterator[int]:
        """Batch sizes that are looked at: whole micro-batches, finely to 16 and then by eighths."""
        slots = 1
        while True:
            yield min(slots * depth, self.limits.max_batch)
            if slots * depth >= self.limits.max_batch:
                return
            slots = max(slots + 1, slots * 9 // 8)
            if slots * depth > self.limits.max_batch:
                slots = -(-self.limits.max_batch // depth)

    def _at_batch(
        self, need: Need, depth: int, batch: int, relax_slo: bool, any_context: bool
    ) -> Pipeline | None:
        slots = -(-batch // depth)
        if slots > 1 and slots * self.load.new_tokens > self.limits.max_batch_tokens:
            return None
        search = SplitSearch(self, need, slots, 1 if any_context else batch * self.sequence_blocks)
        if not relax_slo and self.slo.ttft_s is not None:
            waits = (self.load.chunks + 0.5) * depth
            search.limit_full((self.slo.ttft_s - self.topology.step_s) / waits)
        found = search.run()
        if found is None:
            return None
        stages, slowest = found
        tpot = self.cycle_s(depth, slowest)
        if not relax_slo and self.slo.tpot_s is not None and tpot > self.slo.tpot_s:
            return None
        full = max(self.times(s.kind, slots, full=True)[s.lo, s.hi] for s in stages)
        return Pipeline(
            need=need,
            stages=stages,
            batch=batch,
            max_batch=self._most(stages, batch),
            tokens_per_s=batch * self.load.sampled / tpot,
            ttft_s=self.ttft_s(depth, float(full)),
            tpot_s=tpot,
        )

    def _most(self, stages: tuple[PlannedStage, ...], batch: int) -> int:
        """Largest batch whose steps meet the TPOT target, whatever the KV holds."""
        target = self.slo.tpot_s
        if target is None:
            return self.limits.max_batch
        most = batch
        for larger in self.batches(len(stages)):
            slots = -(-larger // len(stages))
            slowest = max(self.times(s.kind, slots, full=False)[s.lo, s.hi] for s in stages)
            if self.cycle_s(len(stages), float(slowest)) <= target:
                most = max(most, larger)
        return most


def _weights_matrix(spec: ModelSpec, tp: int, rank: int) -> npt.NDArray[np.int64]:
    """Weight bytes of `[lo, hi)` on one rank, by `[lo, hi]`."""
    layers = spec.num_layers
    sums = np.array(
        [0, *itertools.accumulate(spec.layer_bytes(i, tp, rank) for i in range(layers))]
    )
    result: npt.NDArray[np.int64] = sums[None, :] - sums[:, None]
    result[0, :] += spec.first_bytes(tp, rank)
    result[1:, layers] += spec.last_bytes(tp, rank)
    result[0, layers] += spec.last_bytes(tp, rank, alone=True)
    return result


class SplitSearch:
    """The order and layer split of a multiset of kinds with the smallest slowest stage.

    Under a bound on the step time a stage that takes as many layers as it may is never worse than
    one that takes fewer, so the furthest layer reached by each sub-multiset decides whether the
    bound can be met; the smallest bound among the stage times that occur is found by bisection.
    """

    def __init__(self, problem: Problem, need: Need, slots: int, min_blocks: int) -> None:
        self.problem, self.need = problem, need
        self.kinds = [kind for kind, _ in need]
        self.counts = tuple(count for _, count in need)
        self.layers = problem.spec.num_layers
        self.slots = slots
        self.times = [problem.times(kind, slots, full=False) for kind in self.kinds]
        self.blocks = [problem.blocks(kind) for kind in self.kinds]
        self.allowed = [blocks >= max(1, min_blocks) for blocks in self.blocks]

    def limit_full(self, bound_s: float) -> None:
        """Refuse stages whose step with a full prefill chunk takes longer."""
        for index, kind in enumerate(self.kinds):
            full = self.problem.times(kind, self.slots, full=True)
            self.allowed[index] = self.allowed[index] & (full <= bound_s)

    def run(self) -> tuple[tuple[PlannedStage, ...], float] | None:
        """The stages in order and the slowest one's time; None where no split fits."""
        bounds = np.unique(
            np.concatenate(
                [time[allowed] for time, allowed in zip(self.times, self.allowed, strict=True)]
            )
        )
        slowest = self._bisect(bounds, lambda bound: [time <= bound for time in self.times])
        if slowest is None:
            return None
        for index, time in enumerate(self.times):
            self.allowed[index] = self.allowed[index] & (time <= slowest)
        rooms = np.unique(
            np.concatenate([b[a] for b, a in zip(self.blocks, self.allowed, strict=True)])
        )[::-1]
        room = self._bisect(rooms, lambda least: [blocks >= least for blocks in self.blocks])
        assert room is not None
        stages = self._stages([blocks >= room for blocks in self.blocks])
        assert stages is not None
        return stages, slowest

    def _bisect(self, values: npt.NDArray[np.generic], masks: object) -> float | None:
        """The first of `values` whose masks leave a split; later ones leave more."""
        assert callable(masks)
        if len(values) == 0 or self._stages(masks(values[-1])) is None:
            return None
        lo, hi = 0, len(values) - 1
        while lo < hi:
            middle = (lo + hi) // 2
            if self._stages(masks(values[middle])) is not None:
                hi = middle
            else:
                lo = middle + 1
        return float(values[lo])

    def _stages(self, masks: list[npt.NDArray[np.bool_]]) -> tuple[PlannedStage, ...] | None:
        allowed = [m & a for m, a in zip(masks, self.allowed, strict=True)]
        # Furthest layer for each start, the end of the model left out: only the last may hold it.
        reach = [mask[:, : self.layers].sum(axis=1).tolist() for mask in allowed]
        ends = [mask[:, self.layers].tolist() for mask in allowed]
        total = sum(self.counts)
        furthest: dict[tuple[int, ...], tuple[int, int]] = {(0,) * len(self.counts): (0, -1)}
        states = sorted(itertools.product(*(range(c + 1) for c in self.counts)), key=sum)
        for state in states[1:]:
            left = total - sum(state)
            best = (-1, -1)
            for index in range(len(state)):
                before = _less(state, index)
                start = furthest.get(before, (-1, -1))[0] if before is not None else -1
                if start < 0:
                    continue
                if left == 0:
                    hi = self.layers if ends[index][start] else -1
                else:
                    hi = min(start + reach[index][start], self.layers - left)
                if hi > start and hi > best[0]:
                    best = (hi, index)
            furthest[state] = best
        if furthest[self.counts][0] != self.layers:
            return None
        return self._walk_back(furthest)

    def _walk_back(
        self, furthest: Mapping[tuple[int, ...], tuple[int, int]]
    ) -> tuple[PlannedStage, ...]:
        state, stages = self.counts, []
        while sum(state):
            hi, index = furthest[state]
            before = _less(state, index)
            assert before is not None
            lo = furthest[before][0]
            blocks = int(self.blocks[index][lo, hi])
            stages.append(PlannedStage(self.kinds[index], lo, hi, blocks))
            state = before
        return tuple(reversed(stages))


def _less(state: tuple[int, ...], index: int) -> tuple[int, ...] | None:
    if state[index] == 0:
        return None
    return (*state[:index], state[index] - 1, *state[index + 1 :])
