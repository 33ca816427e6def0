"""How long pilots wait in the queue and take to become ready, from those that did; pure."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from math import ceil

MARGIN_S = 30.0
"""For the shift itself, and what Slurm's own clock is off by."""
_UNSEEN_WAIT_S = 300.0
_UNSEEN_START_S = 120.0
_REMEMBERED = 32


def high_of(values: deque[float]) -> float:
    """The value that nine in ten do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(ceil(0.9 * len(ordered)) - 1, 0)]


@dataclass(slots=True)
class Waits:
    """By entry of the pool; the last few count."""

    _queued: dict[int, deque[float]] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=_REMEMBERED))
    )
    _started: dict[int, deque[float]] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=_REMEMBERED))
    )

    def queued(self, entry: int, seconds: float) -> None:
        """A pilot ran this long after it was submitted."""
        self._queued[entry].append(max(seconds, 0.0))

    def started(self, entry: int, seconds: float) -> None:
        """A pilot was ready this long after its job began to run."""
        self._started[entry].append(max(seconds, 0.0))

    def lead_s(self, entry: int, walltime_s: float | None, asked_s: float | None) -> float:
        """How long before its end a pilot's successor is submitted.

        At most half the walltime, or nine tenths where it was asked for.
        """
        most = 0.5 if asked_s is None else 0.9
        if asked_s is None:
            queued, started = self._queued[entry], self._started[entry]
            asked_s = (
                (high_of(queued) if queued else _UNSEEN_WAIT_S)
                + (high_of(started) if started else _UNSEEN_START_S)
                + MARGIN_S
            )
        return asked_s if walltime_s is None else min(asked_s, most * walltime_s)
