"""KV pages outside the GPU: in host memory or in files, kept after their epoch; sends nothing.

A set is what one `ParkKv` has copied: the pages of some blocks, block by block, all layers and
heads of the rank. In host memory sets count against a limit. A file is written whole or not at all:
pages, then an index with a checksum of each page, then the index's length and checksum.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import struct
import threading
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import msgspec

from flexslurm.engine.transfer_wire import Views
from flexslurm.errors import CapacityError, ProtocolError, StaleEpoch

_FOOT = struct.Struct("!QI16s")
_MAGIC = b"flexslurm-park-1"
_NAME = re.compile(r"[A-Za-z0-9._-]+")
_MOST_INDEX_BYTES = 256 << 20


class ParkedBox(msgspec.Struct, frozen=True):
    """What of each block is there; the model's own numbers."""

    epoch: int
    layers: tuple[int, int]
    heads: tuple[int, int]
    page_bytes: int

    @property
    def pages(self) -> int:
        """Of one block."""
        return (self.layers[1] - self.layers[0]) * (self.heads[1] - self.heads[0])

    @property
    def block_bytes(self) -> int:
        return self.pages * self.page_bytes


class ParkedSet(ABC):
    """Blocks of one box, found by number; immutable once it is in a lot."""

    def __init__(self, box: ParkedBox) -> None:
        self.box = box
        self.places: dict[int, int] = {}
        """By block: which in the set it is."""

    @abstractmethod
    def read(self, first: int, last: int) -> memoryview:
        """Pages `[first, last)`, counted over all blocks; raises OSError and ProtocolError."""


class HostSet(ParkedSet):
    """In this process's memory, outside the arena."""

    def __init__(self, box: ParkedBox, blocks: int) -> None:
        super().__init__(box)
        self.nbytes = max(box.block_bytes * blocks, 1)
        self._memory = memoryview(mmap.mmap(-1, self.nbytes))

    def buffer(self, place: int) -> memoryview:
        """Where the block that is to be number `place` goes."""
        size = self.box.block_bytes
        return self._memory[place * size : (place + 1) * size]

    def read(self, first: int, last: int) -> memoryview:
        size = self.box.page_bytes
        return self._memory[first * size : last * size]


class _Index(msgspec.Struct, frozen=True):
    box: ParkedBox
    blocks: tuple[int, ...]
    crcs: bytes
    """Four bytes for each page, big-endian."""


class FileSet(ParkedSet):
    """In a file; read when asked for."""

    def __init__(self, path: Path) -> None:
        """Raises OSError, and ProtocolError where the file is not whole."""
        self.path = path
        self._file: BinaryIO = path.open("rb")
        try:
            index = _read_index(self._file, path)
        except BaseException:
            self._file.close()
            raise
        super().__init__(index.box)
        self.places = {block: place for place, block in enumerate(index.blocks)}
        self._crcs = index.crcs

    def read(self, first: int, last: int) -> memoryview:
        """Pages `[first, last)`. Raises ProtocolError for a file that is short or damaged."""
        size = self.box.page_bytes
        data = os.pread(self._file.fileno(), (last - first) * size, first * size)
        if len(data) != (last - first) * size:
            raise ProtocolError(f"{self.path}: ends before page {last}")
        view = memoryview(data)
        for page in range(first, last):
            here = view[(page - first) * size : (page - first + 1) * size]
            if zlib.crc32(here).to_bytes(4, "big") != self._crcs[4 * page : 4 * page + 4]:
                raise ProtocolError(f"{self.path}: page {page} is damaged")
        return view

    def close(self) -> None:
        self._file.close()


