"""The best plan of a small allocation by trying everything; shares only the cost of a stage.

Every way to cut nodes into groups, to put groups into pipelines in any order or leave them idle, to
split the layers and to choose the batch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import cache

from flexslurm.gear import Signature
from flexslurm.planner.cost import LayerSums, stage_cost
from flexslurm.planner.model_spec import ModelSpec
from flexslurm.planner.topology import Topology
from flexslurm.planner.workload import Goal

Group = tuple[str, int]


def partitions(total: int, most: int) -> Iterator[tuple[int, ...]]:
    """Ways to write up to `total` as a sum of parts of at most `most`, some left over."""
    yield ()
    for part in range(1, min(total, most) + 1):
        for rest in partitions(total - part, part):
            yield (part, *rest)


class BruteForce:
    def __init__(self, spec: ModelSpec, topology: Topology, goal: Goal) -> None:
        self.spec, self.topology, self.goal = spec, topology, goal
        longest = min(spec.max_context, goal.limits.max_context or spec.max_context)
        self.prompt = max(1, min(goal.workload.prompt_tokens, longest - 1))
        self.output = min(goal.workload.output_tokens, longest - self.prompt)

    def best(self, signature: Signature, *, slo: bool, context: bool) -> float:
        """Tokens per second of the best plan; 0 where no pipeline fits."""
        self.slo, self.context = slo, context
        self.pipeline = cache(self._pipeline)
        nodes = signature.nodes()
        ways = [
            [tuple((node.gpu_type, tp) for tp in cut) for cut in partitions(node.gpus, 99)]
            for node in nodes
        ]
        layouts = {tuple(sorted(sum(way, ()))) for way in itertools.product(*ways)}
        self.share = cache(self._share)
        return max((self.share(groups) for groups in layouts), default=0.0)

    def _share(self, groups: tuple[Group, ...]) -> float:
        """Best use of these groups: the first is idle or in a pipeline with some of the others."""
        if not groups:
            return 0.0
        first, rest = groups[0], groups[1:]
        best = self.share(rest)
        for size in range(len(rest) + 1):
            for mates in {tuple(c) for c in itertools.combinations(rest, size)}:
                left = list(rest)
                for mate in mates:
                    left.remove(mate)
                worth = self.pipeline(tuple(sorted((first, *mates))))
                if worth > 0:
                    best = max(best, worth + self.share(tuple(left)))
        return best

    def _pipeline(self, groups: tuple[Group, ...]) -> float:
        layers, depth = self.spec.num_layers, len(groups)
        best = 0.0
        for order in set(itertools.permutations(groups)):
            for cuts in itertools.combinations(range(1, layers), depth - 1):
                borders = (0, *cuts, layers)
                best = max(best, self._split(order, borders))
        return best

    def _split(self, order: tuple[Group, ...], borders: tuple[int, ...]) -> float:
        depth, limits = len(order), self.goal.limits
        stages = [
            self._stage(group, lo, hi)
            for group, lo, hi in zip(order, borders, borders[1:], strict=False)
        ]
        if any(blocks < 1 for blocks, _ in stages):
            return 0.0
        blocks = min(blocks for blocks, _ in stages)
        best, batch = 0.0, 0
        for batch in self._batches(depth):
            sequence = math.ceil((self.prompt + self.output) / limits.block_tokens)
            if self.context and batch * sequence > blocks:
                break
            slots = math.ceil(batch / depth)
            chunks = math.ceil(self.prompt / limits.max_batch_tokens)
            held = self.output - 1 + chunks
            decode = self.prompt + self.output / 2
            prefill = (self.prompt + self.prompt / chunks) / 2
            # How many slots of a micro-batch bring a chunk, in a step where any does; and how
            # often any slot of all micro-batches does, for which then all stages wait.
            bring = slots * (chunks / held) / (1 - ((held - chunks) / held) ** slots)
            often = 1 - ((held - chunks) / held) ** (slots * depth)
            slowest = max(
                (1 - often) * cost.step_s(slots, slots * decode, slots, slots * decode)
                + often
                * cost.step_s(
                    slots - bring + bring * self.prompt / chunks,
                    (slots - bring) * decode + bring * prefill,
                    slots - bring + bring / chunks,
                    (slots - bring) * decode + bring * prefill * self.prompt / chunks,
                )
                for _, cost in stages
            )
            cycle = depth * slowest + self.topology.step_s
            if self.slo and self.goal.slo.tpot_s is not None and cycle > self.goal.slo.tpot_s:
                break
            if self.slo and self.goal.slo.ttft_s is not None:
                chunk = min(self.prompt, limits.max_batch_tokens)
                others = max(0, min(slots - 1, limits.max_batch_tokens - chunk))
                mean = ((self.output - 1) * decode + chunks * prefill) / held
                full = max(
                    cost.step_s(
                        chunk + others,
                        others * mean + self.prompt,
                        others + 1,
                        others * mean + chunk * self.prompt,
                    )
                    for _, cost in stages
                )
                if (chunks + 0.5) * depth * full + self.topology.step_s > self.goal.slo.ttft_s:
                    break
            best = max(best, batch * self.output / held / cycle)
            if not self.context:
                break
        return best

    def _batches(self, depth: int) -> Iterator[int]:
        """The grid of batches is part of the question, not of the search."""
        most, slots = self.goal.limits.max_batch, 1
        chunks = math.ceil(self.prompt / self.goal.limits.max_batch_tokens)
        new = (self.prompt + self.output - 1) / (self.output - 1 + chunks)
        while True:
            yield min(slots * depth, most)
            if slots * depth >= most:
                return
            slots = min(max(slots + 1, slots * 9 // 8), math.ceil(most / depth))
            if slots * new > self.goal.limits.max_batch_tokens:
                return

    @cache  # noqa: B019 - the instance lives as long as the test
    def _stage(self, group: Group, lo: int, hi: int):
        gpu_type, tp = group
        spec, limits = self.spec, self.goal.limits
        gpu = self.topology.gpu(gpu_type)
        if tp > spec.max_tp():
            return -1, None
        arena = limits.arena_bytes(gpu.memory_bytes)
        blocks = min(
            (arena - spec.stage_weight_bytes(lo, hi, tp, rank))
            // ((hi - lo) * spec.kv_bytes_per_token_layer(tp, rank) * limits.block_tokens)
            for rank in range(tp)
        )
        return blocks, stage_cost(LayerSums(spec, tp), gpu, self.topology.node_link, lo, hi)
