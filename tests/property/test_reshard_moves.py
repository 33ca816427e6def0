"""Moves cover what a new owner needs exactly once, from the nearest owner, never from the lost."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexslurm.engine.kv_moves import kv_pulls, movable
from flexslurm.engine.ownership import Holding, ShardMap
from flexslurm.engine.reshard import CHECKPOINT, LinkKind, kept_weight_bytes, weight_moves
from flexslurm.messages import WeightHolder
from flexslurm.planner.placement import place
from tests.reshard_cases import CONFIGS, LAYERS, at, in_place, placed_gears, replica, shard_map

KINDS = st.sampled_from(sorted(CONFIGS))


@st.composite
def holdings(draw: st.DrawFn, shards: ShardMap) -> Holding:
    lo = draw(st.integers(0, LAYERS - 1))
    hi = draw(st.integers(lo + 1, LAYERS))
    tp = draw(st.integers(1, min(3, shards.info.num_kv_heads)))
    return Holding(lo, hi, tp, draw(st.integers(0, tp - 1)))


def holder(index: int, worker: str, node: str, held: Holding) -> WeightHolder:
    return WeightHolder(worker, node, "10.0.0.1", 1000 + index, index, *held_fields(held))


def held_fields(held: Holding) -> tuple[int, int, int, int]:
    return held.lo, held.hi, held.tp, held.tp_rank


@st.composite
def scenes(draw: st.DrawFn) -> tuple[ShardMap, Holding, list[WeightHolder], set[str]]:
    """A receiver `w0` on `n0`, up to six holders (it may be one of them) and who is lost."""
    shards = shard_map(draw(KINDS))
    found = [
        holder(
            i,
            f"w{draw(st.integers(0, 4))}",
            f"n{draw(st.integers(0, 2))}",
            draw(holdings(shards)),
        )
        for i in range(draw(st.integers(0, 6)))
    ]
    # A worker is on one node.
    found = [
        h if h.worker != "w0" else holder(i, "w0", "n0", Holding.of_holder(h))
        for i, h in enumerate(found)
    ]
    gone = set(draw(st.lists(st.sampled_from(["w1", "w2", "w3"]), unique=True)))
    return shards, draw(holdings(shards)), found, gone


Number = tuple[str, int, int]
"""One number of one piece: the tensor, the dim it is cut along, the index."""


def numbers(shards: ShardMap, held: Holding) -> dict[Number, int]:
    """Every index of every piece, with its bytes."""
    return {
        (piece.tensor, piece.dim, index): piece.unit_bytes
        for piece in shards.pieces(held)
        for index in range(piece.lo, piece.hi)
    }


def has(shards: ShardMap, held: Holding, number: Number) -> bool:
    """Whether a holding has this index, in its own form or, where it has all, in the other."""
    tensor, dim, index = number
    return any(
        piece.tensor == tensor
        and ((piece.dim == dim and piece.lo <= index < piece.hi) or piece.is_whole)
        for piece in shards.pieces(held)
    )


@given(scenes())
def test_moves_tile_what_is_needed_and_name_the_nearest_owner(
    scene: tuple[ShardMap, Holding, list[WeightHolder], set[str]],
) -> None:
    shards, need, holders, gone = scene
    moves = weight_moves(shards, need, "w0", "n0", holders, gone)
    wanted = numbers(shards, need)
    covered = Counter(
        (move.tensor, move.dim, index) for move in moves for index in range(move.lo, move.hi)
    )
    assert covered == dict.fromkeys(wanted, 1)
    alive = [h for h in holders if h.worker not in gone]
    for move in moves:
        for index in range(move.lo, move.hi):
            number = (move.tensor, move.dim, index)
            having = [h for h in alive if has(shards, Holding.of_holder(h), number)]
            own = [h for h in having if h.worker == "w0"]
            near = [h for h in having if h.node == "n0"]
            if move.source == CHECKPOINT:
                assert move.link is LinkKind.CHECKPOINT
                assert not having, number
                continue
            source = holders[move.source]
            assert source in having
            if move.link in (LinkKind.HELD, LinkKind.GPU):
                assert source.worker == "w0"
            elif move.link is LinkKind.NODE:
                assert not own
                assert source.node == "n0"
            else:
                assert move.link is LinkKind.NETWORK
                assert not near
    assert sum(m.nbytes for m in moves) == sum(wanted.values())


@given(scenes())
def test_a_view_is_inside_one_segment_and_kept_bytes_are_all_that_is_here(
    scene: tuple[ShardMap, Holding, list[WeightHolder], set[str]],
) -> None:
    shards, need, holders, gone = scene
    moves = weight_moves(shards, need, "w0", "n0", holders, gone)
    own = [Holding.of_holder(h) for h in holders if h.worker == "w0"]
    for piece in shards.pieces(need):
        inside = any(segment.holds(piece) for held in own for segment in shards.pieces(held))
        links = {m.link for m in moves if (m.tensor, m.dim) == (piece.tensor, piece.dim)}
        assert (links == {LinkKind.HELD}) == inside, piece
    kept = sum(m.nbytes for m in moves if m.link in (LinkKind.HELD, LinkKind.GPU))
    assert kept == kept_weight_bytes(shards, need, own)


@given(scenes(), st.randoms(use_true_random=False))
def test_the_answer_does_not_depend_on_who_asks_when(
    scene: tuple[ShardMap, Holding, list[WeightHolder], set[str]], _: object
) -> None:
    shards, need, holders, gone = scene
    again = weight_moves(shards, need, "w0", "n0", list(holders), frozenset(gone))
    assert weight_moves(shards, need, "w0", "n0", holders, gone) == again


def test_equal_sources_share_the_load() -> None:
    shards = shard_map("llama")
    whole = Holding(0, LAYERS, 1, 0)
    sources = [holder(i, f"w{i + 1}", f"n{i + 1}", whole) for i in range(3)]
    moves = weight_moves(shards, whole, "w0", "n0", sources)
    sent = Counter[int]()
    for move in moves:
        sent[move.source] += move.nbytes
    total = sum(sent.values())
    assert set(sent) == {0, 1, 2}
    largest = max(piece.nbytes for piece in shards.pieces(whole))
    assert max(sent.values()) - min(sent.values()) <= largest
    assert total == sum(piece.nbytes for piece in shards.pieces(whole))


def test_long_ranges_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexslurm.engine.reshard.SPLIT_BYTES", 1 << 12)
    shards = shard_map("llama")
    need = Holding(0, 1, 1, 0)
    sources = [holder(i, f"w{i + 1}", "n1", Holding(0, LAYERS, 1, 0)) for i in range(2)]
    moves = weight_moves(shards, need, "w0", "n0", sources)
    embed = [m for m in moves if m.tensor == "model.embed_tokens.weight"]
    assert {m.source for m in embed} == {0, 1}
    assert sum(m.hi - m.lo for m in embed) == 101


def test_a_tied_head_is_gathered_from_the_embedding() -> None:
    shards = shard_map("tied")
    sources = [holder(0, "w1", "n1", Holding(0, LAYERS, 1, 0))]
    moves = weight_moves(shards, Holding(3, LAYERS, 2, 1), "w0", "n0", sources)
    head = [m for m in moves if m.tensor == "model.embed_tokens.weight"]
    assert [(m.dim, m.link) for m in head] == [(1, LinkKind.NETWORK)]
    # A part of the head is not enough for the embedding: that is read from the files.
    part = [holder(0, "w1", "n1", Holding(3, LAYERS, 2, 1))]
    moves = weight_moves(shards, Holding(0, 1, 1, 0), "w0", "n0", part)
    assert [m.link for m in moves if m.tensor == "model.embed_tokens.weight"] == [
        LinkKind.CHECKPOINT
    ]


# ------------------------------------------------------------------------------------------ KV


@st.composite
def replicas(draw: st.DrawFn, shards: ShardMap, epoch: int, workers: str) -> object:
    count = draw(st.integers(1, 3))
    cuts = draw(
        st.lists(st.integers(1, LAYERS - 1), min_size=count - 1, max_size=count - 1, unique=True)
    )
    ends = [0, *sorted(cuts), LAYERS]
    most = min(3, shards.info.num_kv_heads)
    stages = [(draw(st.integers(1, most)), ends[i], ends[i + 1]) for i in range(count)]
    size = sum(tp for tp, _, _ in stages)
    names = draw(st.permutations([f"n{i % 4}/{i // 4}" for i in range(12)]))[:size]
    return at(epoch, 0, replica(*stages), names)


@given(KINDS, st.data())
def test_pulls_give_every_new_owner_each_of_its_pages_once(kind: str, data: st.DataObject) -> None:
    shards = shard_map(kind)
    old = data.draw(replicas(shards, 1, "w"))
    new = data.draw(replicas(shards, 2, "w"))
    pairs = [(7, 0), (3, 5)]
    pulls = kv_pulls(shards, old, new, pairs, first_ticket=40)  # type: ignore[arg-type]
    assert [p.message.ticket for p in pulls] == list(range(40, 40 + len(pulls)))
    had = {
        s.worker: shards.kv_box(h)
        for s, h in zip(old.seats, old.holdings, strict=True)  # type: ignore[attr-defined]
    }
    filled: dict[str, Counter[tuple[int, int, int]]] = defaultdict(Counter)
    for pull in pulls:
        message = pull.message
        assert message.epoch == 2
        assert message.source.epoch == 1
        box = had[message.source.worker]
        for layer in range(*message.layers):
            for head in range(*message.heads):
                assert box.layers[0] <= layer < box.layers[1]
                assert box.heads[0] <= head < box.heads[1]
                filled[pull.to].update((layer, head, own) for _, own in message.pairs)
        pages = (message.layers[1] - message.layers[0]) * (message.heads[1] - message.heads[0])
        same = message.source.worker == pull.to
        assert pull.nbytes == (0 if same else pages * 2 * shards.page_bytes)
        assert (pull.link is LinkKind.HELD) == same
    for seat, held in zip(new.seats, new.holdings, strict=True):  # type: ignore[attr-defined]
        box = shards.kv_box(held)
        wanted = {
            (layer, head, block): 1
            for layer in range(*box.layers)
            for head in range(*box.heads)
            for block in (0, 5)
        }
        assert filled[seat.worker] == wanted


def test_a_replica_that_lost_a_member_cannot_be_moved() -> None:
    one = at(1, 0, replica((1, 0, 3), (1, 3, 6)), ["a/0", "b/0"])
    assert movable(one, {"c/0"})
    assert not movable(one, {"b/0"})


def test_no_blocks_no_messages() -> None:
    one = at(1, 0, replica((1, 0, 6)), ["a/0"])
    two = at(2, 0, replica((1, 0, 6)), ["b/0"])
    assert kv_pulls(shard_map(), one, two, [], first_ticket=1) == ()


@given(placed_gears("old"), placed_gears("new"))
def test_gears_of_the_strategy_can_be_placed(
    old: tuple[object, object], new: tuple[object, object]
) -> None:
    for gear, nodes in (old, new):
        placed = place(gear, nodes)  # type: ignore[arg-type]
        assert len(in_place(gear, placed.slots, 1)) == len(gear.replicas)  # type: ignore