def _read_index(file: BinaryIO, path: Path) -> _Index:
    size = os.fstat(file.fileno()).st_size
    foot = os.pread(file.fileno(), _FOOT.size, max(size - _FOOT.size, 0))
    if len(foot) != _FOOT.size or foot[-16:] != _MAGIC:
        raise ProtocolError(f"{path}: is no whole file of parked pages")
    length, crc, _ = _FOOT.unpack(foot)
    start = size - _FOOT.size - length
    if start < 0 or length > _MOST_INDEX_BYTES:
        raise ProtocolError(f"{path}: has a damaged index")
    body = os.pread(file.fileno(), length, start)
    if len(body) != length or zlib.crc32(body) != crc:
        raise ProtocolError(f"{path}: has a damaged index")
    try:
        index = msgspec.msgpack.decode(body, type=_Index)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"{path}: has a damaged index: {error}") from None
    pages = len(index.blocks) * index.box.pages
    if len(index.crcs) != 4 * pages or start != pages * index.box.page_bytes:
        raise ProtocolError(f"{path}: has not the pages that its index says")
    return index


class FileWriter:
    """Writes one file of parked pages beside its place, and puts it there when it is whole."""

    def __init__(self, directory: Path, worker: str, box: ParkedBox, ticket: int) -> None:
        """Raises OSError where the directory cannot be written to."""
        self._box = box
        self.path = directory / _file_name(worker, box.epoch, ticket)
        self._draft = self.path.with_suffix(f".draft-{os.getpid()}")
        directory.mkdir(parents=True, exist_ok=True)
        self._file = self._draft.open("xb")
        self._blocks: list[int] = []
        self._crcs = bytearray()

    def add(self, block: int, data: bytes | bytearray | memoryview) -> None:
        """All pages of a block; raises OSError."""
        view, size = memoryview(data), self._box.page_bytes
        assert view.nbytes == self._box.block_bytes
        self._file.write(view)
        for at in range(0, view.nbytes, size):
            self._crcs += zlib.crc32(view[at : at + size]).to_bytes(4, "big")
        self._blocks.append(block)

    def finish(self) -> None:
        """Write the index and put the file in its place; raises OSError."""
        body = msgspec.msgpack.encode(_Index(self._box, tuple(self._blocks), bytes(self._crcs)))
        self._file.write(body + _FOOT.pack(len(body), zlib.crc32(body), _MAGIC))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._draft.replace(self.path)
        directory = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def abandon(self) -> None:
        """Leave nothing behind; idempotent, and nothing after `finish`."""
        with contextlib.suppress(OSError):
            self._file.close()
        self._draft.unlink(missing_ok=True)


def _file_name(worker: str, epoch: int, ticket: int) -> str:
    if not _NAME.fullmatch(worker):
        raise ProtocolError(f"'{worker}' is no worker's name")
    return f"kv-{worker}-e{epoch}-t{ticket:06d}.park"


def files_of(directory: Path, worker: str, epoch: int) -> list[Path]:
    """What a worker parked there of an epoch, the earliest first."""
    name = _file_name(worker, epoch, 0).replace("t000000", "t*")
    return sorted(directory.glob(name))


def drop_file(directory: Path, worker: str, epoch: int, ticket: int) -> None:
    """Delete what one `ParkKv` wrote, if it is there. Raises OSError."""
    (directory / _file_name(worker, epoch, ticket)).unlink(missing_ok=True)


