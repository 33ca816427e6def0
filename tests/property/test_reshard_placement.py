"""A placed gear moves the fewest bytes that any placement moves, and leaves what can stay."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from flexslurm.engine.kv_moves import kv_pulls
from flexslurm.engine.ownership import Holding, ShardMap
from flexslurm.engine.placing import Placed, place_gear
from flexslurm.engine.reshard import LinkKind, weight_moves
from flexslurm.engine.routing import LiveKv
from flexslurm.engine.shift_plan import holders_of
from flexslurm.errors import CapacityError
from flexslurm.gear import Gear, Slot, slots
from flexslurm.planner.placement import Current, GpuRef, PhysicalNode, match_replicas, place
from tests.reshard_cases import (
    CONFIGS,
    LAYERS,
    gear_of,
    in_place,
    live_sequences,
    placed_gears,
    replica,
    shard_map,
)

KINDS = st.sampled_from(sorted(CONFIGS))


def old_place(gear: Gear, nodes: list[PhysicalNode], order: list[int]) -> dict[Slot, GpuRef]:
    """The gear somewhere: its nodes on physical ones in this order, first GPUs first."""
    free = {node.node: list(node.gpus) for node in nodes}
    found = {}
    for slot in slots(gear):
        stage = gear.replicas[slot.replica].stages[slot.stage]
        node = nodes[order[stage.node]]
        found[slot] = GpuRef(node.node, free[node.node].pop())
    return found


def counted_bytes(
    shards: ShardMap, new: Gear, placed: Placed, current: Current, live: list[LiveKv]
) -> int:
    """What the moves themselves say comes from outside the GPUs."""
    olds = in_place(current.gear, dict(current.at), 1)
    news = in_place(new, placed.placement.slots, 2)
    holders = holders_of(olds)
    total = 0
    for one in news:
        for seat, need in zip(one.seats, one.holdings, strict=True):
            moves = weight_moves(shards, need, seat.worker, seat.node, holders)
            total += sum(m.nbytes for m in moves if m.link not in (LinkKind.HELD, LinkKind.GPU))
    for sequence in live:
        target = placed.routes.to.get(sequence.seq_id)
        if target is not None:
            pairs = [(block, block) for block in range(sequence.blocks)]
            pulls = kv_pulls(shards, olds[sequence.replica], news[target], pairs, first_ticket=0)
            total += sum(pull.nbytes for pull in pulls)
    return total


def true_costs(
    shards: ShardMap, new: Gear, placed: Placed, current: Current, live: list[LiveKv]
) -> dict[tuple[Slot, GpuRef], int]:
    """Bytes that a slot lacks on a GPU, number by number, for the routes that were chosen."""
    kept = {old: n for n, old in placed.placement.kept_replicas.items()}
    flows: dict[tuple[int, int], int] = {}
    for sequence in live:
        to = kept.get(sequence.replica, placed.routes.to.get(sequence.seq_id, -1))
        key = (to, sequence.replica)
        flows[key] = flows.get(key, 0) + sequence.blocks
    at = {ref: slot for slot, ref in current.at.items()}

    def cost(slot: Slot, ref: GpuRef) -> int:
        need = Holding.of_slot(new.replicas[slot.replica], slot.stage, slot.tp_rank)
        box = shards.kv_box(need)
        before = at.get(ref)
        held = before and Holding.of_slot(
            current.gear.replicas[before.replica], before.stage, before.tp_rank
        )
        have = shards.pieces(held) if held else ()
        lacked = 0
        for piece in shards.pieces(need):
            same = [p for p in have if p.tensor == piece.tensor]
            if any(p.is_whole for p in same):
                continue
            covered = {i for p in same if p.dim == piece.dim for i in range(p.lo, p.hi)} & set(
                range(piece.lo, piece.hi)
            )
            lacked += (piece.hi - piece.lo - len(covered)) * piece.unit_bytes
        for (to, source), blocks in flows.items():
            if to != slot.replica:
                continue
            pages = box.pages
            if before and held and before.replica == source:
                met = box.meet(shards.kv_box(held))
                pages -= met.pages if met else 0
            lacked += pages * blocks * shards.page_bytes
        return lacked

    refs = {*placed.placement.slots.values(), *at}
    return {(slot, ref): cost(slot, ref) for slot in slots(new) for ref in refs}


def cheapest(new: Gear, nodes: list[PhysicalNode], costs: dict[tuple[Slot, GpuRef], int]) -> int:
    """The optimum: scipy over nodes, each pair's cost the best of all ways to fill the node."""
    wanted: dict[int, list[Slot]] = {}
    for slot in slots(new):
        wanted.setdefault(new.replicas[slot.replica].stages[slot.stage].node, []).append(slot)
    shapes = new.signature.nodes()
    fresh = {slot: max(c for (s, _), c in costs.items() if s == slot) for slot in slots(new)}
    table = np.full((len(wanted), len(nodes)), np.inf)
    for i, (index, group) in enumerate(sorted(wanted.items())):
        for j, node in enumerate(nodes):
            if node.gpu_type != shapes[index].gpu_type or len(node.gpus) < len(group):
                continue
            refs = [GpuRef(node.node, gpu) for gpu in node.gpus]
            table[i, j] = min(
                sum(costs.get((s, r), fresh[s]) for s, r in zip(group, order, strict=True))
                for order in itertools.permutations(refs, len(group))
            )
    rows, columns = linear_sum_assignment(table)
    return int(table[rows, columns].sum())


