"""A gear that leaves replicas as they are and gives the other GPUs the best gear they can have.

It is the cheapest to reach from the gear in place: what stays moves nothing and is not disturbed.
Pure, and exact for what is left over, but not for the whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from flexslurm.gear import Estimates, Gear, Replica, Shape, Signature

LookUp = Callable[[Signature], Gear | None]
"""The best gear of an allocation; None where there is none, or it is not known."""


class KeptReplica(msgspec.Struct, frozen=True):
    """A replica of the gear in place, all of whose GPUs stay."""

    replica: Replica
    nodes: tuple[str, ...]
    """The physical node of each of its stages."""
    tokens_per_s: float
    """By the estimate of the gear in place."""


def keeping_gear(
    current: Gear, kept: Sequence[KeptReplica], nodes: Mapping[str, Shape], look_up: LookUp
) -> Gear | None:
    """The gear of the kept replicas and of the best that what they leave of `nodes` can hold.

    None where nothing is kept, or nothing would change.
    """
    if not kept:
        return None
    used: Counter[str] = Counter()
    for one in kept:
        for stage, node in zip(one.replica.stages, one.nodes, strict=True):
            used[node] += stage.tp
    signature = Signature.of(nodes.values())
    index = _indices(signature, {name: nodes[name] for name in sorted(nodes)})
    added, at = _added(nodes, used, look_up)
    if added is None and len(kept) == len(current.replicas):
        return None
    replicas = tuple(_seated(one.replica, [index[n] for n in one.nodes]) for one in kept)
    if added is not None:
        replicas += tuple(
            _seated(one, [index[at[stage.node]] for stage in one.stages]) for one in added.replicas
        )
    gear = Gear(
        name="",
        signature=signature,
        block_tokens=current.block_tokens,
        replicas=replicas,
        estimates=_estimates(current, kept, added),
        reason=f"leaves {len(kept)} of {len(current.replicas)} replicas as they are",
    )
    return msgspec.structs.replace(gear, name=gear.layout())


def _added(
    nodes: Mapping[str, Shape], used: Counter[str], look_up: LookUp
) -> tuple[Gear | None, list[str]]:
    """The best gear of the GPUs that are left, and the physical node of each of its nodes.

    Where nodes that are used in part make an allocation of which nothing is known, the others.
    """
    parts = {n: Shape(s.gpu_type, s.gpus - used[n]) for n, s in nodes.items() if s.gpus > used[n]}
    whole = {n: s for n, s in parts.items() if not used[n]}
    for left in (parts, whole):
        gear = look_up(Signature.of(left.values())) if left else None
        if gear is not None:
            return gear, _in_order(gear.signature, left)
    return None, []


def _in_order(signature: Signature, nodes: Mapping[str, Shape]) -> list[str]:
    """A physical node for each abstract one; the signature may use fewer."""
    free: dict[Shape, list[str]] = {}
    for name in sorted(nodes, reverse=True):
        free.setdefault(nodes[name], []).append(name)
    return [free[shape].pop() for shape in signature.nodes()]


def _indices(signature: Signature, nodes: Mapping[str, Shape]) -> dict[str, int]:
    """The abstract node that each physical one stands for."""
    free: dict[Shape, list[int]] = {}
    for number, shape in reversed(list(enumerate(signature.nodes()))):
        free.setdefault(shape, []).append(number)
    return {name: free[shape].pop() for name, shape in nodes.items()}


def _seated(replica: Replica, nodes: Iterable[int]) -> Replica:
    stages = tuple(
        msgspec.structs.replace(stage, node=node)
        for stage, node in zip(replica.stages, nodes, strict=True)
    )
    return msgspec.structs.replace(replica, stages=stages)


def _estimates(current: Gear, kept: Sequence[KeptReplica], added: Gear | None) -> Estimates:
    """Rates add up; times are means by share of the tokens, as in every gear's estimates."""
    mine, blocks = current.estimates, sum(one.replica.kv_blocks for one in kept)
    parts = [(sum(one.tokens_per_s for one in kept), mine)]
    if added is not None:
        parts.append((added.estimates.tokens_per_s, added.estimates))
    total = sum(rate for rate, _ in parts) or 1.0
    more = added.estimates if added is not None else None
    return Estimates(
        tokens_per_s=sum(rate for rate, _ in parts),
        ttft_s=sum(rate * one.ttft_s for rate, one in parts) / total,
        tpot_s=sum(rate * one.tpot_s for rate, one in parts) / total,
        kv_tokens=blocks * current.block_tokens + (more.kv_tokens if more is not None else 0),
        load_s=max(one.load_s for _, one in parts),
    )
