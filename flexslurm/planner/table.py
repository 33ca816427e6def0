"""The gear table: a gear for every allocation, as bytes that are read where they lie.

    magic    8 bytes, with the version
    sizes    3 little-endian u64: bytes of the header, entries, bytes of the entries
    header   msgpack: what the table was made from, and the pipelines that its gears are made of
    keys     u64 per entry, ascending: the signature's counts in the mixed radix of the pool's
    offsets  u64 per entry and one more: where each entry begins
    entries  msgpack
    check    u32: the CRC-32 of all before it

Nothing but the header is decoded before it is asked for. Pure: takes and gives bytes; `files` reads
and writes them.
"""

from __future__ import annotations

import struct
import zlib
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from flexslurm.errors import ConfigError
from flexslurm.gear import Estimates, Gear, NoGear, Replica, Shape, Signature, Stage

MAGIC = b"FLXGEAR\x03"
_READ = (1, 2, 3)
"""Versions that are read; entries of the first have no other plans, none before 3 has a check."""
_SIZES = struct.Struct("<3Q")
_CHECK = struct.Struct("<I")


class TablePipeline(msgspec.Struct, frozen=True, array_like=True):
    """One pipeline as the table's gears use it: a stage's `node` is filled in by each entry."""

    stages: tuple[Stage, ...]
    max_batch: int
    max_context: int
    kv_blocks: int
    tokens_per_s: float
    ttft_s: float
    tpot_s: float
    load_s: float
    margins: tuple[int, ...]


class ShiftCost(msgspec.Struct, frozen=True, array_like=True):
    """Going to the gear for a node less: what its GPUs lack, and how long that takes to move."""

    shape: int
    """Index into the pool's shapes: a node of which is lost."""
    moved_bytes: int
    seconds: float


class OtherPlan(msgspec.Struct, frozen=True, array_like=True):
    """A plan that is not the best; as in the entry."""

    plan: tuple[tuple[int, int], ...]
    seats: tuple[int, ...]


class TableEntry(msgspec.Struct, frozen=True, array_like=True):
    """The plan of one signature; without pipelines there is none."""

    plan: tuple[tuple[int, int], ...]
    """`(pipeline, how many)`, in the order of the replicas."""
    seats: tuple[int, ...]
    """The abstract node of every stage of every replica."""
    reason: int
    """Index into the header's reasons."""
    gap: float
    """No plan is better by more than this share; 0: it is exact."""
    short_bytes: int = 0
    shifts: tuple[ShiftCost, ...] = ()
    others: tuple[OtherPlan, ...] = ()
    """The next best plans, the better first."""


class Header(msgspec.Struct, frozen=True):
    """What a table is of."""

    inputs: str
    """Hash of all that the table was computed from."""
    model: str
    pool: Signature
    block_tokens: int
    max_batch_tokens: int
    pipelines: tuple[TablePipeline, ...]
    reasons: tuple[str, ...]
    fallback: Signature | None
    """The smallest allocation that holds the model."""


