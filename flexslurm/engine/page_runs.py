"""KV pages of some blocks of a table as one run of bytes, to be sent or filled.

On CPU pages that are scattered over the arena are gathered first: one buffer takes a checksum and a
call to the system once, where each of many would take the interpreter from the serving thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from flexslurm.engine.arena import Arena
from flexslurm.engine.byte_runs import Landing, Port, Runs
from flexslurm.engine.kv_store import NOWHERE, KvStore
from flexslurm.engine.page_pool import Cells
from flexslurm.engine.transfer_wire import Views

Pages = NDArray[np.uint8]
"""`[pages, bytes of a page]`"""

_FEW = 4
"""So many ranges are taken as they are."""


class PageBox:
    """A part (layers, heads) of some blocks of a table, as one run: by block, layer, head."""

    def __init__(
        self, arena: Arena, store: KvStore, blocks: Sequence[int], layers: slice, heads: slice
    ) -> None:
        self._arena, self._store = arena, store
        self._blocks = np.array(blocks, np.int64)
        self._part = layers, heads
        self.page_bytes = store.page_bytes
        self.pages = (layers.stop - layers.start) * (heads.stop - heads.start)
        """Of one block."""
        self.total = len(blocks) * self.pages * self.page_bytes
        self.items = len(blocks)
        self._port = Port(arena)
        self._buffer = np.empty((0, self.page_bytes), np.uint8)

    def item(self, number: int) -> tuple[int, int]:
        size = self.pages * self.page_bytes
        return number * size, (number + 1) * size

    def upto(self, lo: int, hi: int) -> int:
        """A piece ends with a page, where it has room for one."""
        whole = hi // self.page_bytes * self.page_bytes
        return whole if whole > lo else hi

    def _cells(self, lo: int, hi: int) -> tuple[Cells, Cells]:
        """The blocks and the cells of the pages that the bytes `[lo, hi)` lie in."""
        first, last = lo // self.page_bytes, -(-hi // self.page_bytes)
        start = first // self.pages
        blocks = self._blocks[start : -(-last // self.pages)]
        cells = self._store.cells[blocks, *self._part].reshape(-1)
        skip = start * self.pages
        which = np.arange(first - skip, last - skip)
        return blocks[which // self.pages], cells[which]

    def _runs(self, cells: Cells, lo: int, hi: int) -> Runs:
        """Ranges of the arena; neighbours in the run that are neighbours there are one."""
        pool = self._arena.pages
        assert pool is not None
        ends = np.flatnonzero(np.diff(cells) != 1) + 1
        firsts = cells[np.concatenate(([0], ends))].tolist()
        counts = np.diff(np.concatenate(([0], ends, [len(cells)]))).tolist()
        runs = [
            (pool.start(first), pool.start(first + count))
            for first, count in zip(firsts, counts, strict=True)
        ]
        head, tail = lo % self.page_bytes, -hi % self.page_bytes
        runs[0] = runs[0][0] + head, runs[0][1]
        runs[-1] = runs[-1][0], runs[-1][1] - tail
        return runs

    def _scattered(self, runs: Runs) -> bool:
        return self._arena.device.type == "cpu" and len(runs) > _FEW

    def _pages(self) -> Pages:
        """All pages of the arena; on CPU."""
        found: Pages = self._arena.page_rows().numpy()
        return found

    def _staging(self, count: int) -> Pages:
        """Room for so many pages, the same each time."""
        if len(self._buffer) < count:
            self._buffer = np.empty((count, self.page_bytes), np.uint8)
        return self._buffer[:count]


class PageSource(PageBox):
    """Blocks that are sent."""

    def missing(self) -> tuple[int, ...]:
        with self._arena.lock:
            part = self._store.cells[self._blocks, *self._part]
            gone = (part == NOWHERE).any(axis=(1, 2))
        return tuple(np.flatnonzero(gone).tolist())

    @contextmanager
    def lend(self, lo: int, hi: int) -> Iterator[Views | None]:
        with self._arena.lock:
            _, cells = self._cells(lo, hi)
            here = bool((cells != NOWHERE).all())
            pool = self._arena.pages
            if here and pool is not None:
                pool.pin(cells)
                runs = self._runs(cells, lo, hi)
        if not here or pool is None:
            yield None
            return
        try:
            yield [self._gathered(cells, lo, hi)] if self._scattered(runs) else self._port.out(runs)
        finally:
            with self._arena.lock:
                pool.unpin(cells)

    def _gathered(self, cells: Cells, lo: int, hi: int) -> memoryview:
        buffer = self._staging(len(cells))
        np.take(self._pages(), cells, axis=0, out=buffer, mode="clip")
        head = lo % self.page_bytes
        return buffer.reshape(-1).data[head : head + hi - lo]


class _Scattering(Landing):
    """Whole pages that come into a buffer, and go to their cells when they are right."""

    def __init__(self, pages: Pages, cells: Cells, buffer: Pages) -> None:
        super().__init__([buffer.reshape(-1).data])
        self._pages, self._cells, self._buffer = pages, cells, buffer

    def keep(self) -> None:
        self._pages[self._cells] = self._buffer


class PageSink(PageBox):
    """Blocks that are filled: claimed before, and not freed since they were named here."""

    def __init__(
        self, arena: Arena, store: KvStore, blocks: Sequence[int], layers: slice, heads: slice
    ) -> None:
        super().__init__(arena, store, blocks, layers, heads)
        self._turns = dict(zip(blocks, store.turns[self._blocks].tolist(), strict=True))

    @contextmanager
    def into(self, lo: int, hi: int) -> Iterator[Landing]:
        """What comes for a block that was freed meanwhile goes nowhere."""
        with self._arena.lock:
            blocks, cells = self._cells(lo, hi)
            turns = self._store.turns
            now = all(turns[b] == self._turns[b] for b in dict.fromkeys(blocks.tolist()))
            pool = self._arena.pages
            if now and pool is not None:
                assert (cells != NOWHERE).all(), "blocks are claimed before they are filled"
                pool.pin(cells)
                runs = self._runs(cells, lo, hi)
        if not now or pool is None:
            yield Landing([memoryview(bytearray(hi - lo))])
            return
        whole = lo % self.page_bytes == hi % self.page_bytes == 0
        try:
            if whole and self._scattered(runs):
                yield _Scattering(self._pages(), cells, self._staging(len(cells)))
            else:
                yield self._port.into(runs)
        finally:
            with self._arena.lock:
                pool.unpin(cells)

    def current(self) -> list[int]:
        """The blocks that were not freed since."""
        with self._arena.lock:
            return [b for b, turn in self._turns.items() if self._store.turns[b] == turn]
