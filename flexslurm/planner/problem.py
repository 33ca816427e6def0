"""Tables of one planning problem: what stage kinds hold and how long they take, by run of layers.

Everything is by `[lo, hi]`, the layers `[lo, hi)`; embedding and head are charged to `lo == 0` and
`hi == num_layers`. Tables are computed when first asked for and kept. Never chooses anything.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from flexslurm.errors import ConfigError
from flexslurm.planner.cost import LayerSums, StageCost, stage_cost, step_times
from flexslurm.planner.model_spec import ModelSpec
from flexslurm.planner.topology import Topology
from flexslurm.planner.workload import Goal, SlotLoad, StepLoad

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class StageKind(NamedTuple):
    """What a stage runs on: `tp` GPUs of one type in one node."""

    gpu_type: str
    tp: int


Need = tuple[tuple[StageKind, int], ...]
"""A multiset of stage kinds, sorted: what one pipeline takes."""


class StepTimes(Protocol):
    """Measured times of one stage kind, see `profiles.Profile`."""

    @property
    def gpu_type(self) -> str: ...

    def layer_s(
        self, new_tokens: float, context_tokens: float, pairs: float, sequences: float
    ) -> float: ...

    @property
    def step(self) -> Callable[[float], float]: ...

    @property
    def first(self) -> Callable[[float], float]: ...

    @property
    def last(self) -> Callable[[float], float]: ...

    @property
    def load_layer_s(self) -> float: ...

    @property
    def head(self) -> Callable[[float], float] | None: ...

    @property
    def passing(self) -> Callable[[float], float]: ...


class Tier(msgspec.Struct, frozen=True):
    """What is given up when nothing meets all that was asked for."""

    slo: bool = True
    """The targets hold."""
    context: bool = True
    """Sequences of the workload's length fit."""


