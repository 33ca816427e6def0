"""Whole shifts between random gears, played through number by number and page by page."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from flexslurm.engine.kv_moves import kv_pulls
from flexslurm.engine.memory_plan import memory_plan
from flexslurm.engine.ownership import Holding, ReplicaAt, ShardMap
from flexslurm.engine.placing import place_gear
from flexslurm.engine.reshard import CHECKPOINT, LinkKind
from flexslurm.engine.routing import LiveKv
from flexslurm.engine.shift_plan import ShiftFacts, ShiftPlan, plan_shift
from flexslurm.planner.model_spec import aligned
from flexslurm.planner.placement import Current, place
from tests.reshard_cases import (
    BLOCK_TOKENS,
    CONFIGS,
    in_place,
    live_sequences,
    placed_gears,
    shard_map,
)

BIG = 1 << 40


@st.composite
def shifts(draw: st.DrawFn) -> tuple[ShardMap, ShiftFacts]:
    """A gear in its place and another placed after it, on nodes that partly are the same."""
    shards = shard_map(draw(st.sampled_from(sorted(CONFIGS))))
    most_tp = min(3, shards.info.num_kv_heads)
    old, old_nodes = draw(placed_gears("old", most_tp=most_tp))
    new, new_nodes = draw(placed_gears("new", most_tp=most_tp) | st.just((old, old_nodes)))
    at = place(old, old_nodes).slots
    live = draw(live_sequences(old))
    placed = place_gear(shards, new, new_nodes, Current(old, at), live)
    before = in_place(old, at, 1)
    kept = placed.placement.kept_replicas
    after = [
        before[kept[n]] if n in kept else one
        for n, one in enumerate(in_place(new, placed.placement.slots, 2))
    ]
    workers = {w for one in (*before, *after) for w in one.workers}
    lost = draw(st.sets(st.sampled_from(sorted({w for one in before for w in one.workers}))))
    gone = frozenset(lost - {w for one in after for w in one.workers})
    facts = ShiftFacts(
        old=tuple(before),
        new=tuple(after),
        kept=kept,
        live=tuple(live),
        arenas=dict.fromkeys(workers - gone, BIG),
        gone=gone,
    )
    return shards, facts


@given(shifts())
def test_after_the_moves_every_new_owner_has_all_it_needs(
    shift: tuple[ShardMap, ShiftFacts],
) -> None:
    shards, facts = shift
    plan = plan_shift(shards, facts)
    have: dict[str, set[tuple[str, int, int]]] = defaultdict(set)
    for one in facts.old:
        for seat, held in zip(one.seats, one.holdings, strict=True):
            if seat.worker not in facts.gone:
                have[seat.worker] |= numbers(shards, held)
    taken: dict[str, set[tuple[str, int, int]]] = defaultdict(set)
    for slot in plan.slots:
        for move in slot.moves:
            wanted = {(move.tensor, move.dim, i) for i in range(move.lo, move.hi)}
            if move.source != CHECKPOINT:
                giver = plan.holders[move.source].worker
                assert giver not in facts.gone
                other = {(t, 1 - d) for t, d, _ in wanted}
                assert wanted <= have[giver] or other <= {(t, d) for t, d, _ in have[giver]}
            assert not wanted & taken[slot.worker], "moved twice"
            taken[slot.worker] |= wanted
    for n, one in enumerate(facts.new):
        for seat, need in zip(one.seats, one.holdings, strict=True):
            if n not in facts.kept:
                assert taken[seat.worker] == numbers(shards, need)
    # Every sequence has one fate.
    fates = [
        *plan.staying, *plan.recomputed, *plan.routes.to, *plan.routes.evicted, *plan.routes.unfit,
    ]  # fmt: skip
    assert sorted(fates) == sorted(one.seq_id for one in facts.live)


def numbers(shards: ShardMap, held: Holding) -> set[tuple[str, int, int]]:
    return {(p.tensor, p.dim, i) for p in shards.pieces(held) for i in range(p.lo, p.hi)}


@given(shifts())
def test_memory_is_what_segments_and_pages_take(shift: tuple[ShardMap, ShiftFacts]) -> None:
    shards, facts = shift
    plan = plan_shift(shards, facts)
    # No growth: what is there is there.

    living = [one for one in facts.live if one.seq_id not in plan.recomputed]
    memory = memory_plan(
        shards, facts.old, facts.new, facts.kept, living, plan.routes.to, facts.arenas, 0
    )
    before, added = pages(shards, facts, plan, living)
    for gpu in memory.gpus:
        old_pages, new_pages = before[gpu.worker], added[gpu.worker]
        assert gpu.old_pages == len(old_pages) * shards.page_bytes
        assert gpu.new_pages == len(new_pages) * shards.page_bytes
        needs = [
            need
            for n, one in enumerate(facts.new)
            for seat, need in zip(one.seats, one.holdings, strict=True)
            if seat.worker == gpu.worker and n not in facts.kept
        ]
        held = [
            piece
            for one in facts.old
            for seat, holding in zip(one.seats, one.holdings, strict=True)
            if seat.worker == gpu.worker
            for piece in shards.pieces(holding)
        ]
        fresh = [
            piece
            for need in needs
            for piece in shards.pieces(need)
            if not any(segment.holds(piece) for segment in held)
        ]
        assert gpu.old_weights == sum(aligned(piece.nbytes) for piece in held)
        assert gpu.new_weights == sum(aligned(piece.nbytes) for piece in fresh)
        moves = [m for slot in plan.slots if slot.worker == gpu.worker for m in slot.moves]
        assert sum(p.nbytes for p in fresh) == sum(
            m.nbytes for m in moves if m.link is not LinkKind.HELD
        )
        assert gpu.most >= gpu.prepare >= gpu.old_weights


Page = tuple[str, int, int, int]
"""Sequence, block, layer, head."""


def pages(
    shards: ShardMap, facts: ShiftFacts, plan: ShiftPlan, living: list[LiveKv]
) -> tuple[dict[str, set[Page]], dict[str, set[Page]]]:
    """What each GPU has before, and what it takes beside it."""
    before: dict[str, set[Page]] = defaultdict(set)
    added: dict[str, set[Page]] = defaultdict(set)
    for one in living:
        before_pages(shards, facts.old[one.replica], one, before)
    for one in living:
        if one.seq_id not in plan.routes.to:
            continue
        source, target = facts.old[one.replica], facts.new[plan.routes.to[one.seq_id]]
        pairs = [(block, block) for block in range(one.blocks)]
        for pull in kv_pulls(shards, source, target, pairs, first_ticket=0):
            assert pull.message.source.worker not in facts.gone
            full = one.tokens // BLOCK_TOKENS
            for block, _ in pull.message.pairs:
                for layer in range(*pull.message.layers):
                    for head in range(*pull.message.heads):
                        page = (one.seq_id, block, layer, head)
                        assert page in before[pull.message.source.worker]
                        if pull.link is not LinkKind.HELD or block >= full:
                            added[pull.to].add(page)
    return before, added


def before_pages(
    shards: ShardMap, home: ReplicaAt, one: LiveKv, before: dict[str, set[Page]]
) -> None:
    for seat, held in zip(home.seats, home.holdings, strict=True):
        box = shards.kv_box(held)
        before[seat.worker] |= {
            (one.seq_id, block, layer, head)
            for block in range(one.blocks)
            for layer in range(*box.layers)
            for head in range(*box.heads)
        }
