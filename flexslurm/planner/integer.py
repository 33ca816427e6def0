"""The best plan of one signature as an integer programme, solved by HiGHS; bounded, never guessed.

Variables are how often each pipeline is used and how many nodes of each shape are cut in each way;
every group that a pipeline takes must be cut from some node.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import msgspec
import numpy as np
import numpy.typing as npt

from flexslurm.gear import Shape, Signature
from flexslurm.planner.columns import KEY_SHIFT, Column
from flexslurm.planner.packing import patterns
from flexslurm.planner.problem import StageKind

Floats = npt.NDArray[np.float64]


class Solved(msgspec.Struct, frozen=True):
    """A plan, and what no plan over the same pipelines can exceed."""

    plan: dict[Column, int]
    key: int
    bound_tokens_per_s: float


class Prices(msgspec.Struct, frozen=True):
    """The relaxed programme: its worth, and the price of a group of each kind and of each node."""

    tokens_per_s: float
    groups: dict[StageKind, float]
    nodes: dict[Shape, float]


class Programme:
    """The constraints of a set of pipelines over the shapes of a pool, for many signatures."""

    def __init__(self, columns: Sequence[Column], shapes: Sequence[Shape]) -> None:
        self.columns, self.shapes = tuple(columns), tuple(shapes)
        self.kinds = sorted({kind for column in columns for kind, _ in column.need})
        sizes: dict[str, set[int]] = {}
        for kind in self.kinds:
            sizes.setdefault(kind.gpu_type, set()).add(kind.tp)
        self.cuts = [
            (shape, pattern)
            for shape in self.shapes
            if shape.gpu_type in sizes
            for pattern in patterns(shape.gpus, tuple(sorted(sizes[shape.gpu_type])))
            if pattern
        ]
        self.worth = np.array([c.key / (1 << KEY_SHIFT) / 1000 for c in columns])

    @cached_property
    def matrix(self) -> Floats:
        """Rows: groups of each kind, then nodes of each shape; columns: pipelines, then cuts."""
        first = len(self.columns)
        rows = np.zeros((len(self.kinds) + len(self.shapes), first + len(self.cuts)))
        row_of = {kind: row for row, kind in enumerate(self.kinds)}
        for column, pipeline in enumerate(self.columns):
            for kind, count in pipeline.need:
                rows[row_of[kind], column] = count
        for column, (shape, pattern) in enumerate(self.cuts, start=first):
            for tp in pattern:
                rows[row_of[StageKind(shape.gpu_type, tp)], column] -= 1
            rows[len(self.kinds) + self.shapes.index(shape), column] = 1
        return rows

    def limits(self, signature: Signature) -> Floats:
        """The right-hand sides of the matrix's rows."""
        counts = dict(signature.counts)
        nodes = [float(counts.get(shape, 0)) for shape in self.shapes]
        return np.array([0.0] * len(self.kinds) + nodes)

    def solve(self, signature: Signature, gap: float = 0.0, limit_s: float = 60.0) -> Solved:
        """The best plan to within a relative `gap`; the bound says how near it is."""
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array

        if not self.columns:
            return Solved({}, 0, 0.0)
        costs = np.concatenate([-self.worth, np.zeros(len(self.cuts))])
        found = milp(
            costs,
            constraints=LinearConstraint(csr_array(self.matrix), ub=self.limits(signature)),
            integrality=np.ones(len(costs)),
            bounds=Bounds(0, np.inf),
            options={"mip_rel_gap": gap, "time_limit": limit_s},
        )
        if found.x is None:
            return Solved({}, 0, float(self.worth.sum()) if found.status == 1 else 0.0)
        used = np.rint(found.x[: len(self.columns)]).astype(int)
        plan = {c: int(n) for c, n in zip(self.columns, used, strict=True) if n}
        key = sum(column.key * count for column, count in plan.items())
        return Solved(plan, key, max(0.0, -float(found.mip_dual_bound)))

    def relax(self, signature: Signature) -> Prices:
        """The linear relaxation and its prices."""
        from scipy.optimize import linprog

        if not self.columns:
            return Prices(0.0, {}, {})
        costs = np.concatenate([-self.worth, np.zeros(len(self.cuts))])
        found = linprog(costs, A_ub=self.matrix, b_ub=self.limits(signature), method="highs-ds")
        assert found.status == 0, found.message
        prices = np.maximum(0.0, -found.ineqlin.marginals)
        groups = dict(zip(self.kinds, prices[: len(self.kinds)].tolist(), strict=True))
        nodes = dict(zip(self.shapes, prices[len(self.kinds) :].tolist(), strict=True))
        return Prices(-float(found.fun), groups, nodes)