class Problem:
    """A model, the GPU types it may run on, and what the plan is for.

    `acted` maps the model names that virtual GPUs act out to their specs. `profiles` are measured
    times, which replace the formula.
    """

    def __init__(
        self,
        spec: ModelSpec,
        topology: Topology,
        goal: Goal,
        acted: Mapping[str, ModelSpec] | None = None,
        profiles: Mapping[StageKind, StepTimes] | None = None,
    ) -> None:
        self.profiles = dict(profiles or {})
        self.spec, self.topology, self.goal = spec, topology, goal
        self.slo, self.limits = goal.slo, goal.limits
        self.acted = acted or {}
        self.layers = spec.num_layers
        self.max_context = min(spec.max_context, self.limits.max_context or spec.max_context)
        self.workload = goal.workload.clipped(self.max_context)
        self.load = StepLoad.of(self.workload, self.limits.max_batch_tokens)
        self.sequence_blocks = -(-self.workload.tokens // self.limits.block_tokens)
        specs = (spec, *self.acted.values())
        self.uniform = all(len(set(one.layer_kinds)) == 1 for one in specs)
        self._sums: dict[tuple[str, int], LayerSums] = {}
        self._blocks: dict[StageKind, Ints] = {}
        self._times: dict[tuple[StageKind, str, int], Floats] = {}
        self._coefficients: dict[StageKind, Floats] = {}

    def with_goal(self, goal: Goal) -> Problem:
        """The same model and GPUs for another goal."""
        return Problem(self.spec, self.topology, goal, self.acted, self.profiles)

    @cached_property
    def least_bytes(self) -> int:
        """The whole model's weights and one block of KV."""
        spec = self.spec
        one_block = spec.num_layers * spec.kv_bytes_per_token_layer() * self.limits.block_tokens
        return spec.weight_bytes() + one_block

    # ---------------------------------------------------------------------------------- kinds

    def kinds(self, gpu_type: str, gpus: int) -> tuple[StageKind, ...]:
        """Stage kinds that a node with `gpus` GPUs of the type allows."""
        most = min(gpus, self.spec.max_tp())
        return tuple(StageKind(gpu_type, tp) for tp in range(1, most + 1))

    def cost(self, kind: StageKind, lo: int, hi: int) -> StageCost:
        """Coefficients of the stage `[lo, hi)` on this kind. Raises ConfigError."""
        gpu = self.topology.gpu(kind.gpu_type)
        acts = gpu.acts_model
        if acts is not None and acts not in self.acted:
            raise ConfigError(f"GPU type '{kind.gpu_type}' acts '{acts}', which was not loaded")
        key = (acts or "", kind.tp)
        if key not in self._sums:
            self._sums[key] = LayerSums(self.acted[acts] if acts else self.spec, kind.tp)
        served = self.layers if acts else None
        return stage_cost(
            self._sums[key], gpu, self.topology.node_link, lo, hi, served_layers=served
        )

    # --------------------------------------------------------------------------------- memory

    def blocks(self, kind: StageKind) -> Ints:
        """KV blocks that fit beside the weights; -1: not even they fit, or there are no layers."""
        if kind not in self._blocks:
            self._blocks[kind] = self._count_blocks(kind)
        return self._blocks[kind]

    def _count_blocks(self, kind: StageKind) -> Ints:
        size = self.layers + 1
        arena = self.limits.arena_bytes(self.topology.gpu(kind.gpu_type).memory_bytes)
        page = self.spec.page_bytes(self.limits.block_tokens)
        result = np.full((size, size), np.iinfo(np.int64).max, dtype=np.int64)
        depth = np.arange(size)[None, :] - np.arange(size)[:, None]
        for rank in range(kind.tp):
            weights = _weights_matrix(self.spec, kind.tp, rank)
            per_block = np.maximum(depth, 1) * self.spec.kv_heads_on(kind.tp, rank) * page
            free = arena - weights
            np.minimum(result, np.where(free >= 0, free // per_block, -1), out=result)
        result[depth <= 0] = -1
        return result

    def min_blocks(self, batch: int, tier: Tier) -> int:
        """Blocks that a batch needs at its longest."""
        return batch * self.sequence_blocks if tier.context else 1

    # ----------------------------------------------------------------------------------- time

    def times(self, kind: StageKind, slots: int, depth: int) -> Floats:
        """Mean seconds of a step with `slots` sequences, in a pipeline of `depth` stages.

        Infinite for no layers. All stages work on a micro-batch each, and pass on together: a step
        is as long as one with prefill where any of the micro-batches brings some. Has its part of
        what was measured that a cycle takes besides.
        """
        load = self.load
        share = load.prefill_share(slots * depth)
        times = self._cached(kind, "mixed", slots)
        if share < 1.0:
            times = (1.0 - share) * self._cached(kind, "decode", slots) + share * times
        return times + self._more_s(kind, slots * depth, depth) / depth

    def _more_s(self, kind: StageKind, batch: int, depth: int) -> float:
        """What a cycle takes besides its steps, beyond what `cycle_s` counts for every kind.

        Once what lies between the last stage's token and the next step, and what passing a step on
        to each further stage takes beyond the link.
        """
        profile = self.profiles.get(kind)
        if profile is None:
            return 0.0
        head_s = 0.0 if profile.head is None else profile.head(batch) - self.topology.step_s
        return max(0.0, head_s) + (depth - 1) * profile.passing(batch)

    def full_times(self, kind: StageKind, slots: int) -> Floats:
        """As `times`, of a step in which a sequence brings as much prefill as it may hold."""
        return self._cached(kind, "full", slots)

    def decode_times(self, kind: StageKind, slots: int) -> Floats:
        """As `times`, of a step in which every sequence decodes."""
        return self._cached(kind, "decode", slots)

    def _cached(self, kind: StageKind, what: str, slots: int) -> Floats:
        key = (kind, what, slots)
        if key not in self._times:
            self._times[key] = self._step_times(kind, self._load(what, slots))
        return self._times[key]

    def _load(self, what: str, slots: int) -> SlotLoad:
        load, budget = self.load, self.limits.max_batch_tokens
        if what != "full":
            return load.with_prefill(slots) if what == "mixed" else load.without_prefill(slots)
        chunk = min(load.prompt_tokens, budget)
        others = max(0, min(slots - 1, budget - chunk))
        return SlotLoad(
            new_tokens=chunk + others,
            context_tokens=others * load.context_tokens + load.prompt_tokens,
            sampled=others + 1,
            pairs=others * load.context_tokens + chunk * load.prompt_tokens,
            sequences=others + 1,
        )

    def _step_times(self, kind: StageKind, load: SlotLoad) -> Floats:
        size = self.layers + 1
        if kind not in self._coefficients and kind not in self.profiles:
            self._coefficients[kind] = self._gather(kind)
        new, context, sampled, pairs, sequences = load
        profile = self.profiles.get(kind)
        if profile is not None:
            layer_s = profile.layer_s(new, context, pairs, sequences)
            ends_s = profile.first(new), profile.last(sampled)
            return self._profiled(layer_s, profile.step(new), ends_s, new)
        result = step_times(self._coefficients[kind], new, context, sampled, pairs)
        result[np.tril_indices(size)] = np.inf
        return result

    def _profiled(
        self, layer_s: float, step_s: float, ends_s: tuple[float, float], new: float
    ) -> Floats:
        """Step times from a measured layer; the send to the next stage is still computed."""
        size = self.layers + 1
        link = self.topology.node_link
        depth = np.arange(size)[None, :] - np.arange(size)[:, None]
        send = link.latency_s + new * self.spec.activation_bytes / link.bandwidth
        result = np.asarray(depth * layer_s + step_s + send, dtype=np.float64)
        result[:, -1] += ends_s[1] - send
        result[0, :] += ends_s[0]
        result[depth <= 0] = np.inf
        return result

    def _gather(self, kind: StageKind) -> Floats:
        """The coefficients of all runs, `[field, lo, hi]`."""
        size, fields = self.layers + 1, StageCost.__struct_fields__
        result = np.zeros((len(fields), size, size))

        def put(lo: int, hi: int) -> Floats:
            cost = self.cost(kind, lo, hi)
            values = np.array([getattr(cost, field) for field in fields])
            result[:, lo, hi] = values
            return values

        if not self.uniform:
            for lo, hi in itertools.combinations(range(size), 2):
                put(lo, hi)
            return result
        for n in range(1, size):
            put(0, n)
            put(self.layers - n, self.layers)
            if n < self.layers - 1:
                values = put(1, 1 + n)
                for lo in range(2, self.layers - n):
                    result[:, lo, lo + n] = values
        return result

    # ---------------------------------------------------------------------- what a user notices

    def cycle_s(self, depth: int, slowest_s: Floats | float) -> Floats | float:
        """Time from one token of a sequence to its next: each of S micro-batches passes once."""
        return depth * slowest_s + self.topology.step_s

    def slowest_for_tpot(self, depth: int, tier: Tier) -> float:
        """The longest step that meets the TPOT target."""
        if not tier.slo or self.slo.tpot_s is None:
            return float("inf")
        return (self.slo.tpot_s - self.topology.step_s) / depth

    def ttft_s(self, depth: int, slowest_full_s: float) -> float:
        """Time to the first token: half a step of waiting, and a step for each prefill chunk."""
        return (self.load.chunks + 0.5) * depth * slowest_full_s + self.topology.step_s

    def full_for_ttft(self, depth: int, tier: Tier) -> float:
        """The longest step with prefill that meets the TTFT target."""
        if not tier.slo or self.slo.ttft_s is None:
            return float("inf")
        return (self.slo.ttft_s - self.topology.step_s) / ((self.load.chunks + 0.5) * depth)

    def batches(self, depth: int) -> Iterator[int]:
        """Batch sizes that are looked at: whole micro-batches, each to 16 and then by eighths.

        Those whose prefill would not fit into the token budget are left out, but for the first.
        """
        slots, most = 1, self.limits.max_batch
        while True:
            yield min(slots * depth, most)
            if slots * depth >= most:
                return
            slots = max(slots + 1, slots * 9 // 8)
            if slots * depth > most:
                slots = -(-most // depth)
            if slots * self.load.new_tokens > self.limits.max_batch_tokens:
                return

    def tokens_per_s(self, batch: int, cycle_s: Floats | float) -> Floats | float:
        """Output tokens of `batch` sequences, each of which advances once a cycle."""
        return batch * self.load.sampled / cycle_s


def _weights_matrix(spec: ModelSpec, tp: int, rank: int) -> Ints:
    """Weight bytes of `[lo, hi)` on one rank, by `[lo, hi]`."""
    layers = spec.num_layers
    sums = np.array(
        [0, *itertools.accumulate(spec.layer_bytes(i, tp, rank) for i in range(layers))]
    )
    result: Ints = sums[None, :] - sums[:, None]
    result[0, :] += spec.first_bytes(tp, rank)
    result[1:, layers] += spec.last_bytes(tp, rank)
    result[0, layers] += spec.last_bytes(tp, rank, alone=True)
    return result
