"""What can be sent and filled, as runs of bytes; opens no connection.

A run is lent a piece at a time: for that long what it consists of stays where it is. On CPU a piece
is views of the arena itself; on CUDA it goes through a pinned buffer, copied on a stream beside the
serving one. Pieces of one run are lent one after another, by one thread.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from flexslurm.engine.arena import Arena
from flexslurm.engine.transfer_wire import CHUNK_BYTES, Views

Runs = list[tuple[int, int]]
"""Ranges of bytes of an arena."""


class Source(Protocol):
    """What can be sent."""

    total: int

    def missing(self) -> tuple[int, ...]:
        """Items (blocks or pieces) that are not here."""
        ...

    def item(self, number: int) -> tuple[int, int]:
        """The range of bytes of an item."""
        ...

    def upto(self, lo: int, hi: int) -> int:
        """Where a piece from `lo` must end, at most `hi`."""
        ...

    def lend(self, lo: int, hi: int) -> AbstractContextManager[Views | None]:
        """The bytes `[lo, hi)`; None when they are not here any more."""
        ...


class Sink(Protocol):
    """What can be filled."""

    total: int
    items: int

    def item(self, number: int) -> tuple[int, int]:
        """The range of bytes of an item (block or piece)."""
        ...

    def into(self, lo: int, hi: int) -> AbstractContextManager[Landing]:
        """Where the bytes `[lo, hi)` go."""
        ...


class Landing:
    """Buffers to receive into; `keep` when what has come is right."""

    def __init__(self, views: Views) -> None:
        self.views = views

    def keep(self) -> None:
        """Nothing to do: it came where it belongs."""


class Port:
    """The way in and out of an arena for one thread."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._memory = arena.memory() if arena.device.type == "cpu" else None
        self._stream: Any = None
        self._buffer: torch.Tensor | None = None

    def out(self, runs: Runs, before: int = 0) -> Views:
        """The bytes of these ranges; with the `before` that are lent already, at most a chunk."""
        if self._memory is not None:
            return [self._memory[start:stop] for start, stop in runs]
        buffer, at = self._staging(), before
        with torch.cuda.stream(self._stream):
            # What steps have written so far is on the default stream.
            self._stream.wait_stream(torch.cuda.default_stream(self._arena.device))
            for start, stop in runs:
                there = buffer[at : at + stop - start]
                there.copy_(self._arena.data[start:stop], non_blocking=True)
                at += stop - start
        self._stream.synchronize()
        return [buffer.numpy().data[before:at]]

    def into(self, runs: Runs) -> Landing:
        """Buffers for these ranges, at most a chunk's."""
        if self._memory is not None:
            return Landing([self._memory[start:stop] for start, stop in runs])
        buffer = self._staging()
        size = sum(stop - start for start, stop in runs)
        return _StagedLanding(buffer.numpy().data[:size], lambda: self._upload(runs))

    def _upload(self, runs: Runs) -> None:
        buffer, at = self._staging(), 0
        with torch.cuda.stream(self._stream):
            for start, stop in runs:
                there = self._arena.data[start:stop]
                there.copy_(buffer[at : at + stop - start], non_blocking=True)
                at += stop - start
        self._stream.synchronize()

    def _staging(self) -> torch.Tensor:
        if self._buffer is None:
            self._buffer = torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=True)
            self._stream = torch.cuda.Stream(self._arena.device)  # type: ignore[no-untyped-call]
        return self._buffer


class _StagedLanding(Landing):
    def __init__(self, view: memoryview, upload: Callable[[], None]) -> None:
        super().__init__([view])
        self._upload = upload

    def keep(self) -> None:
        self._upload()


def pour(source: Views, target: Views) -> None:
    """Copy bytes from buffers to buffers; as many here as there."""
    left = list(target)
    for view in source:
        at = 0
        while at < view.nbytes:
            count = min(view.nbytes - at, left[0].nbytes)
            left[0][:count] = view[at : at + count]
            at += count
            left[0] = left[0][count:]
            if not left[0].nbytes:
                left.pop(0)
    assert not left
