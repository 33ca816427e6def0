"""Which ranges of which weights are on this GPU, and who uses them; fills none of them itself.

A segment is a range of a checkpoint's tensor in an extent of the arena. An epoch takes a view of a
segment that has what it needs, or a new segment. When an epoch goes, what no view uses any more is
freed: whole segments, and parts of them. A view of a segment stays right when the arena moves it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from flexslurm.engine.ownership import Piece
from flexslurm.planner.model_spec import ALIGNMENT_BYTES

if TYPE_CHECKING:
    from flexslurm.engine.arena import Arena, Extent


class Segment:
    """The range `[lo, hi)` of a tensor along `dim`, `unit_bytes` for each index.

    Its bytes count only once it is `filled`. While it is pinned nothing of it is freed or moved.
    """

    __slots__ = (
        "dim", "extent", "filled", "hi", "lo", "model", "tensor", "unit_bytes", "views", "whole",
    )  # fmt: skip

    def __init__(self, model: str, piece: Piece, extent: Extent) -> None:
        self.model = model
        self.tensor, self.dim, self.unit_bytes = piece.tensor, piece.dim, piece.unit_bytes
        self.lo, self.hi, self.whole = piece.lo, piece.hi, piece.is_whole
        self.extent = extent
        self.filled = False
        self.views: list[WeightView] = []

    def part(self, lo: int, hi: int, extent: Extent) -> Segment:
        """The segment of a part, once the extent is cut; it has no views yet."""
        made = Segment(self.model, Piece(self.tensor, self.dim, lo, hi, 0, self.unit_bytes), extent)
        made.filled = self.filled
        return made

    def offsets(self, lo: int, hi: int) -> tuple[int, int]:
        """Where a part's bytes are among the segment's."""
        return (lo - self.lo) * self.unit_bytes, (hi - self.lo) * self.unit_bytes

    def moved(self) -> None:
        for view in self.views:
            view.tell()


class WeightView:
    """An epoch's piece, inside a segment."""

    __slots__ = ("_told", "fresh", "owner", "piece", "segment")

    def __init__(self, owner: int, piece: Piece, segment: Segment, *, fresh: bool) -> None:
        self.owner, self.piece, self.segment = owner, piece, segment
        self.fresh = fresh
        """The segment was taken for it, and is to be filled."""
        self._told: list[Callable[[], None]] = []
        segment.views.append(self)

    def on_move(self, call: Callable[[], None]) -> None:
        """`call` when the bytes lie elsewhere, with the arena's lock held and no step running."""
        self._told.append(call)

    def tell(self) -> None:
        for call in self._told:
            call()


