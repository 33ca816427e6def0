"""How many GPUs a load needs: the cheapest part of a pool, and what more GPUs would bring."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from flexslurm.errors import CapacityError
from flexslurm.gear import Signature
from flexslurm.planner.columns import key_worth
from flexslurm.planner.solver import Solution

PAYS = 0.5
"""More GPUs pay while each brings at least this share of what one brings at best."""


class CapacityPoint(msgspec.Struct, frozen=True):
    """The best use of so many GPUs of the pool."""

    gpus: int
    cost: float
    tokens_per_s: float
    signature: Signature


class Capacity(msgspec.Struct, frozen=True):
    """The answer: the cheapest allocation, the curve, and where it flattens."""

    wanted_tokens_per_s: float
    cheapest: CapacityPoint
    curve: tuple[CapacityPoint, ...]
    """Allocations that give more than all with fewer GPUs."""
    stops_paying: CapacityPoint
    """Up to here each further GPU brings at least half of what one brings at best."""


def capacity(
    plans: Iterable[tuple[Signature, Solution | None]],
    wanted_tokens_per_s: float,
    prices: Mapping[str, float] | None = None,
) -> Capacity:
    """Judge all plans within a pool; `prices` by GPU type, 1 where none is given.

    Only plans that meet the targets count. Raises CapacityError where no allocation gives enough.
    """
    price = prices or {}
    points: dict[int, CapacityPoint] = {}
    cheapest: CapacityPoint | None = None
    for signature, choice in plans:
        if choice is None or not choice.tier.slo:
            continue
        cost = sum(
            shape.gpus * count * price.get(shape.gpu_type, 1.0) for shape, count in signature.counts
        )
        point = CapacityPoint(signature.gpus(), cost, key_worth(choice.key), signature)
        best = points.get(point.gpus)
        if best is None or _better(point, best):
            points[point.gpus] = point
        if point.tokens_per_s >= wanted_tokens_per_s and (
            cheapest is None or _cheaper(point, cheapest)
        ):
            cheapest = point
    curve = _rising(points)
    if cheapest is None:
        raise CapacityError(_too_little(wanted_tokens_per_s, curve))
    return Capacity(wanted_tokens_per_s, cheapest, curve, _knee(curve))


def _better(one: CapacityPoint, other: CapacityPoint) -> bool:
    return (one.tokens_per_s, -one.cost) > (other.tokens_per_s, -other.cost)


def _cheaper(one: CapacityPoint, other: CapacityPoint) -> bool:
    return (one.cost, one.gpus, -one.tokens_per_s) < (other.cost, other.gpus, -other.tokens_per_s)


def _rising(points: Mapping[int, CapacityPoint]) -> tuple[CapacityPoint, ...]:
    curve: list[CapacityPoint] = []
    for gpus in sorted(points):
        if not curve or points[gpus].tokens_per_s > curve[-1].tokens_per_s:
            curve.append(points[gpus])
    return tuple(curve)


def _knee(curve: tuple[CapacityPoint, ...]) -> CapacityPoint:
    """The furthest point up to which the curve rises steeply enough."""
    best = max(point.tokens_per_s / point.gpus for point in curve)
    knee = curve[0]
    for point in curve[1:]:
        rise = (point.tokens_per_s - knee.tokens_per_s) / (point.gpus - knee.gpus)
        if rise >= best * PAYS:
            knee = point
    return knee


def _too_little(wanted: float, curve: tuple[CapacityPoint, ...]) -> str:
    if not curve:
        return "no allocation of the pool meets the targets"
    most = curve[-1]
    return (
        f"the load needs {wanted:,.0f} tokens/s within the targets; the pool gives at most "
        f"{most.tokens_per_s:,.0f} ({most.signature})"
    )