class ParkedRun:
    """A part of some blocks, as `byte_runs.Source`; the latest set that has a block gives it."""

    def __init__(
        self, sets: Sequence[ParkedSet], blocks: Sequence[int], layers: tuple[int, int],
        heads: tuple[int, int],
    ) -> None:  # fmt: skip
        """Raises ProtocolError for a part that is not in the sets' box."""
        box = self._box = sets[0].box
        for asked, there in ((layers, box.layers), (heads, box.heads)):
            if not there[0] <= asked[0] < asked[1] <= there[1]:
                raise ProtocolError(f"{asked} is not in {there}, which was parked")
        self._layers = layers[0] - box.layers[0], layers[1] - box.layers[0]
        self._heads = heads[0] - box.heads[0], heads[1] - box.heads[0]
        self._found: list[tuple[ParkedSet, int] | None] = [_last(sets, b) for b in blocks]
        self._pages = (layers[1] - layers[0]) * (heads[1] - heads[0])
        self._size = self._pages * box.page_bytes
        self.total = len(blocks) * self._size

    def missing(self) -> tuple[int, ...]:
        return tuple(n for n, found in enumerate(self._found) if found is None)

    def item(self, number: int) -> tuple[int, int]:
        return number * self._size, (number + 1) * self._size

    def upto(self, lo: int, hi: int) -> int:
        return hi

    @contextmanager
    def lend(self, lo: int, hi: int) -> Iterator[Views | None]:
        views: Views = []
        for number in range(lo // self._size, -(-hi // self._size)):
            found = self._found[number]
            if found is None:
                yield None
                return
            start, stop = self.item(number)
            views += self._part(*found, max(lo, start) - start, min(hi, stop) - start)
        yield views

    def _part(self, parked: ParkedSet, place: int, lo: int, hi: int) -> Views:
        """Bytes `[lo, hi)` of the part of one block."""
        size, (first, last) = self._box.page_bytes, self._heads
        width, all_heads = last - first, self._box.heads[1] - self._box.heads[0]
        views: Views = []
        at = lo
        while at < hi:
            page = at // size
            layer, head = divmod(page, width)
            # To the end of this layer's heads; all heads of several layers are one run.
            stop = (
                -(-hi // size) if width == all_heads else min((layer + 1) * width, -(-hi // size))
            )
            begin = (place * self._box.pages) + (self._layers[0] + layer) * all_heads + first + head
            data = parked.read(begin, begin + stop - page)
            end = min(stop * size, hi)
            views.append(data[at - page * size : end - page * size])
            at = end
        return views


def _last(sets: Sequence[ParkedSet], block: int) -> tuple[ParkedSet, int] | None:
    for one in reversed(sets):
        place = one.places.get(block)
        if place is not None:
            return one, place
    return None


class ParkingLot:
    """All that this process has parked in its own memory."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        """Without a limit: half of the memory that is available at the time."""
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._sets: dict[int, list[HostSet]] = {}
        self._used_bytes = 0

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    @property
    def spare_bytes(self) -> int:
        """What may yet be used, as things are now."""
        with self._lock:
            return max(self._limit() - self._used_bytes, 0)

    def _limit(self) -> int:
        if self._limit_bytes is not None:
            return self._limit_bytes
        return (_available_bytes() + self._used_bytes) // 2

    def open(self, box: ParkedBox, blocks: int) -> HostSet:
        """Room for so many blocks, not to be found yet; raises CapacityError."""
        need = box.block_bytes * blocks
        with self._lock:
            limit = self._limit()
            if self._used_bytes + need > limit:
                raise CapacityError(
                    f"{need} bytes cannot be parked: {self._used_bytes} of {limit} bytes of host "
                    "memory are in use for it"
                )
            self._used_bytes += need
        try:
            return HostSet(box, blocks)
        except OSError:
            with self._lock:
                self._used_bytes -= need
            raise

    def keep(self, parked: HostSet) -> None:
        """From now on it is found."""
        with self._lock:
            self._sets.setdefault(parked.box.epoch, []).append(parked)

    def discard(self, parked: HostSet) -> None:
        """It was opened and is not kept."""
        with self._lock:
            self._used_bytes -= parked.nbytes

    def find(self, epoch: int) -> list[HostSet]:
        """The sets of an epoch, the earliest first; raises StaleEpoch where there are none."""
        with self._lock:
            found = self._sets.get(epoch)
            if not found:
                raise StaleEpoch(f"epoch {epoch} is not here, and nothing of it is parked")
            return list(found)

    def forget(self, epoch: int) -> int:
        """Drop what is parked of an epoch; how many bytes that was."""
        with self._lock:
            freed = sum(parked.nbytes for parked in self._sets.pop(epoch, []))
            self._used_bytes -= freed
            return freed


def _available_bytes() -> int:
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable"))
        return int(line.split()[1]) * 1024
    return 0
