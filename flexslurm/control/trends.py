"""Averages and P95 over windows of minutes, and what estimates are off by; pure, knows no clock.

Decisions look at whole windows, never at instants: the last one and the one before it, side by
side and not overlapping.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, floor

from flexslurm.control.spread import Spread

HEADROOM = 0.7
"""A gear carries a load when the load's average is at most this share of what the gear can do."""
BUSY = 0.9
"""Replicas that compute this share of the time have no time left."""
ENOUGH = 8
"""Sequences from which the share within the targets is read off; with fewer, it is estimated."""
FULL = 0.5
"""Replicas with this share of their places taken do about what they can: estimates are of that."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What one interval showed."""

    at_s: float
    """When the interval ended."""
    tokens_per_s: float
    """Tokens of answers, over the interval."""
    running: int
    waiting: int
    """At the end of the interval."""
    busy: float = 1.0
    """Share of the interval in which the replicas had something to do."""
    full: float = 1.0
    """Share of the replicas' places that were taken at the end."""
    arrived: int = 0
    """Sequences accepted in the interval."""
    ended: int = 0
    """Sequences that came to their end in it."""
    ended_tokens: int = 0
    """Tokens of those, all together."""
    ttft: Spread = field(default_factory=Spread)
    """From acceptance to the first token, of sequences that got it in the interval."""
    tpot: Spread = field(default_factory=Spread)
    """Per token after the first, of sequences that ended in it."""
    replicas: Mapping[str, float] = field(default_factory=dict)
    """Tokens per second of each replica, by its key."""

    @property
    def pressed(self) -> bool:
        """Whether more would have been done by a faster gear.

        A lone stream keeps a replica busy too, but says nothing of what the replica can do.
        """
        return self.waiting >= 1 or (self.busy >= BUSY and self.full >= FULL)


@dataclass(frozen=True, slots=True)
class Window:
    """One window's figures."""

    tokens_per_s: float
    p95_tokens_per_s: float
    running: float
    waiting: float
    p95_waiting: float
    busy: float
    pressed: float
    """Share of the samples that were."""
    samples: int
    seconds: float
    """What the samples span."""
    arrived: int = 0
    ended: int = 0
    ended_tokens: int = 0
    ttft: Spread = field(default_factory=Spread)
    tpot: Spread = field(default_factory=Spread)
    replicas: Mapping[str, float] = field(default_factory=dict)

    @property
    def saturated(self) -> bool:
        """Whether the load was beyond the gear for most of the time: then it has no known bound.

        Most of the time: a blip in the middle of two windows saturates neither.
        """
        return self.pressed > 0.5

    @property
    def offered_tokens_per_s(self) -> float | None:
        """What comes in: arrivals times the length of answers; None where no answer ended."""
        if not self.ended or self.seconds <= 0:
            return None
        return self.arrived / self.seconds * self.ended_tokens / self.ended

    @property
    def demand_tokens_per_s(self) -> float | None:
        """What a gear must be able to do to carry this load; None: as much as it can.

        The average with headroom, and the P95 as it is.
        """
        if self.saturated:
            return None
        return max(self.tokens_per_s / HEADROOM, self.p95_tokens_per_s)


