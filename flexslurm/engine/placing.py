"""Places a gear so that the fewest bytes of weights and KV move; pure.

Where the KV goes depends on the placement, and the best placement on where the KV goes. So the two
are found in turn, each the best for the other, until no more bytes are saved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from flexslurm.engine.kv_moves import route_costs
from flexslurm.engine.ownership import Holding, ReplicaAt, Seat, ShardMap
from flexslurm.engine.reshard import kept_weight_bytes
from flexslurm.engine.routing import LiveKv, Routes, rooms_of, route_sequences
from flexslurm.gear import Gear, Slot, replica_slots, slots
from flexslurm.planner.placement import (
    Current,
    GpuRef,
    Kept,
    PhysicalNode,
    Placement,
    place,
    whole_replicas,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_MOST_ROUNDS = 6

Flows = Sequence[Sequence[float]]
"""Blocks that go from old to new replicas, `[new][old]`."""


class Placed(msgspec.Struct, frozen=True):
    """A placement, and the routes it was made for."""

    placement: Placement
    routes: Routes
    """Of sequences that do not stay in a kept replica."""
    moved_bytes: int
    """Weights and KV that come from outside the GPU that needs them."""


class Keeps:
    """Bytes of what slots of a gear need that GPUs of the current gear have."""

    def __init__(self, shards: ShardMap, gear: Gear, current: Current) -> None:
        self._shards, self._gear, self._current = shards, gear, current
        self._at = {ref: slot for slot, ref in current.at.items()}
        self._weights: dict[tuple[Holding, Holding], int] = {}
        self._pages: dict[tuple[Holding, Holding], int] = {}

    def kept(self, flows: Flows) -> Kept:
        """For `place`: what is kept if KV flows like this."""
        import numpy as np

        blocks = np.array(flows, dtype=np.float64)

        def bytes_of(slots: Sequence[Slot], refs: Sequence[GpuRef]) -> npt.NDArray[np.float64]:
            before = [self._at[ref] for ref in refs]
            needs, need_of = _kinds([_holding(self._gear, slot) for slot in slots])
            helds, held_of = _kinds([_holding(self._current.gear, slot) for slot in before])
            weights = np.array([[self.weights(n, h) for h in helds] for n in needs], dtype=float)
            pages = np.array([[self.block(n, h) for h in helds] for n in needs], dtype=float)
            flow = blocks[[slot.replica for slot in slots]][:, [slot.replica for slot in before]]
            pairs = np.ix_(need_of, held_of)
            found: npt.NDArray[np.float64] = np.floor(weights[pairs] + flow * pages[pairs])
            return found

        return bytes_of

    def weights(self, need: Holding, held: Holding) -> int:
        key = (need, held)
        if key not in self._weights:
            self._weights[key] = kept_weight_bytes(self._shards, need, (held,))
        return self._weights[key]

    def block(self, need: Holding, held: Holding) -> int:
        """Bytes of one block that both have."""
        key = (need, held)
        if key not in self._pages:
            met = self._shards.kv_box(need).meet(self._shards.kv_box(held))
            self._pages[key] = met.pages * self._shards.page_bytes if met else 0
        return self._pages[key]


def _kinds(holdings: Sequence[Holding]) -> tuple[list[Holding], list[int]]:
    """The different ones, and for each its number among them."""
    known: dict[Holding, int] = {}
    numbers = [known.setdefault(held, len(known)) for held in holdings]
    return list(known), numbers


def _holding(gear: Gear, slot: Slot) -> Holding:
    return Holding.of_slot(gear.replicas[slot.replica], slot.stage, slot.tp_rank)


def place_gear(
    shards: ShardMap,
    gear: Gear,
    nodes: Sequence[PhysicalNode],
    current: Current | None = None,
    live: Sequence[LiveKv] = (),
    leaves: Mapping[str, str] | None = None,
) -> Placed:
    """Place a gear and route what is live: the fewest bytes, ties to the present owners.

    `live`: sequences whose KV can be moved; their `replica` is a number of the current gear.
    `leaves`: the leaf switch of each node, where it is known. Raises CapacityError where the
    nodes cannot hold the gear.
    """
    if current is None:
        placement = place(gear, nodes, leaves=leaves)
        return Placed(placement, Routes({}, (), (), 0), _needed(shards, gear))
    keeps = Keeps(shards, gear, current)
    needed = _needed(shards, gear)
    live = [one for one in live if _at(current.gear, one.replica, current.at) is not None]
    flows = _first_flows(gear, nodes, current, live)
    best: Placed | None = None
    for _ in range(_MOST_ROUNDS):
        placement = place(gear, nodes, current, keeps.kept(flows), leaves)
        lacked = needed - sum(_kept_weights(keeps, gear, placement, current))
        routes = _route(shards, gear, placement, current, live, best)
        moved = lacked + routes.moved_bytes
        if best is not None and moved >= best.moved_bytes:
            break
        best = Placed(placement, routes, moved)
        flows = _flows(gear, placement.kept_replicas, current, live, routes)
    assert best is not None
    return best


def _needed(shards: ShardMap, gear: Gear) -> int:
    """Bytes of all weights of a gear, before alignment."""
    total = 0
    known: dict[Holding, int] = {}
    for slot in slots(gear):
        need = _holding(gear, slot)
        if need not in known:
            known[need] = sum(piece.nbytes for piece in shards.pieces(need))
        total += known[need]
    return total


def _kept_weights(
    keeps: Keeps, gear: Gear, placement: Placement, current: Current
) -> Sequence[int]:
    at = {ref: slot for slot, ref in current.at.items()}
    return [
        keeps.weights(_holding(gear, slot), _holding(current.gear, at[ref]))
        for slot, ref in placement.slots.items()
        if ref in at
    ]


# --------------------------------------------------------------------------------------- flows


def _first_flows(
    gear: Gear, nodes: Sequence[PhysicalNode], current: Current, live: Sequence[LiveKv]
) -> list[list[float]]:
    """A guess: what could stay whole stays, everything else is spread by capacity."""
    kept: dict[int, int] = {}
    at = {ref: slot for slot, ref in current.at.items()}
    for slot, ref in whole_replicas(gear, nodes, current).items():
        kept[slot.replica] = at[ref].replica
    flows = _no_flows(gear, current)
    blocks = _blocks(current, live)
    open_to = [n for n in range(len(gear.replicas)) if n not in kept] or list(
        range(len(gear.replicas))
    )
    capacity = sum(gear.replicas[n].kv_blocks for n in open_to)
    stays = {old: number for number, old in kept.items()}
    for old, count in enumerate(blocks):
        if old in stays:
            flows[stays[old]][old] = float(count)
            continue
        for number in open_to:
            share = gear.replicas[number].kv_blocks / capacity if capacity else 0.0
            flows[number][old] = count * share
    return flows


def _flows(
    gear: Gear,
    kept: Mapping[int, int],
    current: Current,
    live: Sequence[LiveKv],
    routes: Routes,
) -> list[list[float]]:
    """Where the routes and the kept replicas bring the blocks."""
    flows = _no_flows(gear, current)
    stays = {old: number for number, old in kept.items()}
    for one in live:
        number = stays.get(one.replica, routes.to.get(one.seq_id, -1))
        if number >= 0:
            flows[number][one.replica] += one.blocks
    return flows


def _no_flows(gear: Gear, current: Current) -> list[list[float]]:
    return [[0.0] * len(current.gear.replicas) for _ in gear.replicas]


def _blocks(current: Current, live: Sequence[LiveKv]) -> list[int]:
    found = [0] * len(current.gear.replicas)
    for one in live:
        found[one.replica] += one.blocks
    return found


def _route(
    shards: ShardMap,
    gear: Gear,
    placement: Placement,
    current: Current,
    live: Sequence[LiveKv],
    before: Placed | None,
) -> Routes:
    """Routes for this placement; those of the one before where they are cheaper here too."""
    kept = placement.kept_replicas
    moving = [one for one in live if one.replica not in kept.values()]
    if not moving:
        return Routes({}, (), (), 0)
    old = [_at(current.gear, number, current.at) for number in range(len(current.gear.replicas))]
    new = [_at(gear, number, placement.slots) for number in range(len(gear.replicas))]
    costs = route_costs(shards, old, [one for one in new if one is not None])
    staying = [one for one in live if one.replica in kept.values()]
    found = route_sequences(moving, costs, rooms_of(gear.replicas, kept, staying))
    if before is None or before.placement.kept_replicas != kept:
        return found
    to = before.routes.to
    moved = sum(o.blocks * costs[o.replica][to[o.seq_id]] for o in moving if o.seq_id in to)
    return (
        msgspec.structs.replace(before.routes, moved_bytes=moved)
        if (moved < found.moved_bytes and len(to) >= len(found.to))
        else found
    )


def _at(gear: Gear, number: int, at: Mapping[Slot, GpuRef]) -> ReplicaAt | None:
    """The replica with GPUs for workers; None where some of them are not present."""
    refs = [at.get(slot) for slot in replica_slots(gear.replicas[number], number)]
    seats = [Seat(str(ref), ref.node) for ref in refs if ref is not None]
    if len(seats) < len(refs):
        return None
    return ReplicaAt(0, number, gear.replicas[number], tuple(seats))
