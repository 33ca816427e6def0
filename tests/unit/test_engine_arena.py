"""The arena: exact figures, two ends, a boundary that moves, errors that say by how much."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexslurm.engine.arena import Arena, Extent
from flexslurm.engine.host_pages import populate
from flexslurm.engine.page_pool import Cells, PageShape
from flexslurm.errors import CapacityError
from flexslurm.planner.model_spec import ALIGNMENT_BYTES, aligned

A = ALIGNMENT_BYTES
PAGE = PageShape(block_tokens=4, head_dim=4, item_bytes=8)
assert PAGE.nbytes == A


@pytest.fixture
def arena() -> Iterator[Arena]:
    one = Arena(16 * A)
    yield one
    one.check_integrity()
    one.close()


class Pages:
    """A table as an epoch has it: pages in an order that somebody reads them in."""

    def __init__(self, arena: Arena, shape: PageShape = PAGE) -> None:
        self.arena, self.pool = arena, arena.page_pool(shape)
        self.cells = np.zeros(0, np.int64)
        self.pool.tables.append(self)

    def take(self, count: int) -> None:
        while True:
            with self.arena.lock:
                if self.pool.has(count):
                    first = len(self.cells)
                    self.cells = np.concatenate([self.cells, self.pool.take(count)])
                    rows = self.arena.page_rows()
                    for at in range(first, len(self.cells)):
                        rows[self.cells[at]] = at % 251
                    return
            self.arena.make_room(count)

    def drop(self, which: list[int]) -> None:
        gone = np.isin(np.arange(len(self.cells)), which)
        self.pool.drop(self.cells[gone])
        self.arena.page_rows()[self.cells[gone]] = 255
        self.cells = self.cells[~gone]
        rows = self.arena.page_rows()
        for at, cell in enumerate(self.cells):
            rows[cell] = at % 251

    def held(self) -> Cells:
        return self.cells

    def renumber(self, old: Cells, new: Cells) -> None:
        at = dict(zip(old.tolist(), new.tolist(), strict=True))
        self.cells = np.array([at.get(cell, cell) for cell in self.cells.tolist()], np.int64)

    def right(self) -> bool:
        rows = self.arena.page_rows()[torch.from_numpy(self.cells)]
        return all((rows[at] == at % 251).all() for at in range(len(rows)))


def test_weights_come_from_below_and_pages_from_above(arena: Arena) -> None:
    low, more = arena.take(A + 1, "w"), arena.take(5, "w")
    pages = Pages(arena)
    pages.take(2)
    assert (low.start, low.stop, more.start) == (0, 2 * A, 2 * A)
    assert sorted(pages.cells.tolist()) == [14, 15]
    assert (len(arena.bytes_of(low)), len(arena.bytes_of(more))) == (A + 1, 5)
    assert arena.used_bytes == 5 * A
    assert arena.weights_bytes == 3 * A
    assert arena.free_bytes == 11 * A


def test_freed_room_is_used_again(arena: Arena) -> None:
    first, second = arena.take(3 * A, "w"), arena.take(2 * A, "w")
    assert arena.free([first]) == 3 * A
    assert arena.take(3 * A, "w").start == 0
    assert second.start == 3 * A
    assert arena.take(2 * A, "w").start == 5 * A


def test_what_does_not_fit_the_hole_goes_beyond(arena: Arena) -> None:
    first = arena.take(2 * A, "w")
    arena.take(2 * A, "w")
    arena.free([first])
    assert arena.take(3 * A, "w").start == 4 * A


def test_the_boundary_moves_and_takes_pages_along(arena: Arena) -> None:
    pages = Pages(arena)
    pages.take(10)
    pages.drop([7, 8, 9])  # the highest: what is left lies below them
    weights = arena.take(9 * A, "w")
    assert (weights.start, weights.stop) == (0, 9 * A)
    assert sorted(pages.cells.tolist()) == list(range(9, 16))
    assert pages.right()
    assert arena.free_bytes == 0


def test_pages_that_are_being_sent_stay(arena: Arena) -> None:
    pages = Pages(arena)
    pages.take(6)
    pages.drop([2, 3, 4, 5])  # the highest
    pages.pool.pin(pages.cells[:1])
    with pytest.raises(CapacityError, match="no room in one piece"):
        arena.take(14 * A, "w")
    assert pages.right()
    pages.pool.unpin(pages.cells[:1])
    assert arena.take(14 * A, "w").start == 0
    assert pages.right()


def test_gaps_between_weights_are_closed_for_weights(arena: Arena) -> None:
    taken = [arena.take(2 * A, "w") for _ in range(6)]
    for number, extent in enumerate(taken):
        arena.bytes_of(extent).fill_(number)
    told: list[int] = []
    for number, extent in enumerate(taken):
        extent.moved = lambda number=number: told.append(number)  # type: ignore[misc]
    arena.free([taken[0], taken[2], taken[4]])
    assert arena.take(10 * A, "w").start == 6 * A
    assert told == [1, 3, 5]
    assert [taken[n].start for n in (1, 3, 5)] == [0, 2 * A, 4 * A]
    assert all((arena.bytes_of(taken[n]) == n).all() for n in (1, 3, 5))
    assert arena.free_bytes == 0


def test_gaps_between_weights_are_closed_for_pages(arena: Arena) -> None:
    """Pages of two and a half units: what weights leave would be lost in splinters."""
    shape = PageShape(block_tokens=5, head_dim=8, item_bytes=8)
    assert shape.nbytes == 2.5 * A
    taken = [arena.take(A, "w") for _ in range(8)]
    for number, extent in enumerate(taken):
        arena.bytes_of(extent).fill_(number)
    arena.free(taken[::2])
    pages = Pages(arena, shape)
    pages.take(4)  # of the twelve units that are free, with weights all over the lower half
    assert arena.used_bytes == 14 * A
    assert all((arena.bytes_of(taken[n]) == n).all() for n in (1, 3, 5, 7))
    assert pages.right()
    with pytest.raises(CapacityError, match=f"{A // 2} bytes short: 1 more KV pages"):
        pages.take(1)


def test_weights_that_are_being_filled_stay(arena: Arena) -> None:
    first, second = arena.take(4 * A, "w"), arena.take(4 * A, "w")
    arena.free([first])
    second.pins += 1
    with pytest.raises(CapacityError, match="no room in one piece"):
        arena.take(9 * A, "w")
    assert arena.take(8 * A, "w").start == 8 * A
    assert not arena.tidy(1 << 20)
    second.pins -= 1
    assert arena.tidy(1 << 20)
    assert second.start == 0


def test_parts_that_are_kept_lose_their_slack_when_they_move(arena: Arena) -> None:
    extent = arena.take(6 * A, "w")
    arena.bytes_of(extent).copy_(torch.arange(6 * A) % 256)
    one, two = arena.cut(extent, [(A - 10, A + 40), (4 * A + 3, 5 * A)])
    arena.free([])
    assert [(part.start, part.stop, part.head) for part in (one, two)] == [
        (0, 2 * A, A - 10), (4 * A, 5 * A, 3),
    ]  # fmt: skip
    assert arena.used_bytes == 3 * A
    while arena.tidy(1):
        arena.check_integrity()
    assert [(part.start, part.stop, part.head) for part in (one, two)] == [
        (0, A, 0), (A, 2 * A, 0),
    ]  # fmt: skip
    assert arena.used_bytes == 2 * A
    assert arena.bytes_of(one).tolist() == [n % 256 for n in range(A - 10, A + 40)]
    assert arena.bytes_of(two).tolist() == [n % 256 for n in range(4 * A + 3, 5 * A)]


def test_overflow_says_what_and_by_how_much(arena: Arena) -> None:
    weights = arena.take(10 * A, "w")
    pages = Pages(arena)
    with pytest.raises(CapacityError, match=rf"{A} bytes short: 7 more KV pages takes {7 * A}"):
        pages.take(7)
    assert arena.used_bytes == 10 * A
    pages.take(6)
    assert arena.free_bytes == 0
    with pytest.raises(CapacityError, match=f"{A} bytes short: w takes {A}"):
        arena.take(1, "w")
    arena.free([weights])


def test_pages_of_two_sizes_do_not_mix(arena: Arena) -> None:
    pages = Pages(arena)
    with pytest.raises(CapacityError, match=f"pages of {A} bytes .* others of {A // 2}"):
        arena.page_pool(PageShape(2, 4, 8))
    pages.pool.tables.clear()
    assert arena.page_pool(PageShape(2, 4, 8)).count == 32


def test_the_size_is_rounded_down_to_the_alignment() -> None:
    arena = Arena(3 * A + 100)
    assert arena.total_bytes == 3 * A
    arena.take(3 * A, "w")
    with pytest.raises(CapacityError):
        arena.take(1, "w")
    arena.close()


def test_nothing_takes_nothing(arena: Arena) -> None:
    assert arena.bytes_of(arena.take(0, "an empty slice")).numel() == 0
    assert arena.used_bytes == 0


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def test_only_what_is_written_is_resident_and_settling_gives_it_back() -> None:
    """An arena far beyond this machine's memory costs nothing until it is used."""
    arena = Arena(1 << 40)
    before = resident_bytes()
    mine = arena.take(64 << 20, "w")
    pages = Pages(arena, PageShape(256, 128, 2))
    pages.take(64)
    assert resident_bytes() - before < 16 << 20
    arena.bytes_of(mine).fill_(1)
    assert 60 << 20 < resident_bytes() - before < 90 << 20
    arena.free([mine])
    arena.settle()
    assert resident_bytes() - before < 16 << 20
    assert pages.right()
    arena.close()


