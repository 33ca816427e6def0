"""Which KV pages a new replica takes from whom; pure, moves nothing itself.

Every rank of a replica has a box of layers and heads, and the boxes of a replica tile the model.
So each new rank takes, from each old rank whose box meets its own, exactly what both have; where
both are one worker the pages are shared and nothing moves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import msgspec

from flexslurm.engine.ownership import Holding, KvBox, ReplicaAt, ShardMap
from flexslurm.engine.reshard import LinkKind
from flexslurm.messages import PullKv


class KvPull(msgspec.Struct, frozen=True):
    """A pull, who is told to do it, and what moves."""

    to: str
    """The new owner's worker."""
    message: PullKv
    nbytes: int
    """0 where pages are shared."""
    link: LinkKind


class Meeting(msgspec.Struct, frozen=True):
    """What one old rank has that one new rank needs."""

    old: int
    """Index of the old replica's seat."""
    new: int
    box: KvBox
    link: LinkKind


def movable(old: ReplicaAt, gone: Collection[str]) -> bool:
    """Whether the replica's KV can be moved: every member holds a part of every sequence's."""
    return not set(old.workers) & set(gone)


def meetings(shards: ShardMap, old: ReplicaAt, new: ReplicaAt) -> Iterator[Meeting]:
    """All parts of a block's pages, by who has them and who needs them; they tile the block."""
    had = [shards.kv_box(held) for held in old.holdings]
    for j, needs in enumerate(new.holdings):
        wanted = shards.kv_box(needs)
        for i, box in enumerate(had):
            shared = box.meet(wanted)
            if shared is not None:
                yield Meeting(i, j, shared, _link(old, i, new, j))


def _link(old: ReplicaAt, i: int, new: ReplicaAt, j: int) -> LinkKind:
    source, target = old.seats[i], new.seats[j]
    if source.worker == target.worker:
        return LinkKind.HELD
    return LinkKind.NODE if source.node == target.node else LinkKind.NETWORK


def kv_pulls(
    shards: ShardMap,
    old: ReplicaAt,
    new: ReplicaAt,
    pairs: Sequence[tuple[int, int]],
    *,
    first_ticket: int,
    rate_bytes_per_s: float = 0.0,
    timeout_s: float = 60.0,
) -> tuple[KvPull, ...]:
    """The messages that bring these blocks, `(old block, new block)`, to their new owners.

    Tickets rise by one from `first_ticket`. The old replica must be `movable`.
    """
    if not pairs:
        return ()
    page_bytes = shards.page_bytes
    return tuple(
        KvPull(
            to=new.seats[met.new].worker,
            message=PullKv(
                epoch=new.epoch,
                ticket=first_ticket + number,
                source=old.source(met.old),
                layers=met.box.layers,
                heads=met.box.heads,
                pairs=tuple(pairs),
                rate_bytes_per_s=rate_bytes_per_s,
                timeout_s=timeout_s,
            ),
            nbytes=0 if met.link is LinkKind.HELD else met.box.pages * len(pairs) * page_bytes,
            link=met.link,
        )
        for number, met in enumerate(meetings(shards, old, new))
    )


def route_costs(
    shards: ShardMap, old: Sequence[ReplicaAt | None], new: Sequence[ReplicaAt]
) -> list[list[int]]:
    """Bytes of one block that leave their GPU, `[old][new]`: what routes are chosen by.

    An old replica that is None (it lost a member) has nothing to move and costs nothing.
    """
    whole = shards.block_bytes(Holding(0, shards.info.num_layers, 1, 0))
    costs = [[whole if one is not None else 0] * len(new) for one in old]
    homes = {
        seat.worker: (i, held)
        for i, one in enumerate(old)
        if one is not None
        for seat, held in zip(one.seats, one.holdings, strict=True)
    }
    for j, one in enumerate(new):
        for seat, need in zip(one.seats, one.holdings, strict=True):
            if seat.worker in homes:
                i, held = homes[seat.worker]
                met = shards.kv_box(held).meet(shards.kv_box(need))
                costs[i][j] -= met.pages * shards.page_bytes if met is not None else 0
    return costs
