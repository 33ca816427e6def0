"""Who has which weights and which KV pages, from the places of a gear alone; no torch, no I/O.

Weights are ranges of the checkpoint's tensors along the dim that tensor parallelism cuts; KV is a
box of layers and heads, the model's own numbers, over blocks. Everything a shift moves, keeps or
needs room for is computed from these two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

import msgspec

from flexslurm.engine.checkpoint import stored_names
from flexslurm.engine.families import DTYPE_BYTES, ModelInfo
from flexslurm.engine.footprint import page_bytes
from flexslurm.engine.layout import Cut, TensorLayout, edge_tensors, layer_tensors, share
from flexslurm.gear import Replica, Slot
from flexslurm.messages import DataSource, WeightHolder
from flexslurm.planner.model_spec import aligned


class Holding(msgspec.Struct, frozen=True, order=True, array_like=True):
    """One rank's share of a replica: layers `[lo, hi)`, cut for `tp` ranks."""

    lo: int
    hi: int
    tp: int
    tp_rank: int

    @classmethod
    def of_slot(cls, replica: Replica, stage: int, tp_rank: int) -> Holding:
        found = replica.stages[stage]
        return cls(found.lo, found.hi, found.tp, tp_rank)

    @classmethod
    def of_holder(cls, holder: WeightHolder) -> Holding:
        return cls(holder.lo, holder.hi, holder.tp, holder.tp_rank)


class Seat(msgspec.Struct, frozen=True, array_like=True):
    """A worker that fills a slot, and where its data server listens."""

    worker: str
    node: str
    """Identifies the node; workers of one node reach each other without the network."""
    address: str = ""
    data_port: int = 0


class ReplicaAt(msgspec.Struct, frozen=True):
    """A replica in its place."""

    epoch: int
    """It was installed under, which a kept replica keeps."""
    index: int
    """Its number in that epoch."""
    replica: Replica
    seats: tuple[Seat, ...]
    """In slot order."""

    @property
    def holdings(self) -> tuple[Holding, ...]:
        """What each seat has, in slot order."""
        return tuple(
            Holding.of_slot(self.replica, stage, rank)
            for stage, found in enumerate(self.replica.stages)
            for rank in range(found.tp)
        )

    @property
    def slots(self) -> tuple[Slot, ...]:
        return tuple(
            Slot(self.index, stage, rank)
            for stage, found in enumerate(self.replica.stages)
            for rank in range(found.tp)
        )

    @property
    def workers(self) -> tuple[str, ...]:
        return tuple(seat.worker for seat in self.seats)

    def holders(self) -> tuple[WeightHolder, ...]:
        """Its workers as sources of weights, for `Install.holders`."""
        return tuple(
            WeightHolder(
                worker=seat.worker,
                node=seat.node,
                address=seat.address,
                data_port=seat.data_port,
                epoch=self.epoch,
                lo=held.lo,
                hi=held.hi,
                tp=held.tp,
                tp_rank=held.tp_rank,
            )
            for seat, held in zip(self.seats, self.holdings, strict=True)
        )

    def source(self, index: int) -> DataSource:
        """A seat as the source of KV pages of this replica's epoch."""
        seat = self.seats[index]
        return DataSource(seat.worker, seat.address, seat.data_port, self.epoch)


@dataclass(frozen=True, slots=True)
class Piece:
    """The range `[lo, hi)` of a tensor along `dim`: one contiguous run of bytes where it is held.

    `dim` 1: it lies transposed in memory, so that ranges of its columns are contiguous.
    """

    tensor: str
    """Its name in the checkpoint."""
    dim: int
    lo: int
    hi: int
    size: int
    """Of the whole tensor along `dim`."""
    unit_bytes: int
    """Of one index along `dim`."""

    @property
    def nbytes(self) -> int:
        return (self.hi - self.lo) * self.unit_bytes

    @property
    def is_whole(self) -> bool:
        return self.lo == 0 and self.hi == self.size

    def holds(self, other: Piece) -> bool:
        """Whether `other` can be a view of this: the same tensor, the same form, a range inside."""
        return (
            (self.tensor, self.dim) == (other.tensor, other.dim)
            and self.lo <= other.lo
            and other.hi <= self.hi
        )


