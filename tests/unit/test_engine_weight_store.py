"""Weights that several epochs use: views, what is freed, parts, moves; contents never change."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexslurm.engine.arena import Arena
from flexslurm.engine.ownership import Piece
from flexslurm.engine.weight_store import WeightStore, WeightView
from flexslurm.errors import CapacityError
from flexslurm.planner.model_spec import ALIGNMENT_BYTES, aligned

A, UNIT, SIZE = ALIGNMENT_BYTES, 40, 100


def piece(lo: int, hi: int, tensor: str = "t", dim: int = 0) -> Piece:
    return Piece(tensor, dim, lo, hi, SIZE, UNIT)


def contents(of: Piece) -> torch.Tensor:
    """What a piece must hold, wherever it lies."""
    index = torch.arange(of.lo, of.hi).repeat_interleave(UNIT)
    return ((index * 7 + hash((of.tensor, of.dim)) % 100 + index // 3) % 256).to(torch.uint8)


@pytest.fixture
def arena() -> Iterator[Arena]:
    one = Arena(64 * A)
    yield one
    one.check_integrity()
    one.weights.check_integrity()
    one.close()


def claim(store: WeightStore, owner: int, of: Piece) -> WeightView:
    view = store.claim(owner, of, "w")
    if view.fresh:
        with store.filling(view) as raw:
            raw.copy_(contents(of))
        store.filled(view)
    return view


def right(store: WeightStore, view: WeightView) -> bool:
    return torch.equal(store.bytes_of(view), contents(view.piece))


def test_what_is_here_is_not_taken_again(arena: Arena) -> None:
    store = arena.weights
    for epoch in (1, 2):
        store.open(epoch, "m float32")
    claim(store, 1, piece(0, 60))
    taken = arena.used_bytes
    view = claim(store, 2, piece(20, 50))
    assert not view.fresh
    assert arena.used_bytes == taken == aligned(60 * UNIT)
    assert right(store, view)
    assert claim(store, 2, piece(50, 70)).fresh, "part of it is not here: it is taken whole"
    assert claim(store, 2, piece(20, 50, dim=1)).fresh, "the other form is other bytes"
    assert store.release(2) == aligned(20 * UNIT) + aligned(30 * UNIT)
    assert store.release(2) == 0
    assert store.release(1) == taken


def test_models_and_unfilled_segments_are_kept_apart(arena: Arena) -> None:
    store = arena.weights
    for epoch, model in ((1, "m float32"), (2, "m float16"), (3, "m float32")):
        store.open(epoch, model)
    claim(store, 1, piece(0, 60))
    assert store.claim(2, piece(0, 60), "w").fresh
    half = store.claim(1, piece(60, 80), "w")
    assert store.claim(3, piece(60, 80), "w").fresh, "nobody has filled it yet"
    store.filled(half)
    assert store.model_of(2) == "m float16"
    assert store.model_of(9) is None
    with store.lending("m float16", "t", 0, 0, 10) as found:
        assert found is None, "not filled"
    for epoch in (1, 2, 3):
        store.release(epoch)
    assert arena.used_bytes == 0


def test_only_what_nobody_uses_is_freed(arena: Arena) -> None:
    store = arena.weights
    for epoch in (1, 2, 3):
        store.open(epoch, "m")
    whole = claim(store, 1, piece(0, 100))
    low, high = claim(store, 2, piece(10, 20)), claim(store, 3, piece(70, 90))
    assert arena.used_bytes == aligned(100 * UNIT)
    store.release(1)
    assert whole.segment.views == [low, high]
    # Each keeps the units of the alignment that it reaches into.
    spans = [(400, 800), (2800, 3600)]
    assert arena.used_bytes == sum(aligned(hi) - lo // A * A for lo, hi in spans)
    assert right(store, low)
    assert right(store, high)
    while arena.tidy(1 << 20):
        pass
    assert arena.used_bytes == aligned(10 * UNIT) + aligned(20 * UNIT)
    assert right(store, low)
    assert right(store, high)
    again = claim(store, 2, piece(75, 80))
    assert not again.fresh
    assert right(store, again)
    store.release(3)
    assert right(store, again)
    store.release(2)
    assert arena.used_bytes == 0


def test_neighbours_in_one_unit_of_the_alignment_stay_one(arena: Arena) -> None:
    store = arena.weights
    store.open(1, "m")
    store.open(2, "m")
    claim(store, 1, piece(0, 100))
    views = [
        claim(store, 2, piece(0, 2)),
        claim(store, 2, piece(4, 6)),
        claim(store, 2, piece(9, 11)),
    ]
    store.release(1)
    # Bytes [0,80) and [160,240) are in one unit, [360,440) in the next.
    assert views[0].segment is views[1].segment is not views[2].segment
    assert arena.used_bytes == 2 * A
    store.check_integrity()
    assert all(right(store, view) for view in views)
    store.release(2)


def test_what_is_lent_is_neither_freed_nor_moved(arena: Arena) -> None:
    store = arena.weights
    store.open(1, "m")
    store.open(2, "m")
    claim(store, 1, piece(0, 10, "a"))
    view = claim(store, 2, piece(0, 50))
    with store.lending("m", "t", 0, 10, 20) as found:
        assert found is not None
        segment, data = found
        store.release(1)
        assert not arena.tidy(1 << 20)
        assert store.release(2) == 0
        assert torch.equal(data, contents(view.piece))
        assert arena.used_bytes == segment.extent.size
    assert arena.used_bytes == 0
    with store.lending("m", "t", 0, 10, 20) as found:
        assert found is None


def test_views_are_told_when_they_move(arena: Arena) -> None:
    store, told = arena.weights, []
    store.open(1, "m")
    store.open(2, "m")
    claim(store, 1, piece(0, 10, "a"))
    claim(store, 2, piece(0, 50))
    view = claim(store, 2, piece(5, 9))
    view.on_move(lambda: told.append(store.bytes_of(view).data_ptr() - arena.data.data_ptr()))
    store.release(1)
    assert arena.tidy(1)
    assert told == [5 * UNIT]


def test_the_whole_of_the_other_form_can_be_lent(arena: Arena) -> None:
    store = arena.weights
    store.open(1, "m")
    claim(store, 1, piece(0, SIZE))
    with store.lending("m", "t", 1, 3, 7) as found:
        assert found is not None
        assert found[0].dim == 0
    claim(store, 1, piece(0, SIZE - 1, "cut"))
    with store.lending("m", "cut", 1, 3, 7) as found:
        assert found is None, "columns cannot be made of some rows"
    store.release(1)


ranges = st.tuples(st.integers(0, SIZE - 1), st.integers(1, SIZE)).map(
    lambda r: (min(r[0], r[1] - 1), max(r[0] + 1, r[1]))
)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("claim"), st.integers(1, 3), st.sampled_from("ab"), ranges),
        st.tuples(st.just("release"), st.integers(1, 3), st.just(""), st.just((0, 1))),
        st.tuples(st.just("tidy"), st.integers(1, 3), st.just(""), st.just((0, 1))),
    ),
    max_size=25,
)


@given(steps)
def test_any_sequence_keeps_views_right_and_frees_everything(
    todo: list[tuple[str, int, str, tuple[int, int]]],
) -> None:
    arena = Arena(100 * A)
    store = arena.weights
    views: dict[int, list[WeightView]] = {}
    for kind, owner, tensor, (lo, hi) in todo:
        if kind == "claim":
            if owner not in views:
                views[owner] = []
                store.open(owner, "m")
            try:
                views[owner].append(claim(store, owner, piece(lo, hi, tensor)))
            except CapacityError:
                assert arena.free_bytes < aligned((hi - lo) * UNIT)
        elif kind == "release" and owner in views:
            before = arena.used_bytes
            freed = store.release(owner)
            assert arena.used_bytes == before - freed
            del views[owner]
        elif kind == "tidy":
            arena.tidy(owner * A)
        arena.check_integrity()
        store.check_integrity()
        assert all(right(store, view) for held in views.values() for view in held)
        # Never more than what views reach into, each alone.
        most = sum(aligned(v.piece.nbytes) + A for held in views.values() for v in held)
        assert arena.used_bytes <= most
    for owner in views:
        store.release(owner)
    assert arena.used_bytes == 0
    arena.close()
