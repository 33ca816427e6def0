"""Fills a stage's parameters with exactly the slices it owns; never holds a whole model.

Where the bytes come from is behind `WeightSource`: safetensors files here, a peer later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from flexslurm.engine.checkpoint import Checkpoint, StoredTensor
from flexslurm.engine.families import ModelInfo
from flexslurm.engine.shard import Part, ShardSpec
from flexslurm.errors import ModelError

Progress = Callable[[str, int, int], None]
"""`(phase, done_bytes, total_bytes)`; may raise to cancel."""

# Large tensors are read in pieces: what is held twice (file, then arena) stays small, and so does
# the time a serving thread waits for the reader of the file, which keeps the interpreter lock.
_PIECE_BYTES = 8 << 20


class WeightSource(Protocol):
    """Where the slices of a shard come from."""

    def check(self, spec: ShardSpec) -> None:
        """Raise ModelError if anything the spec asks for is not there; reads no weights."""
        ...

    def read(self, part: Part, tp_rank: int, out: torch.Tensor) -> Iterator[int]:
        """Copy this rank's slice into `out` (its local shape, any strides and dtype).

        Yields the bytes of `out` as they are done, so that progress shows inside large tensors.
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

    def read(self, part: Part, tp_rank: int, out: torch.Tensor) -> Iterator[int]:
        stored = self._locate(part)
        start, stop = part.range(tp_rank)
        try:
            slices = self._file(stored.file).get_slice(stored.name)
            for first, last in _pieces(out):
                piece = (
                    slices[first:last, start:stop]
                    if part.dim == 1
                    else slices[start + first : start + last]
                )
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


def fill(
    spec: ShardSpec,
    views: Mapping[str, torch.Tensor],
    source: WeightSource,
    progress: Progress | None = None,
) -> None:
    """Load every part into `views[param]`; parts that are views of others are skipped.

    Raises ModelError where files are at fault, and whatever `progress` raises.
    """
    own = [part for part in spec.parts if part.view_of is None]
    total = sum(views[p.param].numel() * views[p.param].element_size() for p in own)
    done = 0
    for part in own:
        for nbytes in source.read(part, spec.tp_rank, views[part.param]):
            done += nbytes
            if progress is not None:
                progress("weights", done, total)
