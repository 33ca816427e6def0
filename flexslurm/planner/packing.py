"""Cutting nodes into TP groups and giving stages their abstract nodes; pure arithmetic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache

from flexslurm.gear import Signature
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
    free = {index: shape.gpus for index, shape in enumerate(signature.nodes())}
    types = [shape.gpu_type for shape in signature.nodes()]
    result: dict[int, Counter[int]] = {}
    for kind in sorted(groups, key=lambda kind: (kind.gpu_type, -kind.tp)):
        for _ in range(groups[kind]):
            fitting = [
                (free[node] - kind.tp, node)
                for node in free
                if types[node] == kind.gpu_type and free[node] >= kind.tp
            ]
            if not fitting:
                return None
            left, node = min(fitting)
            free[node] = left
            result.setdefault(node, Counter())[kind.tp] += 1
    return result


def _cut_exactly(signature: Signature, groups: Counter[StageKind]) -> dict[int, Counter[int]]:
    import numpy as np
    from scipy.optimize import LinearConstraint, milp

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
    left = {shape: [i for i, s in enumerate(signature.nodes()) if s == shape] for shape, _ in cuts}
    wanted, result = Counter(groups), {}
    for (shape, pattern), count in zip(cuts, found.x, strict=True):
        for _ in range(round(count)):
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


def seat(signature: Signature, pipelines: Sequence[Sequence[StageKind]]) -> list[tuple[int, ...]]:
    """An abstract node for every stage of every pipeline, neighbours together where they can be."""
    groups = Counter(kind for stages in pipelines for kind in stages)
    free = cut(signature, groups)
    shapes = signature.nodes()
    by_kind: dict[StageKind, set[int]] = {}
    for node, sizes in free.items():
        for tp in sizes:
            by_kind.setdefault(StageKind(shapes[node].gpu_type, tp), set()).add(node)
    seats: list[tuple[int, ...]] = []
    for stages in pipelines:
        mine: list[int] = []
        for kind in stages:
            node = min(by_kind[kind], key=lambda n: _distance(n, mine, free))
            free[node][kind.tp] -= 1
            if free[node][kind.tp] == 0:
                by_kind[kind].remove(node)
            mine.append(node)
        seats.append(tuple(mine))
    return seats


def _distance(
    node: int, mine: Sequence[int], free: dict[int, Counter[int]]
) -> tuple[bool, bool, int, int]:
    """Beside the stage before, else beside another one, else where least is left over."""
    left = sum(size * count for size, count in free[node].items())
    return not mine or node != mine[-1], node not in mine, left, node
