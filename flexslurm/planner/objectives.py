"""Plans for other ends than throughput: fewest GPUs for a rate, and the quickest tokens."""

from __future__ import annotations

import numpy as np

from flexslurm.gear import Signature
from flexslurm.planner.columns import Column
from flexslurm.planner.integer import Programme

SAFETY = 1e-6
"""Relative room for rounding in a rate that is to be met."""


def fewest_gpus(
    programme: Programme, signature: Signature, tokens_per_s: float
) -> dict[Column, int]:
    """The plan with fewest GPUs that gives so many tokens per second, the best of these.

    Empty where none does. Irreducible pipelines are enough: what they replace takes no fewer GPUs.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    columns = programme.columns
    if not columns:
        return {}
    gpus = np.array([float(column.gpus) for column in columns])
    # A plan with a GPU less is always better, so that worth only decides between equals.
    total = max(1.0, float(programme.worth.max()) * signature.gpus())
    costs = np.concatenate([gpus - 0.5 * programme.worth / total, np.zeros(len(programme.cuts))])
    wanted = np.concatenate([programme.worth, np.zeros(len(programme.cuts))])
    least = max(tokens_per_s * (1 - SAFETY), float(programme.worth.min()) * 0.5)
    found = milp(
        costs,
        constraints=[
            LinearConstraint(csr_array(programme.matrix), ub=programme.limits(signature)),
            LinearConstraint(wanted[None, :], lb=least),
        ],
        integrality=np.ones(len(costs)),
        bounds=Bounds(0, np.inf),
        options={"mip_rel_gap": 0.0, "time_limit": 60.0},
    )
    if found.x is None:
        return {}
    used = np.rint(found.x[: len(columns)]).astype(int)
    return {column: int(n) for column, n in zip(columns, used, strict=True) if n}