@st.composite
def shifts(draw: st.DrawFn) -> tuple[ShardMap, Gear, list[PhysicalNode], Current, list[LiveKv]]:
    """Two gears over partly the same nodes: some are lost, some are new."""
    shards = shard_map(draw(KINDS))
    most_tp = min(3, shards.info.num_kv_heads)
    old, old_nodes = draw(placed_gears("old", most_tp=most_tp))
    new, new_nodes = draw(placed_gears("new", most_tp=most_tp))
    order = draw(st.permutations(range(len(old.signature.nodes()))))
    order = list(order)
    sizes = [shape.gpus for shape in old.signature.nodes()]
    assume(all(len(old_nodes[order[i]].gpus) >= size for i, size in enumerate(sizes)))
    current = Current(old, old_place(old, old_nodes, order))
    live = draw(live_sequences(old))
    return shards, new, new_nodes, current, live


@given(shifts())
def test_no_placement_moves_fewer_bytes(
    shift: tuple[ShardMap, Gear, list[PhysicalNode], Current, list[LiveKv]],
) -> None:
    shards, new, nodes, current, live = shift
    placed = place_gear(shards, new, nodes, current, live)
    assert len(set(placed.placement.slots.values())) == len(slots(new))
    assert placed.moved_bytes == counted_bytes(shards, new, placed, current, live)
    costs = true_costs(shards, new, placed, current, live)
    assert placed.moved_bytes == cheapest(new, nodes, costs)


@given(placed_gears("old"), st.permutations(range(3)), st.integers(0, 2))
def test_replicas_that_are_only_added_or_removed_leave_the_others_alone(
    case: tuple[Gear, list[PhysicalNode]], order: list[int], drop: int
) -> None:
    shards = shard_map("llama")
    gear, nodes = case
    current = Current(gear, place(gear, nodes).slots)
    left = [one for i, one in enumerate(gear.replicas) if i != drop]
    shuffled = [left[i] for i in order if i < len(left)]
    if not shuffled:
        return
    smaller = Gear("less", gear.signature, 4, tuple(shuffled), gear.estimates)
    placed = place_gear(shards, smaller, nodes, current)
    assert placed.moved_bytes == 0
    assert len(placed.placement.kept_replicas) == len(shuffled)
    # And back: the gear with all of them again, from the smaller one.
    again = Current(smaller, placed.placement.slots)
    grown = place_gear(shards, gear, nodes, again)
    assert len(grown.placement.kept_replicas) >= len(shuffled)
    fresh = [r for i, r in enumerate(gear.replicas) if i not in grown.placement.kept_replicas]
    assert len(fresh) == len(gear.replicas) - len(grown.placement.kept_replicas)


