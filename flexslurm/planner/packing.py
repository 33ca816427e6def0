"""Cutting nodes into TP groups and giving stages their abstract nodes; pure arithmetic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache

from flexslurm.gear import Shape, Signature
from flexslurm.planner.pipelines import Pipeline, StageKind


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


def nodes_with_groups(
    signature: Signature, cuts: Sequence[tuple[Shape, tuple[int, ...]]]
) -> list[tuple[int, Counter[int]]]:
    """Give each cut an abstract node of its shape: `(node index, free groups by size)`."""
    wanted: dict[Shape, list[tuple[int, ...]]] = {}
    for shape, pattern in cuts:
        wanted.setdefault(shape, []).append(pattern)
    for pattern_list in wanted.values():
        pattern_list.sort(reverse=True)
    result = []
    for index, shape in enumerate(signature.nodes()):
        if wanted.get(shape):
            result.append((index, Counter(wanted[shape].pop(0))))
    return result


def seat(
    signature: Signature,
    pipelines: Sequence[Pipeline],
    cuts: Sequence[tuple[Shape, tuple[int, ...]]],
) -> list[tuple[int, ...]]:
    """An abstract node for every stage of every pipeline, neighbours together where they can be."""
    shapes = signature.nodes()
    free = dict(nodes_with_groups(signature, cuts))
    seats: list[tuple[int, ...]] = []
    for pipeline in pipelines:
        mine: list[int] = []
        for stage in pipeline.stages:
            node = _node_for(stage.kind, mine, free, shapes)
            free[node][stage.kind.tp] -= 1
            mine.append(node)
        seats.append(tuple(mine))
    return seats


def _node_for(
    kind: StageKind,
    mine: Sequence[int],
    free: dict[int, Counter[int]],
    shapes: Sequence[Shape],
) -> int:
    def candidates() -> Iterator[tuple[bool, bool, int, int]]:
        for node, groups in free.items():
            if shapes[node].gpu_type == kind.gpu_type and groups[kind.tp] > 0:
                left = sum(size * count for size, count in groups.items())
                yield not mine or node != mine[-1], node not in mine, left, node

    found = min(candidates(), default=None)
    assert found is not None, f"the cuts leave no group for {kind}"
    return found[-1]
