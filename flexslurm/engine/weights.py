"""Fills a stage's parameters with exactly the slices it owns; never holds a whole model.

Where the bytes come from is behind `WeightFiller`: safetensors files here, peers in `weight_pull`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from flexslurm.engine.checkpoint import Checkpoint, StoredTensor
from flexslurm.engine.families import ModelInfo
from flexslurm.engine.ownership import Piece
from flexslurm.engine.shard import Part, ShardSpec
from flexslurm.engine.weight_store import WeightStore, WeightView
from flexslurm.errors import ModelError

Progress = Callable[[str, int, int], None]
"""`(phase, done_bytes, total_bytes)`; may raise to cancel."""

# Large tensors are read in pieces: what is held twice (file, then arena) stays small, and so does
# the time a serving thread waits for the reader of the file, which keeps the interpreter lock.
_PIECE_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Need:
    """A part of a stage whose bytes were newly taken."""

    part: Part
    tp_rank: int
    dtype: torch.dtype
    view: WeightView

    @property
    def piece(self) -> Piece:
        return self.view.piece

    def shaped(self, raw: torch.Tensor, lo: int, hi: int) -> torch.Tensor:
        """The indices `[lo, hi)` of the piece among its bytes, as the checkpoint has them."""
        stored = raw.view(self.dtype).view(self.part.stored_shape(self.tp_rank))
        stored = stored[lo - self.piece.lo : hi - self.piece.lo]
        return stored.t() if self.part.transposed else stored


@dataclass(frozen=True, slots=True)
class Filled:
    """Where the bytes of newly taken weights came from."""

    copied_bytes: int = 0
    """From elsewhere on this GPU."""
    moved_bytes: int = 0
    """From other workers."""
    read_bytes: int = 0
    """From files."""
    move_s: float = 0.0
    """How long what came from other workers and from files took."""

    def __add__(self, other: Filled) -> Filled:
        return Filled(
            self.copied_bytes + other.copied_bytes,
            self.moved_bytes + other.moved_bytes,
            self.read_bytes + other.read_bytes,
            self.move_s + other.move_s,
        )


class WeightFiller(Protocol):
    """Where the slices of a shard come from."""

    def check(self, spec: ShardSpec) -> None:
        """Raise ModelError if anything the spec asks for is not there; reads no weights."""
        ...

    def fill(
        self, weights: WeightStore, needs: Sequence[Need], progress: Progress | None
    ) -> Filled:
        """Fill the views, and say so to the store.

        Raises ModelError where files are at fault, and whatever `progress` raises.
        """
        ...


class FileSource:
    """Slices read by range from a checkpoint's safetensors files; use as a context manager."""

    def __init__(self, info: ModelInfo) -> None:
        self._info = info
        self._checkpoint = Checkpoint.open(info.path)
        self._files: dict[Path, Any] = {}
        self._open = ExitStack()

    def __enter__(self) -> FileSource:
        return self

    def __exit__(self, *exc: object) -> None:
        self._open.close()
        self._files.clear()

    def check(self, spec: ShardSpec) -> None:
        for part in spec.parts:
            self._locate(part)

    def fill(
        self, weights: WeightStore, needs: Sequence[Need], progress: Progress | None
    ) -> Filled:
        total = sum(need.piece.nbytes for need in needs)
        done, began = 0, time.monotonic()
        for need in needs:
            piece = need.piece
            with weights.filling(need.view) as raw:
                out = need.shaped(raw, piece.lo, piece.hi)
                for nbytes in self.read(need.part, piece.dim, piece.lo, piece.hi, out):
                    done += nbytes
                    if progress is not None:
                        progress("weights", done, total)
            weights.filled(need.view)
        return Filled(read_bytes=total, move_s=time.monotonic() - began)

    def read(self, part: Part, dim: int, lo: int, hi: int, out: torch.Tensor) -> Iterator[int]:
        """Copy `[lo, hi)` along `dim` of a tensor into `out` (any strides and dtype).

        Yields the bytes of `out` as they are done, so that progress shows inside large tensors.
        Raises ModelError for a file that cannot be read.
        """
        stored = self._locate(part)
        try:
            slices = self._file(stored.file).get_slice(stored.name)
            for first, last in _pieces(out):
                piece = slices[first:last, lo:hi] if dim == 1 else slices[lo + first : lo + last]
                out[first:last].copy_(piece)
                yield out[first:last].numel() * out.element_size()
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{stored.file}: cannot read {stored.name}: {error}") from None

    def _locate(self, part: Part) -> StoredTensor:
        return self._checkpoint.locate(self._info, part.layout, part.layer)

    def _file(self, path: Path) -> Any:
        if path not in self._files:
            opened = safe_open(str(path), framework="pt", device="cpu")
            self._files[path] = self._open.enter_context(opened)
        return self._files[path]


def _pieces(out: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Runs of rows of at most the piece size."""
    rows = out.shape[0]
    row_bytes = max(out.numel() // max(rows, 1) * out.element_size(), 1)
    step = max(_PIECE_BYTES // row_bytes, 1)
    for first in range(0, rows, step):
        yield first, min(first + step, rows)