def test_ties_go_to_the_present_owner() -> None:
    whole = replica((1, 0, LAYERS), nodes=[0])
    gear = gear_of("one", [1], whole)
    nodes = [PhysicalNode(f"n{i}", "a", (0,)) for i in range(3)]
    current = Current(gear, {Slot(0, 0, 0): GpuRef("n2", 0)})
    assert place(gear, nodes, current).slots == {Slot(0, 0, 0): GpuRef("n2", 0)}


def test_ranks_of_a_group_stay_on_their_gpus() -> None:
    shards = shard_map("llama")
    old = gear_of("tp3", [3], replica((3, 0, LAYERS), nodes=[0]))
    where = {Slot(0, 0, rank): GpuRef("n0", (rank + 1) % 3) for rank in range(3)}
    nodes = [PhysicalNode("n0", "a", (0, 1, 2))]
    placed = place_gear(shards, old, nodes, Current(old, where))
    assert placed.placement.slots == where
    assert placed.moved_bytes == 0
    assert placed.placement.kept_replicas == {0: 0}


def test_half_of_a_pair_of_equal_replicas_is_matched_with_its_own_half() -> None:
    """Both replicas are cut alike; the first lost its second half."""
    shards = shard_map("llama")
    pair = replica((1, 0, 3), (1, 3, 6), nodes=[0, 1])
    old = gear_of("two", [1, 1, 1, 1], pair, replica((1, 0, 3), (1, 3, 6), nodes=[2, 3]))
    at = {Slot(r, s, 0): GpuRef(f"n{2 * r + s}", 0) for r in range(2) for s in range(2)}
    nodes = [PhysicalNode(f"n{i}", "a", (0,)) for i in (0, 2, 3)]
    new = gear_of("one", [1, 1, 1], pair)
    placed = place_gear(shards, new, nodes, Current(old, at))
    assert placed.placement.kept_replicas == {0: 1}
    assert placed.moved_bytes == 0


def test_kv_outweighs_weights_where_there_is_more_of_it() -> None:
    """The whole model is wanted on one GPU: the one with more KV takes it, if weights allow."""
    shards = shard_map("llama")
    old = gear_of("pair", [1, 1], replica((1, 0, 3), (1, 3, 6), kv_blocks=4000))
    at = {Slot(0, s, 0): GpuRef(f"n{s}", 0) for s in range(2)}
    uneven = gear_of("uneven", [1, 1], replica((1, 0, 2), (1, 2, 6), kv_blocks=4000))
    nodes = [PhysicalNode(f"n{i}", "a", (0,)) for i in range(2)]
    whole = gear_of("whole", [1], replica((1, 0, 6), kv_blocks=4000))
    for gear in (old, uneven):
        live = [LiveKv("s", 0, 3000, 12000, 1, 12008)]
        placed = place_gear(shards, whole, nodes, Current(gear, at), live)
        if gear is uneven:
            assert placed.placement.slots[Slot(0, 0, 0)] == GpuRef("n1", 0)


def test_what_does_not_fit_is_said() -> None:
    gear = gear_of("pair", [1, 1], replica((1, 0, 3), (1, 3, 6)))
    with pytest.raises(CapacityError, match="cannot hold gear pair"):
        place(gear, [PhysicalNode("n0", "a", (0,))])
    with pytest.raises(CapacityError, match="cannot hold gear pair"):
        place(gear, [PhysicalNode("n0", "a", (0,)), PhysicalNode("n1", "b", (0,))])


def test_replicas_match_by_layout_and_place() -> None:
    one = replica((1, 0, 3), (1, 3, 6), nodes=[0, 1])
    old = gear_of("old", [1, 1], one)
    where = {Slot(0, 0, 0): "w1", Slot(0, 1, 0): "w2"}
    renumbered = gear_of("new", [1, 1], replica((1, 0, 3), (1, 3, 6), nodes=[1, 0]))
    assert match_replicas(old, where, renumbered, dict(where)) == {0: 0}
    swapped = {Slot(0, 0, 0): "w2", Slot(0, 1, 0): "w1"}
    assert match_replicas(old, where, renumbered, swapped) == {}
    other_cut = gear_of("cut", [1, 1], replica((1, 0, 2), (1, 2, 6), nodes=[0, 1]))
    assert match_replicas(old, where, other_cut, dict(where)) == {}
