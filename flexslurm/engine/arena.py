"""One flat range of bytes per GPU that holds weights and KV pages; never moves what it gave out.

Weights are carved from the low end, KV pages from the high end. Several epochs may be installed
at once, so every allocation has an owner and is freed by it. Figures are exact: what `used_bytes`
says is what was handed out, rounded up to the alignment of each allocation.
"""

from __future__ import annotations

import mmap
import threading
from bisect import insort
from dataclasses import dataclass

import torch

from flexslurm.engine.footprint import ALIGNMENT_BYTES, aligned
from flexslurm.errors import CapacityError

_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


@dataclass(frozen=True, slots=True, order=True)
class _Taken:
    start: int
    stop: int
    owner: str


class Arena:
    """A GPU's memory budget.

    Invariants: allocations never overlap, start and stop on the alignment, and lie inside
    `[0, total_bytes)`. Memory that was never written is not resident on CPU; on CUDA the whole
    range is taken from the driver at once, which is the point of it.

    Thread-safe: a background install takes and releases while another epoch serves.
    """

    def __init__(self, size_bytes: int, device: torch.device | str = "cpu") -> None:
        assert size_bytes > 0
        self.device = torch.device(device)
        self.total_bytes = size_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        self._lock = threading.Lock()
        self._taken: list[_Taken] = []
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
        with self._lock:
            return sum(taken.stop - taken.start for taken in self._taken)

    @property
    def free_bytes(self) -> int:
        return self.total_bytes - self.used_bytes

    def used_by(self, owner: str) -> int:
        with self._lock:
            return sum(t.stop - t.start for t in self._taken if t.owner == owner)

    def owners(self) -> frozenset[str]:
        with self._lock:
            return frozenset(taken.owner for taken in self._taken)

    def take_low(self, owner: str, nbytes: int, what: str) -> torch.Tensor:
        """The lowest free run of `nbytes`, as a uint8 tensor; contents are undefined.

        Raises CapacityError that says what did not fit and by how many bytes.
        """
        return self._take(owner, nbytes, what, low=True)

    def take_high(self, owner: str, nbytes: int, what: str) -> torch.Tensor:
        """The highest free run of `nbytes`, as `take_low`."""
        return self._take(owner, nbytes, what, low=False)

    def _take(self, owner: str, nbytes: int, what: str, *, low: bool) -> torch.Tensor:
        size = aligned(nbytes)
        with self._lock:
            gaps = self._gaps()
            fitting = [gap for gap in gaps if gap[1] - gap[0] >= size]
            if not fitting:
                raise self._overflow(size, what, gaps)
            start = fitting[0][0] if low else fitting[-1][1] - size
            if size:
                insort(self._taken, _Taken(start, start + size, owner))
        return self.data[start : start + nbytes]

    def release(self, owner: str) -> int:
        """Free everything `owner` holds and return how many bytes that was; idempotent.

        Nothing may use the owner's tensors afterwards. On CPU the pages go back to the system.
        """
        with self._lock:
            mine = [taken for taken in self._taken if taken.owner == owner]
            self._taken = [taken for taken in self._taken if taken.owner != owner]
            for start, stop in _runs(mine):
                self._give_back(start, stop)
        return sum(taken.stop - taken.start for taken in mine)

    def close(self) -> None:
        """Forget everything; the memory goes when the last tensor over it does."""
        with self._lock:
            self._taken.clear()
            self._give_back(0, self.total_bytes)
        self.data = torch.empty(0, dtype=torch.uint8)
        self._map = None

    def check_integrity(self) -> None:
        """Assert the invariants; cheap enough to run whenever a worker is idle."""
        with self._lock:
            at = 0
            for taken in self._taken:
                assert taken.start >= at, f"{taken} overlaps what ends at {at}"
                assert taken.start % ALIGNMENT_BYTES == 0
                assert taken.stop % ALIGNMENT_BYTES == 0
                at = taken.stop
            assert at <= self.total_bytes

    def _gaps(self) -> list[tuple[int, int]]:
        gaps, at = [], 0
        for taken in self._taken:
            if taken.start > at:
                gaps.append((at, taken.start))
            at = taken.stop
        if self.total_bytes > at or not gaps:
            gaps.append((at, self.total_bytes))
        return gaps

    def _overflow(self, size: int, what: str, gaps: list[tuple[int, int]]) -> CapacityError:
        free = sum(stop - start for start, stop in gaps)
        largest = max(stop - start for start, stop in gaps)
        used = self.total_bytes - free
        if size > free:
            return CapacityError(
                f"the arena of {self.total_bytes} bytes is {size - free} bytes short: "
                f"{what} takes {size}, {used} are in use"
            )
        return CapacityError(
            f"the arena of {self.total_bytes} bytes has no run long enough: {what} takes {size} in "
            f"one piece and the longest free one is {size - largest} bytes short ({free} are free)"
        )

    def _give_back(self, start: int, stop: int) -> None:
        if self._map is None:
            return
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        last = stop // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)


def _runs(taken: list[_Taken]) -> list[tuple[int, int]]:
    """Neighbouring allocations joined, so that whole pages between them can be given back."""
    runs: list[tuple[int, int]] = []
    for one in taken:
        if runs and runs[-1][1] == one.start:
            runs[-1] = (runs[-1][0], one.stop)
        else:
            runs.append((one.start, one.stop))
    return runs