@dataclass(frozen=True, slots=True)
class KvBox:
    """Layers times KV heads, the model's own numbers: the pages of one block that a rank has."""

    layers: tuple[int, int]
    heads: tuple[int, int]

    @property
    def pages(self) -> int:
        """Pages of one block."""
        return (self.layers[1] - self.layers[0]) * (self.heads[1] - self.heads[0])

    def meet(self, other: KvBox) -> KvBox | None:
        """What both have; None where that is nothing."""
        layers = _meet(self.layers, other.layers)
        heads = _meet(self.heads, other.heads)
        return None if layers is None or heads is None else KvBox(layers, heads)


def _meet(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int] | None:
    lo, hi = max(one[0], other[0]), min(one[1], other[1])
    return (lo, hi) if lo < hi else None


@dataclass(frozen=True, eq=False)
class ShardMap:
    """What every holding of one model is, in one dtype and block size; answers are remembered."""

    info: ModelInfo
    dtype: str
    block_tokens: int
    _by_layer: dict[tuple[int, int, int], tuple[Piece, ...]] = field(
        default_factory=dict, init=False, repr=False
    )
    _edges: dict[tuple[bool, bool, int, int], tuple[Piece, ...]] = field(
        default_factory=dict, init=False, repr=False
    )
    _named: dict[
        tuple[int | None, tuple[bool, bool] | None, int, int], Mapping[str, tuple[Piece, ...]]
    ] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def page_bytes(self) -> int:
        return page_bytes(self.info, self.dtype, self.block_tokens)

    def kv_box(self, held: Holding) -> KvBox:
        heads = self.info.num_kv_heads
        first = sum(share(heads, held.tp, rank) for rank in range(held.tp_rank))
        own = share(heads, held.tp, held.tp_rank)
        return KvBox((held.lo, held.hi), (first, first + own))

    def block_bytes(self, held: Holding) -> int:
        """Bytes of one block on this rank."""
        return self.kv_box(held).pages * self.page_bytes

    def pieces(self, held: Holding) -> tuple[Piece, ...]:
        """The weights this rank has; each takes its bytes, aligned, of an arena."""
        layers = (self.layer_pieces(layer, held) for layer in range(held.lo, held.hi))
        return (*self.edge_pieces(held), *(piece for found in layers for piece in found))

    def weights_bytes(self, held: Holding) -> int:
        """What the pieces take of an arena when nothing of them is shared."""
        return sum(aligned(piece.nbytes) for piece in self.pieces(held))

    def layer_pieces(self, layer: int, held: Holding) -> tuple[Piece, ...]:
        key = (layer, held.tp, held.tp_rank)
        if key not in self._by_layer:
            self._by_layer[key] = tuple(
                self._piece(tensor, layer, held) for tensor in layer_tensors(self.info)
            )
        return self._by_layer[key]

    def named_pieces(self, layer: int | None, held: Holding) -> Mapping[str, tuple[Piece, ...]]:
        """The rank's pieces of one layer, or of the edges, by tensor."""
        edges = (held.lo == 0, held.hi == self.info.num_layers) if layer is None else None
        key = (layer, edges, held.tp, held.tp_rank)
        if key not in self._named:
            pieces = self.edge_pieces(held) if layer is None else self.layer_pieces(layer, held)
            named: dict[str, tuple[Piece, ...]] = {}
            for piece in pieces:
                named[piece.tensor] = (*named.get(piece.tensor, ()), piece)
            self._named[key] = named
        return self._named[key]

    def edge_pieces(self, held: Holding) -> tuple[Piece, ...]:
        """What is before the first layer and after the last one, where the rank has them."""
        first, last = held.lo == 0, held.hi == self.info.num_layers
        key = (first, last, held.tp, held.tp_rank)
        if key not in self._edges:
            tensors = edge_tensors(self.info, first, last)
            self._edges[key] = tuple(self._piece(tensor, None, held) for tensor in tensors)
        return self._edges[key]

    def _piece(self, tensor: TensorLayout, layer: int | None, held: Holding) -> Piece:
        dim = 1 if tensor.cut is Cut.COLUMNS else 0
        heads = self.info.num_kv_heads
        ends = [0]
        for rank in range(held.tp_rank + 1):
            ends.append(ends[-1] + tensor.local_shape(heads, held.tp, rank)[dim])
        lo, hi = ends[-2:]
        if tensor.cut is Cut.WHOLE:
            lo, hi = 0, tensor.shape[0]
        rest = prod(n for axis, n in enumerate(tensor.shape) if axis != dim)
        return Piece(
            tensor=stored_names(self.info, tensor.name, layer)[0],
            dim=dim,
            lo=lo,
            hi=hi,
            size=tensor.shape[dim],
            unit_bytes=rest * DTYPE_BYTES[self.dtype],
        )