def test_threads_never_get_the_same_bytes() -> None:
    arena = Arena(1 << 20)
    failures: list[str] = []

    def work(name: str) -> None:
        for turn in range(100):
            extents = [arena.take(700, "w"), arena.take(300, "w")]
            with arena.lock:
                for extent in extents:
                    extent.pins += 1
            for extent in extents:
                arena.bytes_of(extent).fill_(ord(name))
            if any((arena.bytes_of(extent) != ord(name)).any() for extent in extents):
                failures.append(f"{name}{turn}")
            with arena.lock:
                for extent in extents:
                    extent.pins -= 1
            arena.free(extents)
            arena.tidy(1 << 10)

    threads = [threading.Thread(target=work, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert arena.used_bytes == 0
    arena.close()


steps = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(0, 6 * A)),
        st.tuples(st.just("free"), st.integers(0, 5)),
        st.tuples(st.just("cut"), st.integers(0, 5)),
        st.tuples(st.just("pages"), st.integers(1, 5)),
        st.tuples(st.just("drop"), st.integers(0, 20)),
        st.tuples(st.just("tidy"), st.integers(1, 4 * A)),
    ),
    max_size=30,
)


@given(steps, st.sampled_from([PAGE, PageShape(5, 8, 8), PageShape(1, 4, 4)]))
def test_nothing_is_lost_whatever_moves(todo: list[tuple[str, int]], shape: PageShape) -> None:
    """Weights and pages keep their contents, and figures agree with a ledger."""
    arena, pages = Arena(20 * A), None
    pages = Pages(arena, shape)
    weights: list[tuple[Extent, int]] = []
    for number, (kind, value) in enumerate(todo):
        if kind == "take":
            free = arena.free_bytes
            try:
                weights.append((arena.take(value, "x"), number))
            except CapacityError:
                # A page may find no other cell; what is free as bytes is then in splinters of it.
                assert aligned(value) > free - shape.nbytes
                continue
            arena.bytes_of(weights[-1][0]).fill_(number)
        elif kind == "pages":
            free = arena.free_bytes
            try:
                pages.take(value)
            except CapacityError:
                assert value * shape.nbytes > free - shape.nbytes
        elif kind == "free" and weights:
            arena.free([weights.pop(value % len(weights))[0]])
        elif kind == "cut" and weights:
            extent, filled = weights.pop(value % len(weights))
            if extent.nbytes > 2 * A:
                parts = arena.cut(extent, [(3, A - 1 - extent.head), (2 * A, extent.nbytes)])
                arena.free([])
                weights += [(part, filled) for part in parts]
            else:
                arena.free([extent])
        elif kind == "drop":
            pages.drop([value, value + 2])
        elif kind == "tidy":
            arena.tidy(value)
        arena.check_integrity()
        for extent, filled in weights:
            assert (arena.bytes_of(extent) == filled).all()
        assert pages.right()
        used = sum(aligned(e.head + e.nbytes) for e, _ in weights) + len(pages.cells) * shape.nbytes
        assert arena.used_bytes == used
    arena.close()


def backed_bytes(arena: Arena, start: int, stop: int) -> int:
    """Of a range of an arena on CPU, what the system has pages for."""
    first = arena.data.data_ptr() + start
    count = -(-(stop - start) // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * count)()
    libc = ctypes.CDLL(None, use_errno=True)
    assert not libc.mincore(ctypes.c_void_p(first), ctypes.c_size_t(stop - start), found)
    return sum(page & 1 for page in found) * mmap.PAGESIZE


def test_free_memory_is_made_ready_from_below_and_what_is_there_stays() -> None:
    arena = Arena(32 << 20)
    extent = arena.take(4 << 20, "w")
    arena.bytes_of(extent).fill_(7)
    arena.warm(8 << 20)
    if populate(arena.data.data_ptr(), mmap.PAGESIZE):  # else the system is too old for it
        assert backed_bytes(arena, 4 << 20, 12 << 20) == 8 << 20
    assert backed_bytes(arena, 16 << 20, 32 << 20) == 0, "no more than was asked for"
    assert bool((arena.bytes_of(extent) == 7).all())
    arena.warm(1 << 40)
    arena.close()
    arena.warm(1)
