"""Allocations and gears as values: signatures, stages, replicas; never looks anything up.

A *signature* is what an allocation looks like to the planner: how many nodes hold how many GPUs of
which type. A *gear* is a deployment plan for one signature. Its stages name an abstract node of
that signature; placement maps abstract nodes to physical ones.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import NewType

import msgspec

from flexslurm.errors import CapacityError, ConfigError

Epoch = NewType("Epoch", int)

MOST_GPUS = 256
"""Of one node: racks that are one NVLink domain have 72."""
MOST_NODES = 65_536
_MOST_SHOWN = 80

_POOL_ITEM = re.compile(
    r"^(?P<type>[A-Za-z0-9_.-]{1,100}):(?P<gpus>[0-9]{1,40})(?:x(?P<count>[0-9]{1,40}))?$"
)


class Shape(msgspec.Struct, frozen=True, order=True, array_like=True):
    """The GPUs one fragment holds on one node: a type and a number."""

    gpu_type: str
    gpus: int

    def __str__(self) -> str:
        return f"{self.gpu_type}:{self.gpus}"


class Signature(msgspec.Struct, frozen=True, array_like=True):
    """The canonical form of an allocation: sorted `(shape, count)` pairs, counts above zero."""

    counts: tuple[tuple[Shape, int], ...] = ()

    @classmethod
    def of(cls, shapes: Iterable[Shape]) -> Signature:
        return cls(tuple(sorted(Counter(shapes).items())))

    @classmethod
    def parse(cls, text: str) -> Signature:
        """Read `a100:4x8,l40s:2` (type, GPUs on the node, and how many such nodes).

        Raises ConfigError for anything else.
        """
        shapes: list[Shape] = []
        for item in filter(None, (part.strip() for part in text.split(","))):
            match = _POOL_ITEM.match(item)
            if match is None or int(match["gpus"]) == 0:
                raise ConfigError(
                    f"cannot read the pool item '{item[:_MOST_SHOWN]}'",
                    hint="write TYPE:GPUS or TYPE:GPUSxNODES, for example a100:4x8,l40s:2x16",
                )
            gpus, nodes = int(match["gpus"]), int(match["count"] or 1)
            if gpus > MOST_GPUS or len(shapes) + nodes > MOST_NODES:
                raise ConfigError(
                    f"the pool item '{item[:_MOST_SHOWN]}' is too large",
                    hint=f"at most {MOST_GPUS} GPUs on a node, and {MOST_NODES:,} nodes",
                )
            shapes += [Shape(match["type"], gpus)] * nodes
        return cls.of(shapes)

    def nodes(self) -> tuple[Shape, ...]:
        """The abstract nodes, in the order that `Stage.node` indexes."""
        return tuple(shape for shape, count in self.counts for _ in range(count))

    def gpus(self) -> int:
        return sum(shape.gpus * count for shape, count in self.counts)

    def covers(self, other: Signature) -> bool:
        """Whether every node of `other` has a node of the same shape here."""
        mine = dict(self.counts)
        return all(mine.get(shape, 0) >= count for shape, count in other.counts)

    def __str__(self) -> str:
        return ",".join(
            str(shape) if count == 1 else f"{shape}x{count}" for shape, count in self.counts
        )


class Stage(msgspec.Struct, frozen=True):
    """A run of layers `[lo, hi)` on one tensor-parallel group of `tp` GPUs of one node."""

    gpu_type: str
    tp: int
    lo: int
    hi: int
    kv_blocks: int
    node: int
    """Index into `signature.nodes()`: the abstract node whose GPUs the group takes."""

    @property
    def layers(self) -> int:
        return self.hi - self.lo


class Replica(msgspec.Struct, frozen=True):
    """One whole copy of the model: stages in layer order, and its batch limits."""

    stages: tuple[Stage, ...]
    max_batch: int
    """Sequences in one step over all micro-batches."""
    max_batch_tokens: int
    """New tokens in one micro-batch: decodes and prefill chunks together."""
    max_context: int
    """Tokens of prompt and answer that one sequence may reach."""

    @property
    def kv_blocks(self) -> int:
        """Blocks that every stage can hold: what the block pool may hand out."""
        return min(stage.kv_blocks for stage in self.stages)

    @property
    def gpus(self) -> int:
        return sum(stage.tp for stage in self.stages)


class Estimates(msgspec.Struct, frozen=True):
    """What the planner expects of a gear under the workload it was computed for."""

    tokens_per_s: float
    """Output tokens per second over all replicas, within the SLO."""
    ttft_s: float
    tpot_s: float
    kv_tokens: int
    """Tokens of KV cache over all replicas."""
    load_s: float
    """Seconds to load the weights from shared storage, the slowest GPU."""
    memory_margin_bytes: tuple[tuple[int, ...], ...] = ()
    """Bytes left free per GPU, by replica and stage."""


class Gear(msgspec.Struct, frozen=True):
    """One deployment plan for one signature."""

    name: str
    signature: Signature
    block_tokens: int
    replicas: tuple[Replica, ...]
    estimates: Estimates
    reason: str = ""
    """Why the planner chose it, in words."""

    @property
    def gpus(self) -> int:
        return sum(replica.gpus for replica in self.replicas)

    @property
    def max_context(self) -> int:
        return max((replica.max_context for replica in self.replicas), default=0)

    def layout(self) -> str:
        """The degrees in short, for example `2x(a100 tp2 [0,20) → l40s tp1 [20,30))`."""
        forms = Counter(
            " → ".join(f"{s.gpu_type} tp{s.tp} [{s.lo},{s.hi})" for s in replica.stages)
            for replica in self.replicas
        )
        return " + ".join(f"{n}x({form})" if n > 1 else form for form, n in forms.items())


class NoGear(msgspec.Struct, frozen=True):
    """Why a signature has no gear: the short resource and by how much."""

    signature: Signature
    reason: str
    short_bytes: int = 0


class Slot(msgspec.Struct, frozen=True, order=True, array_like=True):
    """One place of an installed gear: `(replica, stage, tp_rank)`."""

    replica: int
    stage: int
    tp_rank: int

    def __str__(self) -> str:
        return f"r{self.replica}s{self.stage}t{self.tp_rank}"


def replica_slots(replica: Replica, number: int) -> tuple[Slot, ...]:
    """The places of one replica, which has this number in its gear, in order."""
    return tuple(
        Slot(number, s, t) for s, stage in enumerate(replica.stages) for t in range(stage.tp)
    )


def slots(gear: Gear) -> tuple[Slot, ...]:
    """All places of a gear, in order."""
    return tuple(
        slot
        for number, replica in enumerate(gear.replicas)
        for slot in replica_slots(replica, number)
    )


def check_gear(gear: Gear, num_layers: int) -> None:
    """Check what no gear may break; raises CapacityError naming the first thing that is broken."""
    nodes = gear.signature.nodes()
    taken: Counter[int] = Counter()
    for number, replica in enumerate(gear.replicas):
        at = 0
        for stage in replica.stages:
            if stage.lo != at or stage.hi <= stage.lo:
                raise CapacityError(
                    f"gear {gear.name}: replica {number} has layers "
                    f"[{stage.lo},{stage.hi}) where a run from {at} is due"
                )
            at = stage.hi
            if not 0 <= stage.node < len(nodes) or nodes[stage.node].gpu_type != stage.gpu_type:
                raise CapacityError(
                    f"gear {gear.name}: replica {number} wants {stage.gpu_type} on node "
                    f"{stage.node}, which the signature {gear.signature} does not have"
                )
            taken[stage.node] += stage.tp
        if at != num_layers:
            raise CapacityError(
                f"gear {gear.name}: replica {number} ends at layer {at} of {num_layers}"
            )
    for node, used in taken.items():
        if used > nodes[node].gpus:
            raise CapacityError(
                f"gear {gear.name}: node {node} ({nodes[node]}) is asked for {used} GPUs"
            )
