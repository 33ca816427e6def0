"""Pipelines for pools with too many to list: those that the prices of groups call for.

Column generation (Gilmore & Gomory 1961, Barnhart et al. 1998): solve the relaxed programme over
the pipelines known, price all others, add those worth more than their groups, and so on until there
are none. The last prices then bound what any plan can be worth. Never says a plan is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
import numpy as np

from flexslurm.gear import Shape, Signature
from flexslurm.planner.columns import Column, keys_of
from flexslurm.planner.integer import Prices, Programme
from flexslurm.planner.pricing import Pricer
from flexslurm.planner.problem import Need, Problem, StageKind, Tier
from flexslurm.planner.worth import worth

TOLERANCE = 0.001
"""Pipelines worth no more than this beyond their price are not looked for."""
ROUNDS = 60


class Bound(msgspec.Struct, frozen=True):
    """Prices of groups that no pipeline is worth more than, and so of nodes: a bound on plans."""

    nodes: dict[Shape, float]
    groups: dict[StageKind, float]

    def of(self, signature: Signature) -> float:
        if any(shape not in self.nodes for shape, _ in signature.counts):
            return float("inf")
        return sum(self.nodes[shape] * count for shape, count in signature.counts)


def value_needs(problem: Problem, needs: Iterable[Need], tier: Tier) -> list[Column]:
    """Columns of these multisets; those that do not fit are left out."""
    wanted = list(needs)
    kinds = tuple(sorted({kind for need in wanted for kind, _ in need}))
    counts = np.zeros((len(wanted), len(kinds)), dtype=np.int64)
    for row, need in enumerate(wanted):
        for kind, count in need:
            counts[row, kinds.index(kind)] = count
    value = worth(problem, kinds, counts, tier)
    keys = keys_of(kinds, counts, value.tokens_per_s)
    return [
        Column(need, int(key), float(rate), int(batch))
        for need, key, rate, batch in zip(
            wanted, keys, value.tokens_per_s, value.batch, strict=True
        )
        if key > 0
    ]


def generate(
    problem: Problem,
    pricer: Pricer,
    signature: Signature,
    known: Sequence[Column],
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[list[Column], Bound]:
    """All pipelines needed for the relaxed programme of a signature, and the bound they prove."""
    shapes = [shape for shape, _ in signature.counts]
    found = {column.need: column for column in known}
    best: Bound | None = None
    for turn in range(ROUNDS):
        relaxed = Programme(list(found.values()), shapes).relax(signature)
        prices = fill_prices(relaxed, pricer.kinds, shapes)
        fresh = [need for need in pricer.glance(prices, TOLERANCE) if need not in found]
        if not fresh:
            priced = pricer.price(prices, TOLERANCE)
            fresh = [need for need in priced.needs if need not in found]
            if np.isfinite(priced.excess):
                slack = 1 + max(priced.excess, TOLERANCE)
                bound = Bound(
                    {shape: price * slack for shape, price in _nodes(prices, shapes).items()},
                    {kind: price * slack for kind, price in prices.items()},
                )
                if best is None or bound.of(signature) < best.of(signature):
                    best = bound
        most = best.of(signature) if best else float("inf")
        progress(f"round {turn + 1}: {relaxed.tokens_per_s:,.0f} tokens/s of at most {most:,.0f}")
        if not fresh:
            break
        found.update((c.need, c) for c in value_needs(problem, fresh, pricer.tier))
    if best is None:
        best = Bound(dict.fromkeys(shapes, float("inf")), {})
    return list(found.values()), best


def close_gap(
    problem: Problem, pricer: Pricer, bound: Bound, loss: float, most: int
) -> list[Column] | None:
    """All pipelines that a plan can use which loses at most `loss` to the bound; None: too many.

    What such a plan's pipelines are worth less than their groups' prices is part of the loss.
    """
    # no prices have proved anything: all pipelines could be of use
    needs = pricer.near(bound.groups, loss, most) if bound.groups else None
    if needs is None:
        return None
    return [
        column
        for column in value_needs(problem, needs, pricer.tier)
        if column.tokens_per_s + loss >= sum(bound.groups[k] * n for k, n in column.need)
    ]


def fill_prices(
    relaxed: Prices, kinds: Sequence[StageKind], shapes: Sequence[Shape]
) -> dict[StageKind, float]:
    """Prices for all kinds that the shapes allow, raised as far as the nodes' prices do.

    Kinds that no known pipeline uses have no price in the programme; the higher it may be, the
    fewer pipelines look cheap.
    """
    prices = {
        kind: relaxed.groups.get(kind, 0.0)
        for kind in kinds
        if any(s.gpu_type == kind.gpu_type and s.gpus >= kind.tp for s in shapes)
    }
    for kind in sorted(prices, key=lambda k: (k.gpu_type, -k.tp)):
        others = {other: price for other, price in prices.items() if other != kind}
        room = [
            (relaxed.nodes.get(shape, 0.0) - _fill(others, shape.gpu_type, left)) / times
            for shape in shapes
            if shape.gpu_type == kind.gpu_type
            for times in range(1, shape.gpus // kind.tp + 1)
            for left in [shape.gpus - times * kind.tp]
        ]
        prices[kind] = max(prices[kind], min(room, default=0.0))
    return prices


def _nodes(prices: Mapping[StageKind, float], shapes: Sequence[Shape]) -> dict[Shape, float]:
    """What the groups that a node can be cut into cost at most."""
    return {shape: _fill(prices, shape.gpu_type, shape.gpus) for shape in shapes}


def _fill(prices: Mapping[StageKind, float], gpu_type: str, gpus: int) -> float:
    """The dearest way to cut so many GPUs."""
    sizes = [(kind.tp, price) for kind, price in prices.items() if kind.gpu_type == gpu_type]

    dearest: list[float] = []
    for left in range(gpus + 1):
        ways = (price + dearest[left - tp] for tp, price in sizes if tp <= left)
        dearest.append(max(ways, default=0.0))
    return dearest[gpus]
