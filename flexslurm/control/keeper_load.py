"""Whether the load asks for another pilot or leaves one idle; pure, and slow on purpose.

A pilot costs others their GPUs and the service a shift, so only a load that has lasted counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from flexslurm.control.keeper import PoolKeeper
from flexslurm.control.keeper_values import Stage


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """Shares from 0 to 1, times in seconds; see `KeepingSettings` of the service file."""

    high: float = 0.9
    high_for_s: float = 60.0
    low: float = 0.3
    low_for_s: float = 900.0


@dataclass(frozen=True, slots=True)
class Load:
    """How busy the service is at a moment."""

    running: int
    """Sequences that are being worked on."""
    waiting: int
    """Requests that nobody works on yet."""
    seats: int
    """Sequences that the gear's replicas can work on at once; 0: none serves."""
    kv_used: float

    @property
    def share(self) -> float:
        """Of what the gear can do; the fuller of batch and KV cache."""
        return max(self.running / self.seats if self.seats else 0.0, self.kv_used)


class LoadJudge:
    """Fed with the load every few seconds."""

    def __init__(self, settings: LoadSettings) -> None:
        self._settings = settings
        self._high_since: float | None = None
        self._low_since: float | None = None

    def take(self, now: float, load: Load) -> tuple[int, str]:
        """+1, 0 or -1 pilots, and why; after an answer that is not 0 the time counts anew."""
        settings = self._settings
        high = load.waiting > 0 or load.share >= settings.high
        low = load.waiting == 0 and load.share <= settings.low
        self._high_since = _since(self._high_since, now) if high else None
        self._low_since = _since(self._low_since, now) if low else None
        if self._high_since is not None and now - self._high_since >= settings.high_for_s:
            self._high_since = None
            return 1, f"{load.waiting} requests wait, {load.share:.0%} of the gear is in use"
        if self._low_since is not None and now - self._low_since >= settings.low_for_s:
            self._low_since = None
            return -1, f"{load.share:.0%} of the gear has been in use for {settings.low_for_s:g} s"
        return 0, ""


def _since(before: float | None, now: float) -> float:
    return now if before is None else before


def resize(keeper: PoolKeeper, step: int, why: str) -> None:
    """Ask for a pilot more, of the first entry that has room, or let one of the last go.

    Nothing more is asked for while a pilot that was asked for is still to come.
    """
    numbers = range(len(keeper.entries))
    if step > 0:
        coming = (Stage.INTENT, Stage.WAITING)
        if any(kept.stage in coming for kept in keeper.kept.values()):
            return
        for number in numbers:
            if len(keeper.staying(number)) < keeper.wanted[number]:
                continue  # it lacks one already, and cannot get it
            if keeper.wish(number, keeper.wanted[number] + 1, why):
                return
    if step < 0:
        for number in reversed(numbers):
            if keeper.wish(number, keeper.wanted[number] - 1, why):
                return
