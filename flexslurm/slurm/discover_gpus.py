"""The GPU types of a cluster, from the GRES of its nodes, as a site file has them; pure.

Whole cards, MIG slices and shards are types of their own; what Slurm does not say is noted. Figures
of a slice or a share are the card's, divided, and taken low.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flexslurm.config.units import COMPUTE, RATE, SIZE
from flexslurm.slurm.client import NodeInfo
from flexslurm.slurm.gpu_request import GpuRequest
from flexslurm.slurm.gres import Gres
from flexslurm.slurm.mig import MigSlice, mig_slice

_WORD = re.compile(r"[^a-z0-9]+")
# Slices and shares of one card reach each other through the host alone.
_SLOW_LINK = {"bandwidth": "1GB/s", "latency": "20us"}


@dataclass(frozen=True, slots=True)
class CardFigures:
    """What the catalogue knows of a card."""

    name: str
    memory_bytes: int
    memory_bandwidth: float
    flops: float


FindCard = Callable[[str], CardFigures | None]
"""From a GRES type such as `nvidia_a100-sxm4-80gb`; None: not sure."""


@dataclass(frozen=True, slots=True)
class GpuKind:
    """One type of the site file, how Slurm is asked for it, and its entry."""

    name: str
    request: GpuRequest
    entry: dict[str, Any]
    part: bool = False
    """A slice or a share of a card: one is served alone."""


@dataclass(slots=True)
class GpuKinds:
    """All types of a cluster, and what an admin should know of them."""

    kinds: list[GpuKind] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def on(self, node: NodeInfo) -> dict[str, int]:
        """How many of each type a node has; types it lacks are left out."""
        counts = {kind.name: kind.request.gpus_in(node.gres) for kind in self.kinds}
        return {name: count for name, count in counts.items() if count}


def gpu_kinds(
    nodes: Sequence[NodeInfo], find_card: FindCard, virtual: Mapping[str, dict[str, Any]]
) -> GpuKinds:
    """The types of these nodes. `virtual`: entries of a sandbox's types, by Slurm's name."""
    found = GpuKinds()
    types = sorted({g.type for g in _of(nodes, "gpu") if g.type is not None and g.count})
    names = _short_names(types)
    for kind in types:
        piece = mig_slice(kind)
        entry = virtual.get(kind) or (
            _card_entry(kind, names[kind], find_card, found)
            if piece is None
            else _slice_entry(kind, piece, names[kind], find_card, found)
        )
        own = {"slurm_type": kind} if kind != names[kind] else {}
        request = GpuRequest("gpu", kind)
        found.kinds.append(GpuKind(names[kind], request, {**entry, **own}, piece is not None))
    _add_untyped(nodes, found)
    _add_shards(nodes, names, find_card, found)
    if any(entry.count for entry in _of(nodes, "mps")):
        found.notes.append("left out, shares of a card by MPS: flexslurm does not ask for them")
    return found


def _of(nodes: Iterable[NodeInfo], name: str) -> list[Gres]:
    return [gres for node in nodes for gres in node.gres if gres.name == name]


def _short_names(types: Sequence[str]) -> dict[str, str]:
    """A short name for each GRES type, by Slurm's name."""
    names: dict[str, str] = {}
    for kind in types:
        word = _WORD.sub("-", kind.lower()).strip("-")
        if mig_slice(kind) is not None and word[:1].isdigit():
            word = f"mig-{word}"
        short = word.removeprefix("nvidia-").removeprefix("geforce-") or word or "gpu"
        names[kind] = short if short not in names.values() else word
    return names


def _card_entry(kind: str, name: str, find_card: FindCard, found: GpuKinds) -> dict[str, Any]:
    card = find_card(kind)
    if card is not None:
        return {"model": card.name}
    found.notes.append(
        f"gpu_types.{name}: the catalogue has no '{kind}': give its memory, memory_bandwidth "
        "and flops"
    )
    return {}


