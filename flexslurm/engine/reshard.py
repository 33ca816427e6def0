"""Which weights a new owner lacks and whom it takes them from; pure, moves nothing itself.

The installer and the head call `weight_moves` with the same arguments and get the same answer: the
one to fetch, the other for figures. A piece that lies inside one segment on the own GPU is a view
and costs nothing. Any other piece is taken anew, and its ranges come from the nearest owner: the
own GPU's other segments, the node, another node, and last the checkpoint. Among equally near
owners the one that was asked for least so far is asked next, so that a source is not a bottleneck.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar
from zlib import crc32

import msgspec

from flexslurm.engine.ownership import Holding, Piece, ShardMap
from flexslurm.messages import WeightHolder

SPLIT_BYTES = 16 << 20
"""Longer ranges that several owners have are asked for in parts."""

MOST_SOURCES = 8
"""Of those on other nodes that hold the same, no more are asked by one receiver."""

CHECKPOINT = -1
"""The `source` of what is read from the model's files."""


T = TypeVar("T")


class LinkKind(StrEnum):
    """What bytes go over, the cheapest first."""

    HELD = "held"
    """They are where they are needed: a view, or a shared page."""
    GPU = "gpu"
    """A copy inside one GPU."""
    NODE = "node"
    """From another GPU of the node."""
    NETWORK = "network"
    CHECKPOINT = "checkpoint"
    """From the model's files."""


class WeightMove(msgspec.Struct, frozen=True, array_like=True):
    """The range `[lo, hi)` of a tensor along `dim`, and where it comes from.

    The bytes are in the receiver's form (`dim` 1: transposed); a source that holds the tensor in
    the other form has all of it and gathers the range.
    """

    tensor: str
    dim: int
    lo: int
    hi: int
    nbytes: int
    link: LinkKind
    source: int = CHECKPOINT
    """Index into the holders."""


@dataclass(slots=True)
class _Owner:
    """A holder of parts of one layer (or of the edges), with its distance from the receiver."""

    index: int
    worker: str
    link: LinkKind
    pieces: Mapping[str, tuple[Piece, ...]]

    def range_of(self, need: Piece) -> tuple[int, int]:
        """What it has of the needed range; empty where that is nothing."""
        for piece in self.pieces.get(need.tensor, ()):
            if piece.dim == need.dim:
                lo, hi = max(piece.lo, need.lo), min(piece.hi, need.hi)
                if lo < hi:
                    return lo, hi
            elif piece.is_whole:
                return need.lo, need.hi
        return need.lo, need.lo


def weight_moves(
    shards: ShardMap,
    need: Holding,
    worker: str,
    node: str,
    holders: Sequence[WeightHolder],
    gone: Collection[str] = (),
) -> tuple[WeightMove, ...]:
    """What `worker` on `node` has to do to own `need`: moves that tile each of its pieces.

    `holders`: who has weights now, the worker itself included where it does; workers in `gone` are
    never asked. The answer depends on nothing else.
    """
    chooser = _Chooser()
    moves: list[WeightMove] = []
    owners = _worth_asking(holders, worker, node, frozenset(gone))
    for layer in (None, *range(need.lo, need.hi)):
        found = [
            _Owner(i, holders[i].worker, link, shards.named_pieces(layer, held))
            for i, link, held in owners
            if _concerns(shards, layer, held)
        ]
        wanted = shards.edge_pieces(need) if layer is None else shards.layer_pieces(layer, need)
        for piece in wanted:
            moves += chooser.moves(piece, found)
    return tuple(moves)


def _worth_asking(
    holders: Sequence[WeightHolder], worker: str, node: str, gone: Collection[str]
) -> list[tuple[int, LinkKind, Holding]]:
    """All holders of this GPU and node, and of the others a few of each kind.

    Which few depends on the receiver, so that all are asked by somebody.
    """
    near: list[tuple[int, LinkKind, Holding]] = []
    far: dict[Holding, list[int]] = {}
    for i, holder in enumerate(holders):
        if holder.worker in gone:
            continue
        link, held = _distance(holder, worker, node), Holding.of_holder(holder)
        if link is LinkKind.NETWORK:
            far.setdefault(held, []).append(i)
        else:
            near.append((i, link, held))
    turn = crc32(worker.encode())
    found = _turned(near, turn)
    for held, known in far.items():
        found += [(i, LinkKind.NETWORK, held) for i in _turned(known, turn)[:MOST_SOURCES]]
    return found


def _turned(items: list[T], turn: int) -> list[T]:
    """The same from another start: receivers begin with different sources."""
    start = turn % len(items) if items else 0
    return items[start:] + items[:start]


