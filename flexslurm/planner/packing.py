"""Cutting nodes into TP groups and giving stages their abstract nodes; pure arithmetic."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from functools import cache

from flexslurm.gear import Shape, Signature
from flexslurm.planner.problem import StageKind


@cache
def patterns(gpus: int, degrees: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Ways to cut `gpus` GPUs into groups of these sizes so that no further group fits.

    Each is a descending tuple of sizes.
    """
    found: list[tuple[int, ...]] = []

    def cut(left: int, allowed: tuple[int, ...], taken: tuple[int, ...]) -> None:
        fitting = tuple(d for d in allowed if d <= left)
        if not fitting:
            if left < min(degrees, default=left + 1):
                found.append(taken)
            return
        for index, degree in enumerate(fitting):
            cut(left - degree, fitting[index:], (*taken, degree))

    cut(gpus, tuple(sorted(degrees, reverse=True)), ())
    return tuple(found)


class Cannot(Exception):
    """The groups do not fit into the nodes."""


def cut(signature: Signature, groups: Counter[StageKind]) -> dict[int, Counter[int]]:
    """Groups by size for each abstract node, so that every group has a place; others stay whole.

    Large groups first, each on the node it leaves least of; where that fails, which it can only
    where sizes do not divide one another, by an integer programme. Raises Cannot.
    """
    return _cut_greedily(signature, groups) or _cut_exactly(signature, groups)


def _cut_greedily(
    signature: Signature, groups: Counter[StageKind]
) -> dict[int, Counter[int]] | None:
    free: dict[tuple[str, int], list[int]] = {}
    most: dict[str, int] = {}
    for index, shape in enumerate(signature.nodes()):
        free.setdefault((shape.gpu_type, shape.gpus), []).append(index)
        most[shape.gpu_type] = max(most.get(shape.gpu_type, 0), shape.gpus)
    result: dict[int, Counter[int]] = {}
    for kind in sorted(groups, key=lambda kind: (kind.gpu_type, -kind.tp)):
        for _ in range(groups[kind]):
            for left in range(kind.tp, most.get(kind.gpu_type, 0) + 1):
                nodes = free.get((kind.gpu_type, left))
                if nodes:
                    node = heapq.heappop(nodes)
                    heapq.heappush(free.setdefault((kind.gpu_type, left - kind.tp), []), node)
                    result.setdefault(node, Counter())[kind.tp] += 1
                    break
            else:
                return None
    return result


def _cut_exactly(signature: Signature, groups: Counter[StageKind]) -> dict[int, Counter[int]]:
    """By an integer programme, which finds a cut where there is one. Raises Cannot."""
    sizes = {
        name: tuple(sorted({kind.tp for kind in groups if kind.gpu_type == name}))
        for name in {kind.gpu_type for kind in groups}
    }
    cuts = [
        (shape, pattern)
        for shape, _ in signature.counts
        if shape.gpu_type in sizes
        for pattern in patterns(shape.gpus, sizes[shape.gpu_type])
    ]
    counts = _times_of(cuts, signature, groups)
    left = {shape: [i for i, s in enumerate(signature.nodes()) if s == shape] for shape, _ in cuts}
    wanted, result = Counter(groups), {}
    for (shape, pattern), count in zip(cuts, counts, strict=True):
        for _ in range(count):
            taken: Counter[int] = Counter()
            for tp in pattern:
                kind = StageKind(shape.gpu_type, tp)
                if wanted[kind] > 0:
                    wanted[kind] -= 1
                    taken[tp] += 1
            if taken:
                result[left[shape].pop(0)] = taken
    assert not +wanted, f"{+wanted} have no place"
    return result


def _times_of(
    cuts: Sequence[tuple[Shape, tuple[int, ...]]], signature: Signature, groups: Counter[StageKind]
) -> list[int]:
    """How many nodes are cut in each way, so that every group has a place."""
    import numpy as np
    from scipy.optimize import LinearConstraint, milp

    kinds = sorted(groups)
    rows = [
        [pattern.count(kind.tp) * (shape.gpu_type == kind.gpu_type) for shape, pattern in cuts]
        for kind in kinds
    ]
    nodes = [[other == shape for other, _ in cuts] for shape, _ in signature.counts]
    found = milp(
        np.zeros(len(cuts)),
        constraints=[
            LinearConstraint(np.array(rows, dtype=float), lb=[groups[kind] for kind in kinds]),
            LinearConstraint(
                np.array(nodes, dtype=float), ub=[count for _, count in signature.counts]
            ),
        ],
        integrality=np.ones(len(cuts)),
    )
    if found.x is None:
        raise Cannot(f"{dict(groups)} do not fit into {signature}")
    return [round(count) for count in found.x]


def seat(signature: Signature, pipelines: Sequence[Sequence[StageKind]]) -> list[tuple[int, ...]]:
    """An abstract node for every stage of every pipeline, neighbours together where they can be."""
    free = cut(signature, Counter(kind for stages in pipelines for kind in stages))
    shapes = signature.nodes()
    waiting: dict[StageKind, list[int]] = {}
    for node in sorted(free, reverse=True):
        for tp in free[node]:
            waiting.setdefault(StageKind(shapes[node].gpu_type, tp), []).append(node)
    seats: list[tuple[int, ...]] = []
    for stages in pipelines:
        mine: list[int] = []
        for kind in stages:
            near = _near(kind, mine, free, shapes)
            while near is None and not free[waiting[kind][-1]][kind.tp]:
                waiting[kind].pop()
            node = waiting[kind][-1] if near is None else near
            free[node][kind.tp] -= 1
            mine.append(node)
        seats.append(tuple(mine))
    return seats


def _near(
    kind: StageKind,
    mine: Sequence[int],
    free: dict[int, Counter[int]],
    shapes: Sequence[Shape],
) -> int | None:
    """A node of the stages before, the last one first, that has a group of this kind left."""
    for node in reversed(mine):
        if shapes[node].gpu_type == kind.gpu_type and free[node][kind.tp] > 0:
            return node
    return None
