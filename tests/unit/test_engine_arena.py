"""The arena: exact figures, two ends, owners, laziness, and errors that say by how much."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexslurm.engine.arena import Arena
from flexslurm.engine.footprint import ALIGNMENT_BYTES, aligned
from flexslurm.errors import CapacityError

A = ALIGNMENT_BYTES


@pytest.fixture
def arena() -> Iterator[Arena]:
    one = Arena(16 * A)
    yield one
    one.check_integrity()
    one.close()


def start(arena: Arena, tensor: torch.Tensor) -> int:
    return tensor.data_ptr() - arena.data.data_ptr()


def test_weights_come_from_below_and_pages_from_above(arena: Arena) -> None:
    low, more = arena.take_low("e1", A + 1, "w"), arena.take_low("e1", 5, "w")
    high = arena.take_high("e1", 2 * A, "kv")
    assert (start(arena, low), start(arena, more), start(arena, high)) == (0, 2 * A, 14 * A)
    assert (len(low), len(more), len(high)) == (A + 1, 5, 2 * A)
    assert arena.used_bytes == arena.used_by("e1") == 5 * A
    assert arena.free_bytes == 11 * A


def test_an_epoch_is_freed_whole_and_its_room_reused(arena: Arena) -> None:
    for owner in ("e1", "e2"):
        arena.take_low(owner, 3 * A, "w")
        arena.take_high(owner, 2 * A, "kv")
    assert arena.owners() == {"e1", "e2"}
    assert arena.release("e1") == 5 * A
    assert arena.release("e1") == 0
    assert arena.used_by("e2") == arena.used_bytes == 5 * A
    assert start(arena, arena.take_low("e3", 2 * A, "w")) == 0
    assert start(arena, arena.take_high("e3", A, "kv")) == 15 * A


def test_what_does_not_fit_the_hole_goes_beyond(arena: Arena) -> None:
    arena.take_low("e1", 2 * A, "w")
    arena.take_low("e2", 2 * A, "w")
    arena.release("e1")
    assert start(arena, arena.take_low("e3", 3 * A, "w")) == 4 * A


def test_overflow_says_what_and_by_how_much(arena: Arena) -> None:
    arena.take_low("e1", 10 * A, "w")
    with pytest.raises(CapacityError, match=rf"{A} bytes short: the KV pool takes {7 * A}"):
        arena.take_high("e1", 6 * A + 1, "the KV pool")
    assert arena.used_bytes == 10 * A
    arena.take_high("e1", 6 * A, "the KV pool")
    assert arena.free_bytes == 0
    with pytest.raises(CapacityError, match=f"{A} bytes short"):
        arena.take_low("e1", 1, "w")


def test_room_in_pieces_is_told_apart_from_no_room(arena: Arena) -> None:
    arena.take_low("e1", 4 * A, "w")
    arena.take_low("e2", 8 * A, "w")
    arena.release("e1")
    with pytest.raises(CapacityError, match=rf"no run long enough.*{A} bytes short \({8 * A}"):
        arena.take_high("e3", 5 * A, "kv")


def test_the_size_is_rounded_down_to_the_alignment() -> None:
    arena = Arena(3 * A + 100)
    assert arena.total_bytes == 3 * A
    arena.take_low("e", 3 * A, "w")
    with pytest.raises(CapacityError):
        arena.take_low("e", 1, "w")
    arena.close()


def test_nothing_takes_nothing(arena: Arena) -> None:
    assert arena.take_low("e1", 0, "an empty slice").numel() == 0
    assert arena.used_bytes == 0


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def test_only_what_is_written_is_resident_and_freeing_gives_it_back() -> None:
    """An arena far beyond this machine's memory costs nothing until it is used."""
    arena = Arena(1 << 40)
    before = resident_bytes()
    mine = arena.take_low("e1", 64 << 20, "w")
    arena.take_high("e1", 512 << 30, "kv")
    assert resident_bytes() - before < 8 << 20
    mine.fill_(1)
    assert 60 << 20 < resident_bytes() - before < 80 << 20
    arena.release("e1")
    assert resident_bytes() - before < 8 << 20
    arena.close()


def test_threads_never_get_the_same_bytes() -> None:
    arena = Arena(1 << 20)
    failures: list[str] = []

    def work(name: str) -> None:
        for turn in range(200):
            owner = f"{name}{turn}"
            tensors = [arena.take_low(owner, 700, "w"), arena.take_high(owner, 300, "kv")]
            for tensor in tensors:
                tensor.fill_(ord(name))
            if any((tensor != ord(name)).any() for tensor in tensors):
                failures.append(owner)
            arena.release(owner)

    threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert arena.used_bytes == 0
    arena.close()


actions = st.lists(
    st.one_of(
        st.tuples(st.just("low"), st.sampled_from("abc"), st.integers(0, 6 * A)),
        st.tuples(st.just("high"), st.sampled_from("abc"), st.integers(0, 6 * A)),
        st.tuples(st.just("release"), st.sampled_from("abc"), st.just(0)),
    ),
    max_size=40,
)


@given(actions)
def test_figures_agree_with_a_ledger(steps: list[tuple[str, str, int]]) -> None:
    arena, ledger = Arena(20 * A), {"a": 0, "b": 0, "c": 0}
    held: dict[str, list[torch.Tensor]] = {"a": [], "b": [], "c": []}
    for number, (kind, owner, size) in enumerate(steps):
        if kind == "release":
            assert arena.release(owner) == ledger[owner]
            ledger[owner], held[owner] = 0, []
        else:
            take = arena.take_low if kind == "low" else arena.take_high
            try:
                tensor = take(owner, size, "x")
            except CapacityError:
                continue
            tensor.fill_(number)
            held[owner].append(tensor)
            ledger[owner] += aligned(size)
        arena.check_integrity()
        assert arena.used_bytes == sum(ledger.values())
        assert {o: arena.used_by(o) for o in ledger} == ledger
    everything = [tensor for tensors in held.values() for tensor in tensors if tensor.numel()]
    assert all((tensor == tensor[0]).all() for tensor in everything), "overlapping allocations"
    arena.close()
