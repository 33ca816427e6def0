"""The best set of pipelines for one signature: an integer programme over pipelines and cuts."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec

from flexslurm.gear import Shape, Signature
from flexslurm.planner.packing import patterns
from flexslurm.planner.pipelines import Need, Pipeline, Problem, StageKind

MAX_NEEDS = 4000
"""Multisets of stage kinds that are looked at before the depth is limited."""


class Chosen(msgspec.Struct, frozen=True):
    """Pipelines, best first, and how the nodes are cut for them."""

    pipelines: tuple[Pipeline, ...]
    cuts: tuple[tuple[Shape, tuple[int, ...]], ...]


def needs(problem: Problem, signature: Signature) -> Iterator[Need]:
    """Multisets of stage kinds that the signature could hold, the smallest first."""
    totals: Counter[str] = Counter()
    kinds: set[StageKind] = set()
    for shape, count in signature.counts:
        totals[shape.gpu_type] += shape.gpus * count
        kinds.update(problem.kinds(shape.gpu_type, shape.gpus))
    ordered = sorted(kinds)
    produced = 0
    for depth in range(1, min(problem.spec.num_layers, sum(totals.values())) + 1):
        if produced > MAX_NEEDS:
            return
        for combination in itertools.combinations_with_replacement(ordered, depth):
            used: Counter[str] = Counter()
            for kind in combination:
                used[kind.gpu_type] += kind.tp
            if all(used[name] <= totals[name] for name in used):
                produced += 1
                yield tuple(sorted(Counter(combination).items()))


def choose(pipelines: Sequence[Pipeline], signature: Signature) -> Chosen | None:
    """The pipelines with the most tokens per second that the signature's nodes can seat."""
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp

    if not pipelines:
        return None
    kinds = sorted({kind for pipeline in pipelines for kind, _ in pipeline.need})
    cuts = [
        (shape, pattern)
        for shape, _ in signature.counts
        for pattern in patterns(
            shape.gpus, tuple(sorted({k.tp for k in kinds if k.gpu_type == shape.gpu_type}))
        )
        if pattern
    ]
    rows = np.zeros((len(kinds) + len(signature.counts), len(pipelines) + len(cuts)))
    row_of = {kind: row for row, kind in enumerate(kinds)}
    for column, pipeline in enumerate(pipelines):
        for kind, count in pipeline.need:
            rows[row_of[kind], column] = count
    limits = np.zeros(rows.shape[0])
    for column, (shape, pattern) in enumerate(cuts, start=len(pipelines)):
        for tp in pattern:
            rows[row_of[StageKind(shape.gpu_type, tp)], column] -= 1
    for row, (shape, count) in enumerate(signature.counts, start=len(kinds)):
        limits[row] = count
        for column, (other, _) in enumerate(cuts, start=len(pipelines)):
            rows[row, column] = other == shape
    top = max(pipeline.tokens_per_s for pipeline in pipelines)
    worth = [p.tokens_per_s / top - 1e-7 * p.penalty for p in pipelines] + [0.0] * len(cuts)
    result = milp(
        -np.array(worth),
        constraints=LinearConstraint(rows, ub=limits),
        integrality=np.ones(len(worth)),
        bounds=Bounds(0, np.inf),
    )
    if result.x is None:
        return None
    counts = [round(value) for value in result.x]
    chosen = [p for p, count in zip(pipelines, counts, strict=False) for _ in range(count)]
    if not chosen:
        return None
    chosen.sort(key=lambda p: (-p.tokens_per_s, p.need))
    used = [
        cut for cut, count in zip(cuts, counts[len(pipelines) :], strict=True) for _ in range(count)
    ]
    return Chosen(tuple(chosen), tuple(used))
