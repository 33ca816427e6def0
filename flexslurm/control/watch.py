"""What is measured of the service and its pilots, as decisions need it; pure, decides nothing.

Fed with one sample an interval and with what becomes of pilots; asked for whole windows, for how
far estimates are off, and for what may be lost.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from flexslurm.control.installed import InstalledGear, ReplicaKey
from flexslurm.control.lives import Lives
from flexslurm.control.trends import Corrections, Sample, Targets, Trends, Window
from flexslurm.gear import Gear

_RECOVERY_WEIGHT = 0.5
_MOST_GEARS = 16


@dataclass(frozen=True, slots=True)
class WatchSettings:
    """How often samples come, and how much of them a window is."""

    interval_s: float = 10.0
    window_s: float = 300.0
    kind_of: Callable[[str], str] = lambda fragment: ""
    """What a pilot shares its risks with, by its name; "" where that is not known."""
    targets: Targets = field(default_factory=Targets)


class Watch:
    """See the module's docstring."""

    def __init__(self, settings: WatchSettings) -> None:
        self._window_s = settings.window_s
        self._trends = Trends(settings.interval_s, settings.window_s)
        self._corrections, self._attained = Corrections(), Corrections()
        self.targets = settings.targets
        self._keys: frozenset[ReplicaKey] = frozenset()
        self._window_at = 0.0
        """When the last window ended that was looked at."""
        self._broken_at: float | None = None
        self._recovery_s: float | None = None
        self._interval_s = settings.interval_s
        self._gears: OrderedDict[str, Gear] = OrderedDict()
        self.lives = Lives(settings.kind_of)
        self.measuring = False
        """Whether a sample has ever come."""
        self.last: Sample | None = None

    def take(self, now: float, sample: Sample, current: InstalledGear | None) -> bool:
        """One interval's sample; whether a whole window has ended since the last one that had.

        What was measured of another gear, or before replicas came or went, is forgotten.
        """
        self.measuring, self.last = True, sample
        self._corrections.fade(self._interval_s)
        self._attained.fade(self._interval_s)
        keys = current.keys if current is not None else frozenset()
        if keys != self._keys:
            self._keys, self._window_at = keys, now
            self._trends.clear()
            return False
        if current is None:
            return False
        self._trends.add(sample)
        if now - self._window_at < self._window_s:
            return False
        windows = self._trends.windows(now)
        if not windows:
            return False
        self._window_at = now
        if not current.lost and windows[0].saturated:
            self._measured(current.gear, windows[0])
        return True

    def _measured(self, gear: Gear, window: Window) -> None:
        self._corrections.measured(gear.name, gear.estimates.tokens_per_s, window)
        share = self.targets.share(window) if self.targets else None
        if share is not None:
            self._attained.learn(gear.name, share)
        self._gears[gear.name] = gear
        self._gears.move_to_end(gear.name)
        if len(self._gears) > _MOST_GEARS:
            self._gears.popitem(last=False)

    def proven(self) -> tuple[Gear, ...]:
        """Gears of which it is known what they do under load."""
        return tuple(self._gears.values())

    def windows(self, now: float) -> tuple[Window, ...] | None:
        """The last whole window and the one before it; None: nothing is being measured."""
        return self._trends.windows(now) if self.measuring else None

    @property
    def corrections(self) -> Mapping[str, float]:
        """Measured over estimated tokens per second, by gear."""
        return self._corrections.factors

    @property
    def attained(self) -> Mapping[str, float]:
        """Share within the targets that gears had under load, by gear; fades towards all."""
        return self._attained.factors

    def broken(self, now: float) -> None:
        """A replica is lost that nobody gave notice of."""
        self._broken_at = now if self._broken_at is None else self._broken_at

    def waits(self) -> None:
        """Nothing can be done about the loss now: waiting is no part of a recovery."""
        self._broken_at = None

    def whole(self, now: float) -> None:
        """A gear is in place again."""
        if self._broken_at is None:
            return
        took_s = now - self._broken_at
        before = took_s if self._recovery_s is None else self._recovery_s
        self._recovery_s = before + _RECOVERY_WEIGHT * (took_s - before)
        self._broken_at = None

    def recovery_s(self, gear: Gear) -> float:
        """How long it takes to serve with this gear after a loss: as measured, else as estimated.

        Without a measurement at least its weights must be read.
        """
        return gear.estimates.load_s if self._recovery_s is None else self._recovery_s
