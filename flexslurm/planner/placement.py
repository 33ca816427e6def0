"""Which physical GPU fills which slot of a gear: the one that has most of what the slot needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from flexslurm.errors import CapacityError
from flexslurm.gear import Gear, Shape, Slot
from flexslurm.planner.model_spec import ModelSpec


class GpuRef(msgspec.Struct, frozen=True, order=True, array_like=True):
    """A physical GPU."""

    node: str
    """Identifies the node for the caller: a name, or an agent's incarnation."""
    gpu: int

    def __str__(self) -> str:
        return f"{self.node}:{self.gpu}"


class PhysicalNode(msgspec.Struct, frozen=True):
    """A node and the GPUs on it that may be used."""

    node: str
    gpu_type: str
    gpus: tuple[int, ...]


class Owned(msgspec.Struct, frozen=True):
    """What a GPU holds now."""

    slot: Slot
    lo: int
    hi: int
    tp: int
    kv_tokens: int = 0
    """Tokens of KV in use on it."""


class Placement(msgspec.Struct, frozen=True):
    """A GPU for every slot of a gear."""

    slots: dict[Slot, GpuRef]
    moved_bytes: int
    """Weights that their new owners lack."""
    kept_bytes: int


def place(
    gear: Gear,
    nodes: Sequence[PhysicalNode],
    owned: Mapping[GpuRef, Owned] | None = None,
    spec: ModelSpec | None = None,
) -> Placement:
    """Put the gear's abstract nodes on physical ones and its slots on their GPUs.

    `owned` is what GPUs hold of the gear that is left; with `spec` its bytes are counted, without
    it layers are. Raises CapacityError where the nodes cannot hold the gear.
    """
    import numpy as np
    from scipy.optimize import linear_sum_assignment

    owned = owned or {}
    wanted: dict[int, list[Slot]] = {}
    for r, replica in enumerate(gear.replicas):
        for s, stage in enumerate(replica.stages):
            wanted.setdefault(stage.node, []).extend(Slot(r, s, t) for t in range(stage.tp))
    shapes = gear.signature.nodes()
    abstract = sorted(wanted)
    ordered = sorted(nodes, key=lambda node: node.node)
    worth = np.full((len(abstract), len(ordered)), -1.0)
    inner: dict[tuple[int, int], list[tuple[Slot, GpuRef]]] = {}
    for i, index in enumerate(abstract):
        for j, node in enumerate(ordered):
            if not _fits(shapes[index], node, len(wanted[index])):
                continue
            refs = [GpuRef(node.node, gpu) for gpu in sorted(node.gpus)]
            kept = np.array(
                [
                    [_kept(gear, slot, owned.get(ref), spec) for ref in refs]
                    for slot in wanted[index]
                ]
            )
            rows, columns = linear_sum_assignment(kept, maximize=True)
            inner[i, j] = [(wanted[index][r], refs[c]) for r, c in zip(rows, columns, strict=True)]
            worth[i, j] = kept[rows, columns].sum()
    # A pair that does not fit costs more than anything kept is worth.
    barred = np.where(worth < 0, -1e18, worth)
    rows, columns = linear_sum_assignment(barred, maximize=True)
    if len(rows) < len(abstract) or any(
        (i, j) not in inner for i, j in zip(rows, columns, strict=True)
    ):
        raise CapacityError(f"the nodes present cannot hold gear {gear.name}")
    slots = {
        slot: ref for i, j in zip(rows, columns, strict=True) for slot, ref in inner[int(i), int(j)]
    }
    total = sum(_wanted_bytes(gear, slot, spec) for slot in slots)
    kept_bytes = sum(
        int(_kept_weights(gear, slot, owned.get(ref), spec)) for slot, ref in slots.items()
    )
    return Placement(dict(sorted(slots.items())), int(total) - kept_bytes, kept_bytes)


def _fits(shape: Shape, node: PhysicalNode, slots: int) -> bool:
    return node.gpu_type == shape.gpu_type and len(node.gpus) >= max(slots, 1)


def _layer_bytes(spec: ModelSpec | None, layer: int) -> int:
    return 1 if spec is None else spec.layer_bytes(layer)


def _wanted_bytes(gear: Gear, slot: Slot, spec: ModelSpec | None) -> float:
    stage = gear.replicas[slot.replica].stages[slot.stage]
    return sum(_layer_bytes(spec, layer) for layer in range(stage.lo, stage.hi)) / stage.tp


def _overlap(tp: int, rank: int, other_tp: int, other_rank: int) -> float:
    """Share of a weight that both one rank of `tp` and one of `other_tp` hold."""
    low = max(rank / tp, other_rank / other_tp)
    return max(0.0, min((rank + 1) / tp, (other_rank + 1) / other_tp) - low)


def _kept_weights(gear: Gear, slot: Slot, held: Owned | None, spec: ModelSpec | None) -> float:
    if held is None:
        return 0.0
    stage = gear.replicas[slot.replica].stages[slot.stage]
    share = _overlap(stage.tp, slot.tp_rank, held.tp, held.slot.tp_rank)
    layers = range(max(stage.lo, held.lo), min(stage.hi, held.hi))
    return share * sum(_layer_bytes(spec, layer) for layer in layers)


def _kept(gear: Gear, slot: Slot, held: Owned | None, spec: ModelSpec | None) -> float:
    """Bytes that need not move if the GPU takes the slot; ties go to the present owner."""
    if held is None:
        return 0.0
    stage = gear.replicas[slot.replica].stages[slot.stage]
    layers = max(0, min(stage.hi, held.hi) - max(stage.lo, held.lo))
    share = _overlap(stage.tp, slot.tp_rank, held.tp, held.slot.tp_rank)
    kv = spec.kv_bytes_per_token_layer() * held.kv_tokens * layers * share if spec else 0.0
    same = 0.5 if held.slot == slot else 0.25 if held.slot.replica == slot.replica else 0.0
    return _kept_weights(gear, slot, held, spec) + kv + same
