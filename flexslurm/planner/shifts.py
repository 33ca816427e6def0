"""What a shift from a gear to the one for a node less must move at least; gears as layer counts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from flexslurm.gear import Signature
from flexslurm.planner.build import Pipeline
from flexslurm.planner.problem import Problem
from flexslurm.planner.splits import PlannedStage
from flexslurm.planner.table import ShiftCost

LINK_SHARE = 0.6
"""Share of a node's link that a shift may take while the old gear serves."""

Floats = npt.NDArray[np.float64]


class ShiftCosts:
    """Costs of losing one node, for signatures that are added in order of size.

    A gear holds so many copies of each layer on each GPU type. What the next gear needs of a layer
    on a type beyond what is left there must be moved.
    """

    def __init__(self, problem: Problem, pool: Signature) -> None:
        self.problem, self.pool = problem, pool
        self.types = sorted({shape.gpu_type for shape, _ in pool.counts})
        spec = problem.spec
        layers = [spec.layer_bytes(layer) for layer in range(spec.num_layers)]
        self._bytes = np.array([spec.first_bytes(), *layers, spec.last_bytes()], dtype=float)
        self._pipelines: dict[tuple[PlannedStage, ...], Floats] = {}
        self._held: dict[Signature, Floats] = {}

    def add(
        self, signature: Signature, plan: Sequence[tuple[Pipeline, int]]
    ) -> tuple[ShiftCost, ...]:
        """The costs of going on with one node of each shape less."""
        held = np.zeros((len(self.types), len(self._bytes)))
        for pipeline, times in plan:
            held += times * self._copies(pipeline)
        self._held[signature] = held
        costs = []
        for shape, _ in signature.counts:
            rest = {s: n - (s == shape) for s, n in signature.counts}
            smaller = Signature(tuple((s, n) for s, n in rest.items() if n))
            wanted = self._held.get(smaller)
            if wanted is not None:
                index = [s for s, _ in self.pool.counts].index(shape)
                costs.append(self._cost(index, signature, smaller, held, wanted))
        return tuple(costs)

    def _cost(
        self, shape: int, before: Signature, after: Signature, held: Floats, wanted: Floats
    ) -> ShiftCost:
        left = np.array([_gpus(after, t) / max(1, _gpus(before, t)) for t in self.types])
        lacking = np.maximum(0.0, wanted - held * left[:, None]) @ self._bytes
        nodes = np.array([_nodes(after, t) for t in self.types])
        rate = self.problem.topology.node_link.bandwidth * LINK_SHARE * np.maximum(1, nodes)
        return ShiftCost(shape, int(lacking.sum()), round(float((lacking / rate).max()), 6))

    def _copies(self, pipeline: Pipeline) -> Floats:
        """Copies of the embedding, each layer and the head, by GPU type."""
        key = pipeline.stages
        if key not in self._pipelines:
            copies = np.zeros((len(self.types), len(self._bytes)))
            for stage in pipeline.stages:
                row = self.types.index(stage.kind.gpu_type)
                copies[row, stage.lo + 1 : stage.hi + 1] += 1
                copies[row, 0] += stage.lo == 0
                copies[row, -1] += stage.hi == self.problem.layers
            self._pipelines[key] = copies
        return self._pipelines[key]


def _gpus(signature: Signature, gpu_type: str) -> int:
    return sum(s.gpus * n for s, n in signature.counts if s.gpu_type == gpu_type)


def _nodes(signature: Signature, gpu_type: str) -> int:
    return sum(n for s, n in signature.counts if s.gpu_type == gpu_type)
