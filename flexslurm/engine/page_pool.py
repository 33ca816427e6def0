"""Which pages of a GPU's arena are in use, by how many tables; never reads or writes a page.

Pages lie on a grid that ends at the arena's end. A cell of the grid is usable where no weights are.
The highest free cells are given out first, so that pages and weights stay apart. A page may be in
tables several times (`add`), and is free when it is in none and nobody is sending or receiving it
(`pin`). Every method is called under the arena's lock.

The books cover the upper part of the grid and grow downwards as cells are wanted, so that a large
arena with few pages costs little. In them cells are counted from the top: "depth".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Cells = NDArray[np.int64]
"""Numbers of cells, `[n]`."""

_FIRST_CELLS = 1024


@dataclass(frozen=True, slots=True)
class PageShape:
    """One page: keys and values of one KV head of one layer for one block of tokens."""

    block_tokens: int
    head_dim: int
    item_bytes: int

    @property
    def nbytes(self) -> int:
        return 2 * self.block_tokens * self.head_dim * self.item_bytes


class Table(Protocol):
    """What holds pages, and must be told where they go."""

    def held(self) -> Cells:
        """All its pages."""
        ...

    def renumber(self, old: Cells, new: Cells) -> None:
        """Page `old[i]`, rising, lies in cell `new[i]` now."""
        ...


class PagePool:
    """The cells of one arena.

    Invariants: a cell that weights reach into has no references and no pins; `used` cells have at
    least one of them; `shared` counts the cells with several references.
    """

    def __init__(
        self, shape: PageShape, total_bytes: int, weights: Callable[[], Iterable[tuple[int, int]]]
    ) -> None:
        """`weights` gives the ranges of bytes of the arena that are not for pages."""
        self.shape = shape
        self.page_bytes = shape.nbytes
        self.count = total_bytes // self.page_bytes
        self.base = total_bytes - self.count * self.page_bytes
        """Offset in the arena of cell 0."""
        self.used = 0
        self.shared = 0
        self.tables: list[Table] = []
        self._weights = weights
        self._references = np.zeros(0, np.int32)
        self._pins = np.zeros(0, np.int32)
        self._barred = np.zeros(0, np.bool_)
        self._stack = np.zeros(0, np.int64)
        """Depths of free cells, valid in `[0, _top)`."""
        self._top = 0
        self._stale = False
        """The stack misses what weights gave back or took."""
        self._grow(_FIRST_CELLS)

    @property
    def used_bytes(self) -> int:
        return self.used * self.page_bytes

    def span(self, start: int, stop: int) -> tuple[int, int]:
        """The cells `[first, last)` that the arena's bytes `[start, stop)` reach into."""
        if stop <= max(start, self.base):
            return 0, 0
        first = max(start - self.base, 0) // self.page_bytes
        return first, -((self.base - stop) // self.page_bytes)

    def start(self, cell: int) -> int:
        """Offset of a cell in the arena."""
        return self.base + cell * self.page_bytes

    # ------------------------------------------------------------------------- in and out

    def has(self, count: int) -> bool:
        """Whether so many cells can be taken."""
        self._restack()
        while self._top < count and len(self._pins) < self.count:
            self._grow(2 * len(self._pins))
        return count <= self._top

    def take(self, count: int) -> Cells:
        """So many free cells, each with one reference; the pool must have them."""
        assert self.has(count), f"{count} pages of {self._top}"
        self._top -= count
        depths = self._stack[self._top : self._top + count].copy()
        self._references[depths] = 1
        self.used += count
        return self._turned(depths)

    def add(self, cells: Cells) -> None:
        """A table has these pages, once more for each time they are named."""
        depths, times = np.unique(self._turned(cells), return_counts=True)
        before = self._references[depths]
        assert (before > 0).all(), "only a page that is in use can be shared"
        self._references[depths] = before + times
        self.shared += int((before == 1).sum())

    def drop(self, cells: Cells) -> int:
        """A table has these pages no more, once for each time; how many are free by that."""
        depths = self._turned(cells)
        times: NDArray[np.int64] | int = 1
        if self.shared:  # else none of them can be named twice
            depths, times = np.unique(depths, return_counts=True)
        before = self._references[depths]
        after = before - times
        assert (after >= 0).all(), "a page was dropped more often than it was held"
        self._references[depths] = after
        self.shared -= int(((before > 1) & (after <= 1)).sum())
        return self._give_back(depths[after == 0])

    def is_shared(self, cells: Cells) -> NDArray[np.bool_]:
        """Which of them are in a table elsewhere too."""
        return self._references[self._turned(cells)] > 1

    def pin(self, cells: Cells) -> None:
        """Keep pages, each named once, in their places and their contents in them."""
        self._pins[self._turned(cells)] += 1

    def unpin(self, cells: Cells) -> None:
        depths = self._turned(cells)
        self._pins[depths] -= 1
        self._give_back(depths[self._references[depths] == 0])

    def _turned(self, numbers: Cells) -> Cells:
        """Cells as depths, and depths as cells."""
        return (self.count - 1) - numbers

    def _give_back(self, dropped: Cells) -> int:
        free = dropped[self._pins[dropped] == 0]
        count = len(free)
        self.used -= count
        if not self._stale:
            self._stack[self._top : self._top + count] = free
            self._top += count
        return count

    def _restack(self) -> None:
        if self._stale:
            found = np.flatnonzero((self._references == 0) & (self._pins == 0) & ~self._barred)
            self._top = len(found)
            self._stack[: self._top] = found[::-1]  # the least deep ones on top
            self._stale = False

    def _grow(self, cells: int) -> None:
        """Keep books of so many cells."""
        size = min(cells, self.count)
        more = size - len(self._pins)
        self._references = np.concatenate([self._references, np.zeros(more, np.int32)])
        self._pins = np.concatenate([self._pins, np.zeros(more, np.int32)])
        self._barred = np.zeros(size, np.bool_)
        self._stack = np.zeros(size, np.int64)
        self.rebar()
        self._restack()

    # ------------------------------------------------------------------- beside the weights

    def bar(self, start: int, stop: int) -> None:
        """Weights took the arena's bytes `[start, stop)`; no page there is in use."""
        near, far = self._depths(*self.span(start, stop))
        if near < far:
            assert not self._busy(near, far).any()
            self._barred[near:far] = True
            self._stale = True

    def rebar(self) -> None:
        """Weights went or moved."""
        self._barred[:] = False
        self._stale = True
        for start, stop in self._weights():
            self.bar(start, stop)

    def in_use(self, ranges: Iterable[tuple[int, int]]) -> Cells:
        """The cells in ranges `[first, last)` with pages that are held or pinned; rising."""
        found = []
        for first, last in ranges:
            near, far = self._depths(first, last)
            found.append(self._turned(np.flatnonzero(self._busy(near, far)) + near))
        return np.unique(np.concatenate(found)) if found else np.zeros(0, np.int64)

    def pinned(self, cells: Cells) -> bool:
        """Whether any of them is."""
        return bool(self._pins[self._turned(cells)].any())

    def has_beside(self, ranges: list[tuple[int, int]], count: int) -> bool:
        """Whether so many cells could be taken, were these ranges of cells (and no more) barred."""
        while True:
            free = ~self._busy(0, len(self._pins))
            for first, last in ranges:
                near, far = self._depths(first, last)
                free[near:far] = False
            if int(free.sum()) >= count:
                return True
            if len(self._pins) == self.count:
                return False
            self._grow(2 * len(self._pins))

    def lift(self, cells: Cells) -> NDArray[np.int32]:
        """Take pages, none of them pinned, out of their cells; `land` must follow."""
        assert not self.pinned(cells)
        depths = self._turned(cells)
        counts = self._references[depths]
        self._references[depths] = 0
        self.used -= len(cells)
        self._stale = True
        return counts

    def land(self, cells: Cells, counts: NDArray[np.int32]) -> Cells:
        """Give lifted pages, rising, new cells and tell all tables; the cells, in that order.

        Whoever calls it copies the bytes.
        """
        target = self.take(len(cells))
        self._references[self._turned(target)] = counts
        for table in self.tables:
            table.renumber(cells, target)
        return target

    def _depths(self, first: int, last: int) -> tuple[int, int]:
        """A range of cells as a range of depths, cut to what the books cover."""
        size = len(self._pins)
        return min(self.count - last, size), min(self.count - first, size)

    def _busy(self, near: int, far: int) -> NDArray[np.bool_]:
        return (self._references[near:far] > 0) | (self._pins[near:far] > 0)

    def check_integrity(self, tables: Iterable[Cells]) -> None:
        """Assert the invariants against the pages of all tables."""
        counts = np.zeros(len(self._pins), np.int64)
        for cells in tables:
            np.add.at(counts, self._turned(cells), 1)
        assert (counts == self._references).all(), "tables and references do not agree"
        assert (self._pins >= 0).all()
        busy = (counts > 0) | (self._pins > 0)
        assert self.used == int(busy.sum()), f"{self.used} pages in use, {busy.sum()} found"
        assert self.shared == int((counts > 1).sum())
        assert not (busy & self._barred).any(), "pages where weights are"
        self._restack()
        assert np.array_equal(
            np.sort(self._stack[: self._top]), np.flatnonzero(~busy & ~self._barred)
        )
