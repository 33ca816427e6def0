"""Next best plans where no lattice tells them: one pipeline of the best plan is put together anew.

What a pipeline's own GPUs can do without it is worked out once for each pipeline, so that it costs
next to nothing for each of ten thousand plans. Never says that no other plan comes nearer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from flexslurm.gear import Shape, Signature
from flexslurm.planner.columns import Column
from flexslurm.planner.integer import Programme
from flexslurm.planner.solver import Solver

Plan = Mapping[Column, int]


class Substitutes:
    """For the plans of one solver, which knows all its pipelines by now."""

    def __init__(self, solver: Solver) -> None:
        self._columns = solver.columns
        self._found: dict[Column, tuple[dict[Column, int], int]] = {}

    def next_plan(self, plan: Plan) -> dict[Column, int]:
        """The plan with one pipeline replaced that loses least, and has one that it had not.

        Empty where none can be replaced. Ties go to the pipeline that comes first.
        """
        best: tuple[int, Column] | None = None
        for column in sorted(plan, key=lambda c: c.need):
            instead, key = self._instead(column)
            if instead.keys() - plan.keys() and (best is None or column.key - key < best[0]):
                best = column.key - key, column
        if best is None:
            return {}
        result = Counter(dict(plan))
        result[best[1]] -= 1
        result.update(self._instead(best[1])[0])
        return dict(+result)

    def _instead(self, column: Column) -> tuple[dict[Column, int], int]:
        """What the pipeline's groups, each as a node of its own, are best used for without it."""
        if column not in self._found:
            groups = Signature.of(
                Shape(kind.gpu_type, kind.tp) for kind, count in column.need for _ in range(count)
            )
            room = _gpus_by_type(column)
            others = [
                c for c in self._columns if c.need != column.need and _gpus_by_type(c) <= room
            ]
            solved = Programme(others, [shape for shape, _ in groups.counts]).solve(groups)
            self._found[column] = solved.plan, solved.key
        return self._found[column]


def _gpus_by_type(column: Column) -> Counter[str]:
    gpus: Counter[str] = Counter()
    for kind, count in column.need:
        gpus[kind.gpu_type] += kind.tp * count
    return gpus