@dataclass(frozen=True, slots=True)
class Targets:
    """The latencies aimed at; None: any will do. False where there are none."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    def __bool__(self) -> bool:
        return self.ttft_s is not None or self.tpot_s is not None

    def share(self, window: Window) -> float | None:
        """Of what a window saw, how much met both targets; None where it saw too little.

        The two are measured apart: those that miss one are taken to be those that miss the other.
        """
        if min(window.ttft.count, window.tpot.count) < ENOUGH:
            return None
        tpot = 1.0 if self.tpot_s is None else window.tpot.within(self.tpot_s)
        return min(self.first_share(window), tpot)

    def first_share(self, window: Window) -> float:
        """Of the first tokens that a window saw, how many met their target."""
        return 1.0 if self.ttft_s is None else window.ttft.within(self.ttft_s)


class Trends:
    """The samples of the last two windows."""

    def __init__(self, interval_s: float = 10.0, window_s: float = 300.0) -> None:
        assert 0 < interval_s <= window_s, f"samples every {interval_s} s in {window_s} s"
        self.interval_s, self.window_s = interval_s, window_s
        self._samples: deque[Sample] = deque(maxlen=2 * ceil(window_s / interval_s) + 2)

    def add(self, sample: Sample) -> None:
        assert not self._samples or sample.at_s >= self._samples[-1].at_s, "time runs backwards"
        self._samples.append(sample)

    def clear(self) -> None:
        """Forget: another gear serves, and what was measured is not its own."""
        self._samples.clear()

    def windows(self, now: float) -> tuple[Window, ...]:
        """The last whole window and the one before it, the latest first; fewer while it is early.

        A window counts as whole when its samples miss at most one interval of it, or a tenth.
        """
        wanted = floor(self.window_s / self.interval_s + 1e-9)
        found: list[Window] = []
        for number in range(2):
            stop = now - number * self.window_s
            start = stop - self.window_s
            inside = [s for s in self._samples if start < s.at_s <= stop]
            if len(inside) + max(wanted // 10, 1) < wanted or not inside:
                break
            found.append(summary(inside, self.interval_s))
        return tuple(found)


def summary(samples: Iterable[Sample], interval_s: float = 10.0) -> Window:
    """Averages and P95 of some samples, each of one interval; at least one."""
    found = list(samples)
    count = len(found)
    assert count, "a window without samples"
    return Window(
        tokens_per_s=sum(s.tokens_per_s for s in found) / count,
        p95_tokens_per_s=p95(s.tokens_per_s for s in found),
        running=sum(s.running for s in found) / count,
        waiting=sum(s.waiting for s in found) / count,
        p95_waiting=p95(s.waiting for s in found),
        busy=sum(s.busy for s in found) / count,
        pressed=sum(s.pressed for s in found) / count,
        samples=count,
        seconds=count * interval_s,
        arrived=sum(s.arrived for s in found),
        ended=sum(s.ended for s in found),
        ended_tokens=sum(s.ended_tokens for s in found),
        ttft=Spread.joined(s.ttft for s in found),
        tpot=Spread.joined(s.tpot for s in found),
        replicas=_each(found),
    )


def _each(samples: Sequence[Sample]) -> dict[str, float]:
    keys = {key for sample in samples for key in sample.replicas}
    count = len(samples)
    return {k: sum(s.replicas.get(k, 0.0) for s in samples) / count for k in sorted(keys)}


def p95(values: Iterable[float]) -> float:
    """The smallest value that at least 95 % of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(ceil(0.95 * len(ordered)) - 1, 0)]


class Corrections:
    """What gears did, measured while saturated, over what they were estimated at.

    They fade towards 1: what was slow once need not be for ever.
    """

    def __init__(self, weight: float = 0.3, half_life_s: float = 86400.0) -> None:
        self._weight, self._half_life_s = weight, half_life_s
        self._factors: dict[str, float] = {}

    def fade(self, seconds: float) -> None:
        """So much time has passed."""
        left = 0.5 ** (seconds / self._half_life_s)
        self._factors = {name: 1 + (f - 1) * left for name, f in self._factors.items()}

    def measured(self, gear: str, estimate: float, window: Window) -> None:
        """Take a window in which `gear` served alone; says nothing unless it was saturated."""
        if estimate <= 0 or not window.saturated or window.tokens_per_s <= 0:
            return
        self.learn(gear, window.tokens_per_s / estimate)

    def learn(self, gear: str, found: float) -> None:
        """Come nearer to what was found of `gear`."""
        before = self._factors.get(gear, found)
        self._factors[gear] = before + self._weight * (found - before)

    @property
    def factors(self) -> Mapping[str, float]:
        """Measured over estimated, by gear, of those that were measured."""
        return dict(self._factors)


def corrected(estimate: float, gear: str, factors: Mapping[str, float]) -> float:
    """An estimate times its own factor, or the mean of the others': models err alike."""
    if gear in factors:
        return estimate * factors[gear]
    if not factors:
        return estimate
    return estimate * sum(factors.values()) / len(factors)
