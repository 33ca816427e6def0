"""Which epochs the workers hold, and which of them were told to close; never sends anything itself.

Memory counts as free when the worker has said so, or is gone. Invariant: what was told to close
stays here until one of the two.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from flexslurm.control.actions import Send
from flexslurm.messages import Retire


class Held(NamedTuple):
    """A worker has this epoch, whole or in part, and has not said that it is closed."""

    worker: str
    epoch: int


class Holdings:
    """What every worker holds, with the time it was told to close it; None: it was not."""

    def __init__(self) -> None:
        self._told: dict[Held, float | None] = {}
        self._twice: set[Held] = set()
        """Told once more before it has said that it is closed: it will say so twice."""

    def __iter__(self) -> Iterator[Held]:
        return iter(tuple(self._told))

    def add(self, worker: str, epoch: int) -> None:
        """An install goes out."""
        self._told.setdefault(Held(worker, epoch), None)

    def close(
        self,
        now: float,
        epoch: int,
        workers: Collection[str] | None = None,
        *,
        keep_weights: bool = False,
        after_s: float = 0.0,
    ) -> list[Send]:
        """Tell these workers (default: all that hold it) to close an epoch; each once."""
        told = [
            held
            for held, at in sorted(self._told.items(), key=lambda item: item[0])
            if held.epoch == epoch and at is None and (workers is None or held.worker in workers)
        ]
        for held in told:
            self._told[held] = now
        order = Retire(epoch=epoch, keep_weights=keep_weights, after_s=after_s)
        return [Send(held.worker, order) for held in told]

    def close_for_good(self, now: float, worker: str, epoch: int, after_s: float) -> Send:
        """Tell a worker to close what is left of an epoch whose weights it was to keep."""
        held = Held(worker, epoch)
        if self._told.get(held) is not None:
            self._twice.add(held)
        self._told[held] = now
        return Send(worker, Retire(epoch=epoch, after_s=after_s))

    def closed(self, worker: str, epoch: int) -> None:
        held = Held(worker, epoch)
        if held in self._twice:
            self._twice.remove(held)
        else:
            self._told.pop(held, None)

    def forget(self, worker: str) -> None:
        """The worker is gone, and what it held with it."""
        for held in [held for held in self._told if held.worker == worker]:
            del self._told[held]
            self._twice.discard(held)

    def closing(self, workers: Collection[str] | None = None) -> frozenset[Held]:
        """What was told to close and is not closed yet, on these workers or on any."""
        return frozenset(
            held
            for held, at in self._told.items()
            if at is not None and (workers is None or held.worker in workers)
        )

    def late(self, now: float, bound_s: float) -> frozenset[str]:
        """Workers that were told to close something longer ago than the bound."""
        return frozenset(
            held.worker for held, at in self._told.items() if at is not None and now - at >= bound_s
        )

    def in_use(self) -> frozenset[Held]:
        """What was not told to close."""
        return frozenset(held for held, at in self._told.items() if at is None)
