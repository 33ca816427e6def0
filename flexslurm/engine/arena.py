"""One flat range of bytes per GPU that holds weights and KV pages; never knows whose they are.

Weights lie at the low end, pages on a grid at the high end. The boundary between them moves: taking
weights sends the few pages in the way to other cells, and gaps that weights leave are closed by
sliding others down. Both happen only while no step runs. Figures are exact: `used_bytes` is what
was handed out, weights rounded up to the alignment.

Locking: `lock` guards the books of the arena, its page pool and everything kept in them, and is
held shortly. `gate` holds off steps while memory moves. The gate comes first: nobody who holds the
lock, or is in a step, waits for it.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from flexslurm.engine.host_pages import populate
from flexslurm.engine.page_pool import PagePool, PageShape
from flexslurm.engine.room import Slide, WeightRange, best_run, gaps, slides
from flexslurm.engine.step_gate import StepGate
from flexslurm.engine.weight_store import WeightStore
from flexslurm.errors import CapacityError
from flexslurm.planner.model_spec import ALIGNMENT_BYTES, aligned

_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
_GATE_S = 10.0
"""A step that takes longer hangs, and so would whoever waits for it."""
_SETTLE_BYTES = 256 << 20
_COPY_BYTES = 32 << 20


class Extent:
    """Bytes that weights have, `nbytes` of them from `start + head` on; a slide changes all."""

    __slots__ = ("head", "moved", "nbytes", "pins", "size", "start")

    def __init__(self, start: int, nbytes: int, head: int = 0) -> None:
        self.start, self.head, self.nbytes = start, head, nbytes
        self.size = aligned(head + nbytes)
        self.pins = 0
        """While there are any, they stay in place."""
        self.moved: Callable[[], None] | None = None
        """Called after a slide, with the lock held and no step running."""

    @property
    def stop(self) -> int:
        return self.start + self.size

    @property
    def data_start(self) -> int:
        return self.start + self.head


class Arena:
    """A GPU's memory budget.

    Invariants: extents never overlap, start and stop on the alignment, and lie inside
    `[0, total_bytes)`; no page in use lies where an extent is. Memory that was never written is not
    resident on CPU; on CUDA the whole range is taken from the driver at once, which is the point.
    """

    def __init__(self, size_bytes: int, device: torch.device | str = "cpu") -> None:
        assert size_bytes > 0
        self.device = torch.device(device)
        self.total_bytes = size_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        self.lock = threading.RLock()
        self.gate = StepGate()
        self.pages: PagePool | None = None
        self.weights = WeightStore(self)
        self._extents: list[Extent] = []
        self._weights_bytes = 0
        self._map: mmap.mmap | None = None
        if self.device.type == "cpu":
            # Not reserved, so that a virtual GPU may have more memory than this machine.
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
            self._map = mmap.mmap(-1, self.total_bytes, flags=flags)
            self.data = torch.frombuffer(self._map, dtype=torch.uint8)
        else:
            self.data = torch.empty(self.total_bytes, dtype=torch.uint8, device=self.device)

    @property
    def used_bytes(self) -> int:
        with self.lock:
            return self._weights_bytes + (0 if self.pages is None else self.pages.used_bytes)

    @property
    def free_bytes(self) -> int:
        return self.total_bytes - self.used_bytes

    @property
    def weights_bytes(self) -> int:
        """What extents have."""
        return self._weights_bytes

    def memory(self) -> memoryview:
        """All bytes; of an arena on CPU."""
        assert self._map is not None
        return memoryview(self._map)

    # ------------------------------------------------------------------------- weights

    def take(self, nbytes: int, what: str) -> Extent:
        """Room for weights as low as there is; contents are undefined.

        No bytes have no place. Raises CapacityError that says what did not fit and by how many
        bytes, and DeadlineExceeded where pages are in the way and a step does not end.
        """
        if not nbytes:
            return Extent(0, 0)
        size = aligned(nbytes)
        with self.lock:
            start = self._run(size)
            if start is not None and self._in_the_way(start, start + size) == 0:
                return self._claim(start, nbytes)
            if size > self.free_bytes:
                raise self._overflow(size, what)
        with self._still():
            start = self._run(size)
            if start is None and size <= self.free_bytes and self._slide(float("inf")):
                start = self._run(size)
            if start is None:
                raise self._overflow(size, what)
            with self._cleared([(start, start + size)]):
                return self._claim(start, nbytes)

    def free(self, extents: Sequence[Extent]) -> int:
        """Forget weights that nobody has pinned; the bytes that are free by that."""
        with self.lock:
            assert not any(extent.pins for extent in extents)
            gone = {id(extent) for extent in extents}
            self._extents = [one for one in self._extents if id(one) not in gone]
            freed = sum(extent.size for extent in extents)
            self._weights_bytes -= freed
            self._rebar()
        return freed

    def cut(self, extent: Extent, parts: Sequence[tuple[int, int]]) -> list[Extent]:
        """Keep ranges `[lo, hi)` of an extent's bytes, rising, each as an extent of its own.

        None is empty, and no two of them share a unit of the alignment. Pages may lie in what is
        not kept after the next `free`, which many cuts may share.
        """
        with self.lock:
            assert not extent.pins
            self._extents.remove(extent)
            kept = []
            for lo, hi in parts:
                assert lo < hi, f"[{lo},{hi}) has no bytes"
                head = (extent.head + lo) % ALIGNMENT_BYTES
                kept.append(Extent(extent.data_start + lo - head, hi - lo, head))
                insort(self._extents, kept[-1], key=_start)
            self._weights_bytes -= extent.size - sum(part.size for part in kept)
        return kept

    def bytes_of(self, extent: Extent) -> torch.Tensor:
        """The bytes of an extent where it is now, uint8."""
        return self.data[extent.data_start : extent.data_start + extent.nbytes]

    def _claim(self, start: int, nbytes: int) -> Extent:
        extent = Extent(start, nbytes)
        insort(self._extents, extent, key=_start)
        self._weights_bytes += extent.size
        if self.pages is not None:
            self.pages.bar(extent.start, extent.stop)
        return extent

    # --------------------------------------------------------------------------- pages

    def page_pool(self, shape: PageShape) -> PagePool:
        """The pool of pages of this shape; raises CapacityError while others are in use."""
        with self.lock:
            if self.pages is None or (self.pages.shape != shape and not self.pages.tables):
                self.pages = PagePool(shape, self.total_bytes, self._ranges)
            if self.pages.shape != shape:
                raise CapacityError(
                    f"the arena has pages of {self.pages.page_bytes} bytes and cannot have others "
                    f"of {shape.nbytes} beside them: {shape}, {self.pages.shape}"
                )
            return self.pages

    def make_room(self, count: int) -> None:
        """See that so many pages can be taken, sliding weights together; holds off steps.

        Somebody else may take them first: take them under the lock, and else come again. Raises
        CapacityError where bytes are short, and DeadlineExceeded where a step does not end.
        """
        with self._still():
            assert self.pages is not None
            while not self.pages.has(count):
                size = count * self.pages.page_bytes
                if size > self.free_bytes or not self._slide(float("inf")):
                    raise self._overflow(size, f"{count} more KV pages")

    def page_rows(self) -> torch.Tensor:
        """All cells of the grid: `[cells, page_bytes]`, uint8."""
        assert self.pages is not None
        return self.data[self.pages.base :].view(self.pages.count, self.pages.page_bytes)

    # -------------------------------------------------------------------------- moving

    def tidy(self, most_bytes: int) -> bool:
        """Slide some weights down, holding off steps meanwhile; whether there was anything to do.

        Raises DeadlineExceeded where a step does not end.
        """
        with self.lock:
            if not slides(self._placed(), most_bytes):
                return False
        with self._still():
            return self._slide(most_bytes)

    def _slide(self, most_bytes: float) -> bool:
        """Close gaps, if the pages in the way find room elsewhere."""
        plan = slides(self._placed(), most_bytes)
        runs = [(s.start, s.start + aligned(self._extents[s.number].nbytes)) for s in plan]
        if not plan or not self._can_move(runs, plan):
            return False
        with self._cleared(runs):
            moved = self._shift(plan)
        for extent in moved:
            if extent.moved is not None:
                extent.moved()
        return True

    def _can_move(self, runs: list[tuple[int, int]], plan: list[Slide]) -> bool:
        if self.pages is None:
            return True
        cells = self.pages.in_use(self.pages.span(*run) for run in runs)
        if self.pages.pinned(cells):
            return False
        moving = {slide.number for slide in plan}
        stay = [run for i, run in enumerate(self._ranges()) if i not in moving]
        barred = [self.pages.span(*run) for run in (*stay, *runs)]
        return self.pages.has_beside(barred, len(cells))

    @contextmanager
    def _still(self) -> Iterator[None]:
        """No step runs, and what is copied meanwhile is there for the next one.

        Raises DeadlineExceeded where a step does not end.
        """
        with self.gate.closed(_GATE_S), self.lock:
            if self.device.type != "cuda":
                yield
                return
            # Steps compute on the default stream, and leave the gate before that has ended.
            stream = torch.cuda.default_stream(self.device)
            with torch.cuda.stream(stream):
                yield
            stream.synchronize()

    @contextmanager
    def _cleared(self, runs: Sequence[tuple[int, int]]) -> Iterator[None]:
        """Lift the pages out of ranges of bytes; once the body has barred these, they land."""
        pages = self.pages
        cells = None if pages is None else pages.in_use(pages.span(*run) for run in runs)
        if pages is None or cells is None or not cells.size:
            yield
            return
        rows = self.page_rows()
        kept = rows.index_select(0, torch.from_numpy(cells).to(self.device))
        counts = pages.lift(cells)
        yield
        target = pages.land(cells, counts)
        rows.index_copy_(0, torch.from_numpy(target).to(self.device), kept)

    def _shift(self, plan: Sequence[Slide]) -> list[Extent]:
        moved = [(self._extents[slide.number], slide.start) for slide in plan]
        for extent, start in moved:
            self._copy_down(extent.data_start, start, extent.nbytes)
            before = extent.size
            extent.start, extent.head, extent.size = start, 0, aligned(extent.nbytes)
            self._weights_bytes -= before - extent.size
        self._rebar()
        return [extent for extent, _ in moved]

    def _copy_down(self, source: int, target: int, size: int) -> None:
        """Copy bytes to a lower place that may overlap."""
        if self._map is not None:
            first = self.data.data_ptr()
            ctypes.memmove(first + target, first + source, size)
            return
        for at in range(0, size, _COPY_BYTES):
            count = min(_COPY_BYTES, size - at)
            piece = self.data[source + at : source + at + count].clone()
            self.data[target + at : target + at + count].copy_(piece)

    # -------------------------------------------------------------------------- books

    def _placed(self) -> list[WeightRange]:
        return [
            WeightRange(one.start, one.stop, not one.pins, aligned(one.nbytes))
            for one in self._extents
        ]

    def _ranges(self) -> list[tuple[int, int]]:
        return [(one.start, one.stop) for one in self._extents]

    def _rebar(self) -> None:
        if self.pages is not None:
            self.pages.rebar()

    def _run(self, size: int) -> int | None:
        return best_run(self._placed(), self.total_bytes, size, self._in_the_way)

    def _in_the_way(self, start: int, stop: int) -> int | None:
        """Pages in a range of bytes; None where they cannot go elsewhere."""
        if self.pages is None:
            return 0
        cells = self.pages.in_use([self.pages.span(start, stop)])
        if cells.size:
            barred = [self.pages.span(*one) for one in (*self._ranges(), (start, stop))]
            if self.pages.pinned(cells) or not self.pages.has_beside(barred, len(cells)):
                return None
        return len(cells)

    def _overflow(self, size: int, what: str) -> CapacityError:
        used = self.used_bytes
        free = self.total_bytes - used
        if size > free:
            return CapacityError(
                f"the arena of {self.total_bytes} bytes is {size - free} bytes short: "
                f"{what} takes {size}, {used} are in use"
            )
        return CapacityError(
            f"the arena of {self.total_bytes} bytes has no room in one piece for {what}, which "
            f"takes {size}: {free} are free, but what lies between is being sent or filled"
        )

    def warm(self, nbytes: int) -> None:
        """Have the system's pages for so much of what is free of weights, lowest first; on CPU."""
        if self._map is None:
            return
        with self.lock:
            free, first = gaps(self._placed(), self.total_bytes), self.data.data_ptr()
        for lo, hi in free:
            populate(first + lo, min(hi - lo, nbytes))
            nbytes -= min(hi - lo, nbytes)

    def settle(self) -> None:
        """Give memory that is free back to the system, in pieces; on CPU only."""
        if self._map is None:
            return
        with self.lock:
            free = gaps(self._placed(), self.total_bytes)
        for lo, hi in free:
            for start in range(lo, hi, _SETTLE_BYTES):
                with self.lock:
                    self._give_back(start, min(start + _SETTLE_BYTES, hi))

    def _give_back(self, start: int, stop: int) -> None:
        """What is free in a range of bytes, whole pages of the system only."""
        taken = [(one.start, one.stop) for one in self._extents if one.stop > start]
        if self.pages is not None:
            cells = self.pages.in_use([self.pages.span(start, stop)])
            taken += [(self.pages.start(c), self.pages.start(c + 1)) for c in cells.tolist()]
        at = start
        for lo, hi in (*sorted(taken), (stop, stop)):
            first = -(-at // mmap.PAGESIZE) * mmap.PAGESIZE
            last = min(lo, stop) // mmap.PAGESIZE * mmap.PAGESIZE
            if last > first and self._map is not None:
                self._map.madvise(mmap.MADV_DONTNEED, first, last - first)
            at = max(at, hi)
            if at >= stop:
                break

    def close(self) -> None:
        """Forget everything; the memory goes when the last tensor over it does."""
        with self.lock:
            self._extents.clear()
            self._weights_bytes = 0
            self.pages = None
            self._give_back(0, self.total_bytes)
        self.data = torch.empty(0, dtype=torch.uint8)
        self._map = None

    def check_integrity(self) -> None:
        """Assert the invariants; cheap enough to run whenever a worker is idle."""
        with self.lock:
            at = 0
            for one in self._extents:
                assert one.start >= at, f"[{one.start},{one.stop}) overlaps what ends at {at}"
                assert one.start % ALIGNMENT_BYTES == one.stop % ALIGNMENT_BYTES == 0
                assert one.pins >= 0
                at = one.stop
            assert at <= self.total_bytes
            assert self._weights_bytes == sum(one.size for one in self._extents)
            if self.pages is not None:
                self.pages.check_integrity(table.held() for table in self.pages.tables)


def _start(extent: Extent) -> int:
    return extent.start
