"""Whether the load asks for another pilot or leaves one idle; pure, and slow on purpose.

A pilot costs others their GPUs and the service a shift, so only a load that has lasted counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flexslurm.control.keeper import PoolKeeper
from flexslurm.control.keeper_values import PilotStage


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """Shares from 0 to 1, times in seconds; see `KeepingSettings` of the service file."""

    high: float = 0.9
    high_for_s: float = 60.0
    low: float = 0.3
    low_for_s: float = 900.0


@dataclass(frozen=True, slots=True)
class ServiceLoad:
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
        self._idle_since: float | None = None

    def take(self, now: float, load: ServiceLoad) -> tuple[int, str]:
        """+1, 0 or -1 pilots, and why; after an answer that is not 0 the time counts anew."""
        settings = self._settings
        # one that has just come waits for the next step: that is no queue
        queue = load.waiting > load.seats // 8
        high = queue or load.share >= settings.high
        # what waits for GPUs to come is not idle
        low = load.seats > 0 and not queue and load.share <= settings.low
        self._high_since = _since(self._high_since, now) if high else None
        self._low_since = _since(self._low_since, now) if low else None
        idle = load.running == load.waiting == 0
        self._idle_since = _since(self._idle_since, now) if idle else None
        if self._high_since is not None and now - self._high_since >= settings.high_for_s:
            self._high_since = None
            return 1, f"{load.waiting} requests wait, {load.share:.0%} of the gear is in use"
        if self._low_since is not None and now - self._low_since >= settings.low_for_s:
            self._low_since = None
            return -1, f"{load.share:.0%} of the gear has been in use for {settings.low_for_s:g} s"
        return 0, ""

    def idle(self, now: float) -> bool:
        """Whether there has been no request at all for as long as a load must be low."""
        return self._idle_since is not None and now - self._idle_since >= self._settings.low_for_s


def _since(before: float | None, now: float) -> float:
    return now if before is None else before


def resize(
    keeper: PoolKeeper, step: int, why: str, may_spare: Callable[[str], bool] = lambda name: True
) -> None:
    """Ask for a pilot more, of the first entry that has room, or let one of the last go.

    Nothing more is asked for while a pilot that was asked for is still to come. `may_spare`:
    whether the service can do without this pilot.
    """
    numbers = range(len(keeper.entries))
    if step > 0:
        coming = (PilotStage.INTENT, PilotStage.WAITING)
        if any(kept.stage in coming for kept in keeper.kept.values()):
            return
        for number in numbers:
            if len(keeper.staying(number)) < keeper.wanted[number]:
                continue  # it lacks one already, and cannot get it
            if keeper.wish(number, keeper.wanted[number] + 1, why):
                return
    if step < 0:
        for number in reversed(numbers):
            first = keeper.first_to_go(number)
            runs = first is not None and first.stage is PilotStage.RUNNING
            if first is not None and runs and not may_spare(first.fragment):
                continue
            if keeper.wish(number, keeper.wanted[number] - 1, why):
                return


def pool_lines(keeper: PoolKeeper, now: float) -> tuple[str, ...]:
    """One line for each entry: what is wanted, what there is, and why no more comes."""
    lines = []
    for number, entry in enumerate(keeper.entries):
        staying = keeper.staying(number)
        running = sum(kept.stage is PilotStage.RUNNING for kept in staying)
        parts = [f"{running} of {keeper.wanted[number]} {entry.gpu_type} pilots run"]
        if entry.least < entry.most:
            parts[0] += f" ({entry.least} to {entry.most})"
        waiting = sum(kept.stage is PilotStage.WAITING for kept in staying)
        if waiting:
            parts.append(f"{waiting} in the queue")
        leaving = sum(bool(kept.ending) for kept in keeper.of_entry(number))
        if leaving:
            parts.append(f"{leaving} being let go")
        away = sorted(name for name, of in keeper.away.items() if of == number)
        if away:
            parts.append(f"drained: {', '.join(away)} (flexslurm cordon --undo brings one back)")
        fillers = sum(kept.pilot.fills_hole for kept in keeper.of_entry(number))
        if fillers:
            parts.append(f"{fillers} in holes")
        why = keeper.trials.stuck(now, number, len(entry.shapes))
        if why and len(staying) < keeper.wanted[number]:
            parts.append(f"no more are submitted for now: {why}")
        lines.append("; ".join(parts))
    return tuple(lines)