class GearTable:
    """A table over a buffer; looking up decodes one entry."""

    def __init__(self, data: bytes | memoryview, source: str = "the gear table") -> None:
        """Raises ConfigError where the bytes are no gear table, naming `source`."""
        view = memoryview(data)
        start = len(MAGIC) + _SIZES.size
        if len(view) < start or bytes(view[:7]) != MAGIC[:7]:
            raise ConfigError("this is not a gear table", file=source)
        if view[7] not in _READ:
            raise ConfigError(
                f"the gear table has version {view[7]}, this flexslurm reads {MAGIC[7]}",
                file=source,
                hint="make it again with flexslurm plan --out",
            )
        if view[7] == MAGIC[7]:
            view = self._checked(view, source)
        header_size, count, entries_size = _SIZES.unpack(view[len(MAGIC) : start])
        keys = start + header_size
        offsets = keys + 8 * count
        entries = offsets + 8 * (count + 1)
        if len(view) != entries + entries_size:
            raise ConfigError("the gear table is cut short or damaged", file=source)
        try:
            self.header = msgspec.msgpack.decode(view[start:keys], type=Header)
        except msgspec.DecodeError as error:
            raise ConfigError(f"the gear table is damaged: {error}", file=source) from error
        self.source = source
        self._keys = view[keys:offsets].cast("Q")
        self._offsets = view[offsets:entries].cast("Q")
        self._entries = view[entries:]
        self._places = {
            shape: (stride, count)
            for (shape, count), stride in zip(
                self.header.pool.counts, strides(self.header.pool), strict=True
            )
        }
        self._decode = msgspec.msgpack.Decoder(TableEntry).decode

    @staticmethod
    def _checked(view: memoryview, source: str) -> memoryview:
        """All but the check, which must be right: half a second for a gigabyte."""
        body, check = view[: -_CHECK.size], view[-_CHECK.size :]
        if _CHECK.unpack(check) != (zlib.crc32(body),):
            raise ConfigError("the gear table is cut short or damaged", file=source)
        return body

    def __len__(self) -> int:
        return len(self._keys)

    # ------------------------------------------------------------------------------- looking up

    def find(self, signature: Signature) -> TableEntry | None:
        """The entry of a signature; None where the table has none."""
        key = 0
        for shape, count in signature.counts:
            place = self._places.get(shape)
            if place is None or count > place[1]:
                return None
            key += place[0] * count
        at = bisect_left(self._keys, key)
        if at == len(self._keys) or self._keys[at] != key:
            return None
        return self._entry(at)

    def gear(self, signature: Signature) -> Gear | NoGear | None:
        """The gear of a signature, or why there is none; None where the table does not have it."""
        entry = self.find(signature)
        return None if entry is None else self.expand(signature, entry)

    def others(self, signature: Signature) -> tuple[Gear, ...]:
        """Gears of the next best plans, the better first; named by their layouts."""
        entry = self.find(signature)
        if entry is None or not entry.plan:
            return ()
        best, found = self.tokens_per_s(entry), []
        for other in entry.others:
            gear = self._gear(signature, other.plan, other.seats)
            less = 1 - gear.estimates.tokens_per_s / best
            reason = f"next best by estimate: {less:.1%} less"
            found.append(msgspec.structs.replace(gear, name=gear.layout(), reason=reason))
        return tuple(found)

    def dominated(self, signature: Signature) -> Gear | None:
        """The best gear that the signature's GPUs can be given, though it may leave some idle.

        For allocations beyond the pool: nodes of a shape the pool does not have stand in for its
        next smaller ones. None where nothing fits.
        """
        known = self._stand_in(signature)
        found = self.gear(known)
        if isinstance(found, Gear):
            return found
        best: tuple[float, int, Signature] | None = None
        for at, candidate in enumerate(self.signatures()):
            entry = self._entry(at) if known.covers(candidate) else None
            if entry is not None and entry.plan:
                worth = (self.tokens_per_s(entry), -candidate.gpus(), candidate)
                best = worth if best is None or worth[:2] > best[:2] else best
        gear = None if best is None else self.gear(best[2])
        return gear if isinstance(gear, Gear) else None

    def fallback(self) -> Gear | None:
        """The gear of the smallest allocation that holds the model."""
        wanted = self.header.fallback
        gear = None if wanted is None else self.gear(wanted)
        return gear if isinstance(gear, Gear) else None

    def signatures(self) -> Iterator[Signature]:
        """All signatures, in the order of their keys."""
        shapes = self.header.pool.counts
        steps = strides(self.header.pool)
        for key in self._keys:
            counts = [
                (shape, key // step % (most + 1))
                for (shape, most), step in zip(shapes, steps, strict=True)
            ]
            yield Signature(tuple((shape, count) for shape, count in counts if count))

    def tokens_per_s(self, entry: TableEntry) -> float:
        pipelines = self.header.pipelines
        return sum(pipelines[index].tokens_per_s * times for index, times in entry.plan)

    def _entry(self, at: int) -> TableEntry:
        return self._decode(self._entries[self._offsets[at] : self._offsets[at + 1]])

    def _stand_in(self, signature: Signature) -> Signature:
        """The part of a signature that the pool knows, larger nodes standing in for smaller."""
        left = {shape: count for shape, (_, count) in self._places.items()}
        nodes: list[Shape] = []
        for shape in sorted(signature.nodes(), reverse=True):
            fitting = [s for s in left if s.gpu_type == shape.gpu_type and s.gpus <= shape.gpus]
            stand_in = max((s for s in fitting if left[s]), default=None)
            if stand_in is not None:
                nodes.append(stand_in)
                left[stand_in] -= 1
        return Signature.of(nodes)

    # ---------------------------------------------------------------------------------- gears

    def expand(self, signature: Signature, entry: TableEntry) -> Gear | NoGear:
        """The gear that an entry stands for."""
        reason = self.header.reasons[entry.reason]
        if not entry.plan:
            return NoGear(signature, reason, entry.short_bytes)
        return self._gear(signature, entry.plan, entry.seats, reason)

    def _gear(
        self,
        signature: Signature,
        plan: Sequence[tuple[int, int]],
        nodes: Sequence[int],
        reason: str = "",
    ) -> Gear:
        header = self.header
        pipelines = [header.pipelines[index] for index, times in plan for _ in range(times)]
        seats = iter(nodes)
        return Gear(
            name=str(signature),
            signature=signature,
            block_tokens=header.block_tokens,
            replicas=tuple(
                Replica(
                    tuple(
                        Stage(s.gpu_type, s.tp, s.lo, s.hi, s.kv_blocks, node)
                        for s, node in zip(p.stages, seats, strict=False)
                    ),
                    p.max_batch,
                    header.max_batch_tokens,
                    p.max_context,
                )
                for p in pipelines
            ),
            estimates=estimates_of(pipelines, header.block_tokens),
            reason=reason,
        )


def estimates_of(pipelines: Sequence[TablePipeline], block_tokens: int) -> Estimates:
    """Estimates of a gear made of these; times are means by share of the tokens."""
    total = sum(p.tokens_per_s for p in pipelines)
    return Estimates(
        tokens_per_s=total,
        ttft_s=sum(p.ttft_s * p.tokens_per_s for p in pipelines) / total,
        tpot_s=sum(p.tpot_s * p.tokens_per_s for p in pipelines) / total,
        kv_tokens=sum(p.kv_blocks for p in pipelines) * block_tokens,
        load_s=max(p.load_s for p in pipelines),
        memory_margin_bytes=tuple(p.margins for p in pipelines),
    )


def strides(pool: Signature) -> tuple[int, ...]:
    """What one node more of each of the pool's shapes adds to a key.

    Raises ConfigError where 64 bits do not hold the keys.
    """
    result = []
    step = 1
    for _, count in reversed(pool.counts):
        result.append(step)
        step *= count + 1
    if step >= 1 << 64:
        raise ConfigError("the pool has too many allocations for one table")
    return tuple(reversed(result))


def key_of(pool: Signature, signature: Signature) -> int:
    """The key of a signature that the pool covers."""
    step = dict(zip((shape for shape, _ in pool.counts), strides(pool), strict=True))
    return sum(step[shape] * count for shape, count in signature.counts)


def encode(header: Header, entries: Mapping[Signature, TableEntry]) -> bytes:
    """The table as bytes; the same whatever the order of `entries`."""
    encoder = msgspec.msgpack.Encoder()
    by_key = sorted((key_of(header.pool, sig), entry) for sig, entry in entries.items())
    blobs = [encoder.encode(entry) for _, entry in by_key]
    head = encoder.encode(header)
    # The arrays that follow the header are read as 8-byte numbers.
    head_size = len(head)
    body = b"".join(
        (
            MAGIC,
            _SIZES.pack(head_size, len(blobs), sum(map(len, blobs))),
            head,
            _numbers(key for key, _ in by_key),
            _numbers(_offsets(blobs)),
            *blobs,
        )
    )
    return body + _CHECK.pack(zlib.crc32(body))


def _offsets(blobs: Iterable[bytes]) -> Iterator[int]:
    at = 0
    yield at
    for blob in blobs:
        at += len(blob)
        yield at


def _numbers(values: Iterable[int]) -> bytes:
    found = list(values)
    return struct.pack(f"<{len(found)}Q", *found)
