"""Weights that peers send into host memory while the GPU has no room for them; plans nothing.

Where two gears do not fit beside each other, what the new one lacks comes while the old one serves,
and in the pause it is a copy. What has not come by then is left to be fetched as usual.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from flexslurm.engine.byte_runs import Landing
from flexslurm.engine.transfer_client import Cancel, Fetched
from flexslurm.engine.transfer_wire import PieceRange
from flexslurm.engine.weight_runs import WeightRun

_LOOK_S = 0.02

Fetch = Callable[["HostSink", Cancel], Fetched]
"""Fills a sink from one source, until it is called back."""


class HostSink(WeightRun):
    """Ranges of tensors that are filled in this process's own memory."""

    def __init__(self, pieces: Sequence[PieceRange]) -> None:
        super().__init__(pieces)
        self._memory = mmap.mmap(-1, max(self.total, 1))

    def into(self, lo: int, hi: int) -> AbstractContextManager[Landing]:
        return nullcontext(Landing([memoryview(self._memory)[lo:hi]]))

    def bytes_of(self, number: int) -> torch.Tensor:
        """The bytes of a piece, uint8."""
        start, stop = self.item(number)
        return torch.frombuffer(self._memory, dtype=torch.uint8)[start:stop]


class StagedWeights:
    """What has come; a range is there when all of it is."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, int], list[tuple[int, int, torch.Tensor]]] = {}

    def fetch(
        self, jobs: Sequence[tuple[Sequence[PieceRange], Fetch]], waits: Callable[[], bool]
    ) -> bool:
        """Fetch from all sources side by side, as long as `waits`; whether all of it came."""
        cancel = Cancel()
        sinks = [HostSink(pieces) for pieces, _ in jobs]
        results: dict[int, Fetched] = {}

        def work(number: int) -> None:
            results[number] = jobs[number][1](sinks[number], cancel)

        threads = [
            threading.Thread(target=work, args=(number,), name="weights-receiver", daemon=True)
            for number in range(len(jobs))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(_LOOK_S)
                if not waits():
                    cancel.cut()  # who fetches notices within moments
        kept = [self._keep(sink, results.get(number)) for number, sink in enumerate(sinks)]
        return all(kept)

    def _keep(self, sink: HostSink, found: Fetched | None) -> bool:
        """Take what is whole; whether that is all."""
        if found is None:
            return False
        for number, piece in enumerate(sink.pieces):
            if number not in found.missing and not found.left.meet(*sink.item(number)):
                ranges = self._found.setdefault((piece.tensor, piece.dim), [])
                ranges.append((piece.lo, piece.hi, sink.bytes_of(number)))
        return not found.missing and not found.left

    def of(self, tensor: str, dim: int) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Ranges `[lo, hi)` of a tensor along `dim`, each with its bytes."""
        return iter(self._found.get((tensor, dim), ()))