def _distance(holder: WeightHolder, worker: str, node: str) -> LinkKind:
    if holder.worker == worker:
        return LinkKind.GPU
    return LinkKind.NODE if holder.node == node else LinkKind.NETWORK


def _concerns(shards: ShardMap, layer: int | None, held: Holding) -> bool:
    if layer is not None:
        return held.lo <= layer < held.hi
    return held.lo == 0 or held.hi == shards.info.num_layers


class _Chooser:
    """Chooses sources for one receiver; remembers how much each was asked for."""

    def __init__(self) -> None:
        self._asked: dict[str, int] = {}

    def moves(self, piece: Piece, owners: Sequence[_Owner]) -> Iterable[WeightMove]:
        own = [owner for owner in owners if owner.link is LinkKind.GPU]
        for owner in own:
            if any(segment.holds(piece) for segment in owner.pieces.get(piece.tensor, ())):
                yield _move(piece, piece.lo, piece.hi, LinkKind.HELD, owner.index)
                return
        left = [(piece.lo, piece.hi)]
        for link in (LinkKind.GPU, LinkKind.NODE, LinkKind.NETWORK):
            near = [owner for owner in owners if owner.link is link]
            rest: list[tuple[int, int]] = []
            for lo, hi in left:
                for start, stop, source in self._cover(piece, lo, hi, near):
                    if source is None:
                        rest.append((start, stop))
                    else:
                        yield _move(piece, start, stop, link, source.index)
            left = rest
        for lo, hi in left:
            yield _move(piece, lo, hi, LinkKind.CHECKPOINT, CHECKPOINT)

    def _cover(
        self, piece: Piece, lo: int, hi: int, owners: Sequence[_Owner]
    ) -> Iterable[tuple[int, int, _Owner | None]]:
        """Cut `[lo, hi)` where owners begin and end, and give each part to one of them or None."""
        ranges = [(*owner.range_of(piece), owner) for owner in owners]
        ends = {lo, hi}
        for start, stop, _ in ranges:
            ends |= {end for end in (start, stop) if lo < end < hi}
        cuts = sorted(ends)
        for start, stop in itertools.pairwise(cuts):
            having = [owner for a, b, owner in ranges if a <= start and stop <= b]
            if not having:
                yield start, stop, None
                continue
            yield from self._spread(piece, start, stop, having)

    def _spread(
        self, piece: Piece, lo: int, hi: int, owners: Sequence[_Owner]
    ) -> Iterable[tuple[int, int, _Owner]]:
        """Give a range to the owner asked for least; a long one in parts to several."""
        step = hi - lo
        if len({owner.worker for owner in owners}) > 1:
            step = max(SPLIT_BYTES // max(piece.unit_bytes, 1), 1)
        at: tuple[int, int, _Owner] | None = None
        for start in range(lo, hi, step):
            stop = min(start + step, hi)
            owner = min(owners, key=lambda owner: self._asked.get(owner.worker, 0))
            asked = self._asked.get(owner.worker, 0)
            self._asked[owner.worker] = asked + (stop - start) * piece.unit_bytes
            if at is not None and at[2] is owner:
                at = (at[0], stop, owner)
                continue
            if at is not None:
                yield at
            at = (start, stop, owner)
        if at is not None:
            yield at


def _move(piece: Piece, lo: int, hi: int, link: LinkKind, source: int) -> WeightMove:
    nbytes = (hi - lo) * piece.unit_bytes
    return WeightMove(piece.tensor, piece.dim, lo, hi, nbytes, link, source)


def kept_weight_bytes(shards: ShardMap, need: Holding, held: Sequence[Holding]) -> int:
    """Bytes of `need` that a GPU with these holdings has: what need not come from elsewhere."""
    kept = 0
    for layer in (None, *range(need.lo, need.hi)):
        owned = [
            _Owner(0, "", LinkKind.GPU, shards.named_pieces(layer, one))
            for one in held
            if _concerns(shards, layer, one)
        ]
        wanted = shards.edge_pieces(need) if layer is None else shards.layer_pieces(layer, need)
        for piece in wanted if owned else ():
            covered = _union(owner.range_of(piece) for owner in owned)
            kept += covered * piece.unit_bytes
    return kept


def _union(ranges: Iterable[tuple[int, int]]) -> int:
    """How many numbers lie in at least one of the ranges."""
    total, at = 0, 0
    for lo, hi in sorted(ranges):
        if hi > max(lo, at):
            total += hi - max(lo, at)
            at = hi
    return total