class WeightStore:
    """The segments of an arena, by model and tensor; everything under the arena's lock."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._segments: dict[tuple[str, str], list[Segment]] = {}
        self._views: dict[int, list[WeightView]] = {}
        self._models: dict[int, str] = {}

    # ------------------------------------------------------------------------------ owning

    def open(self, owner: int, model: str) -> None:
        """An epoch begins to take weights; `model` tells apart what has tensors of like names."""
        with self._arena.lock:
            assert owner not in self._models, f"epoch {owner} is installed already"
            self._models[owner] = model
            self._views[owner] = []

    def model_of(self, owner: int) -> str | None:
        """The model of an epoch; None when it is not here."""
        return self._models.get(owner)

    def claim(self, owner: int, piece: Piece, what: str) -> WeightView:
        """The piece for this epoch: in a filled segment, or newly taken.

        Raises CapacityError and DeadlineExceeded as `Arena.take`.
        """
        key = self._models[owner], piece.tensor
        with self._arena.lock:
            # A piece without bytes (a rank may have no rows of a small matrix) lies in no segment:
            # it would be within any, at a place where none of its bytes keep others out.
            for segment in self._segments.get(key, ()) if piece.nbytes else ():
                same = segment.dim == piece.dim and segment.filled
                if same and segment.lo <= piece.lo and piece.hi <= segment.hi:
                    return self._viewed(WeightView(owner, piece, segment, fresh=False))
        extent = self._arena.take(piece.nbytes, what)
        with self._arena.lock:
            segment = Segment(key[0], piece, extent)
            extent.moved = segment.moved
            self._segments.setdefault(key, []).append(segment)
            return self._viewed(WeightView(owner, piece, segment, fresh=True))

    def _viewed(self, view: WeightView) -> WeightView:
        self._views[view.owner].append(view)
        return view

    def bytes_of(self, view: WeightView) -> torch.Tensor:
        """The bytes of a view where they are now, uint8."""
        start, stop = view.segment.offsets(view.piece.lo, view.piece.hi)
        return self._arena.bytes_of(view.segment.extent)[start:stop]

    def used_by(self, owner: int) -> int:
        """Bytes of the arena that hold an epoch's weights, shared ones too."""
        with self._arena.lock:
            extents = {id(v.segment): v.segment.extent for v in self._views.get(owner, ())}
            return sum(extent.size for extent in extents.values())

    def release(self, owner: int) -> int:
        """The epoch has no weights any more; the bytes that are free by that. Idempotent.

        What is being sent goes when that ends.
        """
        with self._arena.lock:
            before = self._arena.weights_bytes
            self._models.pop(owner, None)
            concerned: dict[int, Segment] = {}
            for view in self._views.pop(owner, []):
                view.segment.views.remove(view)
                concerned[id(view.segment)] = view.segment
            self._trim(list(concerned.values()))
            return before - self._arena.weights_bytes

    def release_part(self, owner: int, tensors: Collection[str]) -> None:
        """The epoch has these tensors no more; others of it stay. Idempotent."""
        with self._arena.lock:
            views = self._views.get(owner, [])
            gone = [view for view in views if view.piece.tensor in tensors]
            concerned = {id(view.segment): view.segment for view in gone}
            for view in gone:
                views.remove(view)
                view.segment.views.remove(view)
            self._trim(list(concerned.values()))

    def _trim(self, concerned: Sequence[Segment]) -> None:
        """Free what no view uses of segments that nobody has pinned."""
        unused: list[Extent] = []
        changed = False
        for segment in concerned:
            near = self._segments.get((segment.model, segment.tensor), [])
            if segment.extent.pins or segment not in near:
                continue
            ranges = _joined(segment)
            if not ranges:
                unused.append(segment.extent)
            elif ranges == [(segment.lo, segment.hi)]:
                continue
            changed = True
            near.remove(segment)
            near += self._split(segment, ranges)
            if not near:
                del self._segments[segment.model, segment.tensor]
        if changed:
            self._arena.free(unused)

    def _split(self, segment: Segment, ranges: Sequence[tuple[int, int]]) -> list[Segment]:
        if not ranges:
            return []
        spans = [segment.offsets(lo, hi) for lo, hi in ranges]
        made = []
        for (lo, hi), extent in zip(ranges, self._arena.cut(segment.extent, spans), strict=True):
            part = segment.part(lo, hi, extent)
            extent.moved = part.moved
            part.views = [v for v in segment.views if lo <= v.piece.lo and v.piece.hi <= hi]
            for view in part.views:
                view.segment = part
            made.append(part)
        return made

    # -------------------------------------------------------------------- filling, giving out

    @contextmanager
    def filling(self, view: WeightView) -> Iterator[torch.Tensor]:
        """The bytes of a fresh view, which stay in place meanwhile; `filled` is the caller's."""
        with self._arena.lock:
            segment = view.segment
            segment.extent.pins += 1
            found = self.bytes_of(view)
        try:
            yield found
        finally:
            self._unpin(segment)

    def filled(self, view: WeightView) -> None:
        """All of a fresh view's bytes are there: others may use them."""
        with self._arena.lock:
            view.segment.filled = True

    @contextmanager
    def lending(
        self, model: str, tensor: str, dim: int, lo: int, hi: int
    ) -> Iterator[tuple[Segment, torch.Tensor] | None]:
        """A filled segment that has this range, and all its bytes, which stay as they are.

        It may have the other form, if it is the whole tensor (a row of one is a column of the
        other). None where there is no such segment.
        """
        with self._arena.lock:
            found = self._holding(model, tensor, dim, lo, hi)
            if found is not None:
                found.extent.pins += 1
                data = self._arena.bytes_of(found.extent)
        try:
            yield None if found is None else (found, data)
        finally:
            if found is not None:
                self._unpin(found)

    def _holding(self, model: str, tensor: str, dim: int, lo: int, hi: int) -> Segment | None:
        filled = [one for one in self._segments.get((model, tensor), ()) if one.filled]
        for segment in filled:
            if segment.dim == dim and segment.lo <= lo and hi <= segment.hi:
                return segment
        return next((one for one in filled if one.dim != dim and one.whole), None)

    def _unpin(self, segment: Segment) -> None:
        with self._arena.lock:
            segment.extent.pins -= 1
            self._trim([segment])

    def check_integrity(self) -> None:
        """Assert that views lie in their segments and segments in their extents."""
        with self._arena.lock:
            total = 0
            for segments in self._segments.values():
                for segment in segments:
                    total += segment.extent.size
                    assert segment.extent.nbytes == (segment.hi - segment.lo) * segment.unit_bytes
                    assert segment.views or segment.extent.pins, "a segment nobody uses"
                    for view in segment.views:
                        assert view in self._views[view.owner]
                        assert segment.lo <= view.piece.lo <= view.piece.hi <= segment.hi
            assert total == self._arena.weights_bytes, f"{total}, {self._arena.weights_bytes}"


def _joined(segment: Segment) -> list[tuple[int, int]]:
    """What views use of a segment; ranges that share a unit of the alignment as one."""
    found: list[tuple[int, int]] = []
    for lo, hi in sorted((view.piece.lo, view.piece.hi) for view in segment.views):
        if found:
            last = found[-1]
            end = segment.extent.head + segment.offsets(*last)[1]
            start = segment.extent.head + segment.offsets(lo, hi)[0]
            if lo <= last[1] or start // ALIGNMENT_BYTES <= (end - 1) // ALIGNMENT_BYTES:
                found[-1] = last[0], max(last[1], hi)
                continue
        found.append((lo, hi))
    return found
