"""Ranges of weights as one run of bytes, to be sent or filled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import numpy as np
import torch

from flexslurm.engine.arena import Arena
from flexslurm.engine.byte_runs import Landing, Port, Runs
from flexslurm.engine.transfer_wire import MAX_VIEWS, PieceRange, Views
from flexslurm.engine.weight_store import Segment

Lent = tuple[Segment, torch.Tensor] | None

_MOST_PIECES = MAX_VIEWS // 2
"""Of one chunk: many are small, and a chunk costs much the same whatever its size."""


class WeightRun:
    """Ranges of tensors, one after another, as they are sent or filled."""

    def __init__(self, pieces: Sequence[PieceRange]) -> None:
        self.pieces = pieces
        sizes = np.array([0, *(piece.nbytes for piece in pieces)], np.int64)
        self._starts: list[int] = np.cumsum(sizes).tolist()
        self.total = self._starts[-1]
        self.items = len(pieces)

    def item(self, number: int) -> tuple[int, int]:
        return self._starts[number], self._starts[number + 1]

    def upto(self, lo: int, hi: int) -> int:
        """A chunk has parts of so many pieces at most."""
        return min(hi, self._starts[min(self._at(lo) + _MOST_PIECES, self.items)])

    def _parts(self, lo: int, hi: int) -> Iterator[tuple[int, int, int]]:
        """Of the pieces that the bytes `[lo, hi)` lie in: the number, and the bytes within it."""
        at = lo
        while at < hi:
            number = self._at(at)
            start, stop = self.item(number)
            yield number, at - start, min(stop, hi) - start
            at = min(stop, hi)

    def _at(self, lo: int) -> int:
        return int(np.searchsorted(self._starts, lo, side="right")) - 1


class WeightSource(WeightRun):
    """Ranges of a model's tensors that are sent, from segments of either form."""

    def __init__(
        self, arena: Arena, model: str, pieces: Sequence[PieceRange], item_bytes: int
    ) -> None:
        super().__init__(pieces)
        self._arena, self._model, self._item_bytes = arena, model, item_bytes
        self._port = Port(arena)

    def missing(self) -> tuple[int, ...]:
        return tuple(n for n, piece in enumerate(self.pieces) if not self._has(piece))

    def _has(self, piece: PieceRange) -> bool:
        with self._lent(piece) as found:
            if found is None:
                return False
            segment, _ = found
            count = piece.hi - piece.lo
            if segment.dim == piece.dim:
                return count * segment.unit_bytes == piece.nbytes
            rows = segment.hi - segment.lo
            columns = segment.unit_bytes // self._item_bytes
            return piece.hi <= columns and count * rows * self._item_bytes == piece.nbytes

    def _lent(self, piece: PieceRange) -> AbstractContextManager[Lent]:
        store = self._arena.weights
        return store.lending(self._model, piece.tensor, piece.dim, piece.lo, piece.hi)

    @contextmanager
    def lend(self, lo: int, hi: int) -> Iterator[Views | None]:
        views: Views = []
        runs: Runs = []
        with ExitStack() as stack:
            for number, first, last in self._parts(lo, hi):
                piece = self.pieces[number]
                found = stack.enter_context(self._lent(piece))
                if found is None:
                    yield None
                    return
                segment, _ = found
                if segment.dim == piece.dim:
                    start = segment.extent.data_start + segment.offsets(piece.lo, piece.hi)[0]
                    runs.append((start + first, start + last))
                    continue
                self._put_out(runs, views)
                views.append(self._gathered(found, piece, first, last))
            self._put_out(runs, views)
            yield views

    def _put_out(self, runs: Runs, views: Views) -> None:
        """Add the bytes of these ranges to the views."""
        if runs:
            views += self._port.out(runs, before=sum(view.nbytes for view in views))
            runs.clear()

    def _gathered(
        self, found: tuple[Segment, torch.Tensor], piece: PieceRange, lo: int, hi: int
    ) -> memoryview:
        """Bytes `[lo, hi)` of the piece out of the whole tensor in the other form."""
        segment, data = found
        rows, size = segment.hi - segment.lo, self._item_bytes
        whole = data.view(_INTEGERS[size]).view(rows, -1)
        unit = rows * size
        first, last = lo // unit, -(-hi // unit)
        part = whole[:, piece.lo + first : piece.lo + last].t().contiguous().cpu()
        flat = part.view(-1).view(torch.uint8).numpy()
        return flat.data[lo - first * unit : hi - first * unit]


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class WeightSink(WeightRun):
    """Ranges of tensors that are filled; `places`: where each begins in the arena, pinned."""

    def __init__(self, arena: Arena, pieces: Sequence[PieceRange], places: Sequence[int]) -> None:
        super().__init__(pieces)
        self._places = places
        self._port = Port(arena)

    def into(self, lo: int, hi: int) -> AbstractContextManager[Landing]:
        runs = [
            (self._places[number] + first, self._places[number] + last)
            for number, first, last in self._parts(lo, hi)
        ]
        return nullcontext(self._port.into(runs))