def _slice_entry(
    kind: str, piece: MigSlice, name: str, find_card: FindCard, found: GpuKinds
) -> dict[str, Any]:
    entry: dict[str, Any] = {"memory": SIZE.show(piece.memory_bytes)}
    card = _card_of(piece, find_card)
    if card is None:
        found.notes.append(
            f"gpu_types.{name}: of which card is '{kind}'? give its memory_bandwidth and flops"
        )
    else:
        entry["memory_bandwidth"] = _rounded(RATE.show, card.memory_bandwidth * piece.memory_share)
        entry["flops"] = _rounded(COMPUTE.show, card.flops * piece.compute_share)
        found.notes.append(f"gpu_types.{name}: figures are those of its share of {card.name}")
    return {**entry, "gpu_link": dict(_SLOW_LINK)}


def _card_of(piece: MigSlice, find_card: FindCard) -> CardFigures | None:
    """The card a slice is of: by its name with the memory that the profile gives away."""
    size = piece.card_gigabytes
    if piece.card is not None:
        return find_card(f"{piece.card}_{size}gb") or find_card(piece.card)
    # Only the A100 has 40 GB in eighths; where 80 GB leave it open, the slower card is taken.
    return find_card(f"a100-{size}") if size in (40, 80) else None


def _add_untyped(nodes: Sequence[NodeInfo], found: GpuKinds) -> None:
    """GPUs without a type can be asked for where Slurm has no others."""
    untyped = [
        n.name for n in nodes for g in n.gres if g.name == "gpu" and g.type is None and g.count
    ]
    if not untyped:
        return
    shown = f"{', '.join(untyped[:4])}{', …' if len(untyped) > 4 else ''}"
    if found.kinds:
        found.notes.append(
            f"left out, GPUs without a type in Slurm ({shown}): name a Type in gres.conf"
        )
        return
    found.kinds.append(GpuKind("gpu", GpuRequest("gpu", None), {"gres": "gpu"}))
    found.notes.append(
        f"gpu_types.gpu: Slurm names no type ({shown}): give its model, as a100-80, or its figures"
    )


def _add_shards(
    nodes: Sequence[NodeInfo], names: Mapping[str, str], find_card: FindCard, found: GpuKinds
) -> None:
    """One shard of a card as a type; the smallest share where nodes differ."""
    shares: dict[str | None, tuple[int, str | None]] = {}
    for node in nodes:
        cards = {g.type: g.count for g in node.gres if g.name == "gpu" and g.count}
        for gres in node.gres:
            if gres.name == "shard" and gres.count and cards:
                per_card = max(1, gres.count // sum(cards.values()))
                card = next(iter(cards)) if len(cards) == 1 else None
                most, same = shares.get(gres.type, (per_card, card))
                shares[gres.type] = (max(most, per_card), card if card == same else None)
    for kind, (per_card, card) in shares.items():
        name = f"{names[card]}-shard" if card is not None and card in names else "shard"
        asked = "shard" if kind is None else f"shard:{kind}"
        entry = {"gres": asked, **_share_entry(per_card, card, find_card)}
        found.kinds.append(GpuKind(name, GpuRequest("shard", kind), entry, part=True))
        missing = "" if "memory" in entry else "give memory, memory_bandwidth and flops of one; "
        found.notes.append(
            f"gpu_types.{name}: one of {per_card} shards of a card; {missing}a larger share is "
            "'gres_per_gpu' times as much. Slurm keeps nobody to his share of the memory"
        )


def _share_entry(per_card: int, card: str | None, find_card: FindCard) -> dict[str, Any]:
    figures = None if card is None else find_card(card)
    if figures is None:
        return {"gpu_link": dict(_SLOW_LINK)}
    return {
        "memory": SIZE.show(int(figures.memory_bytes * 0.95) // per_card // 2**20 * 2**20),
        "memory_bandwidth": _rounded(RATE.show, figures.memory_bandwidth / per_card),
        "flops": _rounded(COMPUTE.show, figures.flops / per_card),
        "gpu_link": dict(_SLOW_LINK),
    }


def _rounded(show: Callable[[float], str], value: float) -> str:
    """Three digits are more than is known."""
    return show(float(f"{value:.3g}"))
