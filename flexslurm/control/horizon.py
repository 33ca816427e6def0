"""What a gear is worth until the horizon, where its members end or may be lost; pure.

The worth of a course is the expectation of its integral of useful tokens per second. What serves at
a moment depends on who is there. A known end is certain: from then on that member is gone, and the
integral is exact. A loss that may come is weighed by survival: with hazard h a member is still
there at time t with probability `exp(-h t)`, each for itself, so that all of

    sum over who is gone:  P(gone at t) * tokens per second without them

is a sum of products of exponentials. It is integrated piece by piece between known ends by
quadrature whose error is far below one token. A loss also costs a pause: what serves without the
lost member does so only after the recovery. Each loss is counted with a pause of its own, as if it
was the first, and at the last leg's rate (one in the middle of a shift puts it off): so more risk
is never worth more. What ends as known is prepared for, and pauses nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import comb, exp

from flexslurm.gear import Gear

MOST_LOSSES = 2
"""With more losses, what serves is taken to fall evenly from the worst of so many to all."""

Gone = tuple[int, ...]
"""How many members of each group are gone."""


@dataclass(frozen=True, slots=True)
class RiskGroup:
    """Members (pilots) of which one is as good as another: alike in GPUs, in end and in risk."""

    count: int = 1
    ends_in_s: float | None = None
    """When they are known to end: by a notice, by walltime."""
    hazard_per_s: float = 0.0
    """Rate of losses that nobody announces, of each; 1 over the mean time to one."""
    used: bool = True
    """Whether the gear is on them; others stand by for those that go."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """What may happen to the members of a gear; by default nothing does."""

    groups: tuple[RiskGroup, ...] = ()
    """Those that end or may be lost; members that do neither are left out."""
    after: Mapping[Gone, Gear | float] = field(default_factory=dict)
    """What serves without so many of each; where there is no entry, nothing does.

    A number is the share of the gear's tokens that is left, where no gear is known.
    """
    recovery_s: float = 0.0
    """Without tokens, after each loss that was not known."""

    @property
    def known_end_s(self) -> float | None:
        """Until the gear's first loss that is known beforehand."""
        return min(self.ends_s, default=None)

    @property
    def ends_s(self) -> tuple[float, ...]:
        """When members of the gear are known to end, the first first."""
        used = (group.ends_in_s for group in self.groups if group.used)
        return tuple(sorted({end for end in used if end is not None}))

    @property
    def hazard_per_s(self) -> float:
        """Losses of the gear's members per second, all together."""
        return sum(group.count * group.hazard_per_s for group in self.groups if group.used)

    def hits(self, gone: Gone) -> bool:
        """Whether these are members that the gear is on."""
        return any(n for n, group in zip(gone, self.groups, strict=True) if group.used)


@dataclass(frozen=True, slots=True)
class Leg:
    """A rate that is held for a time; None: to the end of the horizon."""

    tokens_per_s: float
    seconds: float | None = None


def expected_tokens(
    legs: Sequence[Leg],
    groups: Sequence[RiskGroup],
    without: Callable[[Gone], float],
    recovery_s: float,
    horizon_s: float,
) -> float:
    """Tokens of a course over the horizon.

    `without`: tokens per second when so many are gone; it should not rise with more. No leg gives
    more than that; a leg's own rate is what serves while nobody is gone.
    """
    course = _Course(groups, without, recovery_s, horizon_s, legs[-1].tokens_per_s)
    at, total = 0.0, 0.0
    for number, leg in enumerate(legs):
        last = leg.seconds is None or number == len(legs) - 1
        stop = horizon_s if last else min(at + (leg.seconds or 0.0), horizon_s)
        total += course.tokens(leg.tokens_per_s, at, stop)
        at = stop
    return max(total, 0.0)


def states(groups: Sequence[RiskGroup], horizon_s: float) -> tuple[Gone, ...]:
    """All that `expected_tokens` may ask for over such a horizon, in a fixed order."""
    found: dict[Gone, None] = {}
    for at in (0.0, *_ends(groups, horizon_s)):
        ended = _ended(groups, at)
        risky = _risky(groups, ended)
        for lost in (*_losses(groups, risky), _all_of(groups, risky)):
            found.setdefault(_sum(ended, lost))
    return tuple(found)


class _Course:
    """One gear's members over one horizon."""

    def __init__(
        self,
        groups: Sequence[RiskGroup],
        without: Callable[[Gone], float],
        recovery_s: float,
        horizon_s: float,
        steady: float,
    ) -> None:
        self.groups, self.horizon_s, self.steady = tuple(groups), horizon_s, steady
        self.recovery_s = max(recovery_s, 0.0)
        self._without, self._rates = without, dict[Gone, float]()

    def rate(self, gone: Gone) -> float:
        if gone not in self._rates:
            self._rates[gone] = self._without(gone) if any(gone) else float("inf")
        return self._rates[gone]

    def tokens(self, most: float, start: float, stop: float) -> float:
        """Of one leg, which gives at most so much."""
        borders = [*_ends(self.groups, self.horizon_s), self.horizon_s - self.recovery_s]
        inner = sorted({b for b in borders if start < b < stop})
        total = 0.0
        for a, b in itertools.pairwise((start, *inner, stop)):
            ended = _ended(self.groups, a)
            risky = _risky(self.groups, ended)
            if not risky:
                total += min(most, self.rate(ended)) * (b - a)
                continue
            hazard = sum(self.groups[g].count * self.groups[g].hazard_per_s for g in risky)
            piece = _Piece(self, most, ended, risky)
            total += sum(_quadrature(piece.rate, lo, hi) for lo, hi in _pieces(a, b, hazard))
        return total


class _Piece:
    """Between two known ends: who may be lost does not change."""

    def __init__(self, course: _Course, most: float, ended: Gone, risky: tuple[int, ...]) -> None:
        self._course, self._most, self._risky = course, most, risky
        self._groups = course.groups
        everyone = _sum(ended, _all_of(self._groups, risky))
        lost = _losses(self._groups, risky)
        rates = {one: self._rate(_sum(ended, one)) for one in lost}
        self._states = tuple(rates.items())
        self._paused = {
            g: min(course.steady, course.rate(_sum(ended, self._one_of(g)))) for g in risky
        }
        self._safe = self._rate(everyone)
        self._count = sum(self._groups[g].count for g in risky)
        most_lost = [rate for one, rate in rates.items() if sum(one) == MOST_LOSSES]
        self._least = max(min(most_lost, default=0.0), self._safe)

    def _rate(self, gone: Gone) -> float:
        return min(self._most, self._course.rate(gone))

    def _one_of(self, group: int) -> Gone:
        return tuple(int(i == group) for i in range(len(self._groups)))

    def _pauses(self, alive: Mapping[int, float]) -> float:
        """Tokens that a second of recovery from the losses of this moment costs, per second."""
        used = (g for g in alive if self._groups[g].used)
        return sum(
            self._groups[g].count * self._groups[g].hazard_per_s * alive[g] * self._paused[g]
            for g in used
        )

    def rate(self, at: float) -> float:
        """Expected tokens per second at a moment, less what recoveries from losses then cost."""
        alive = {g: exp(-self._groups[g].hazard_per_s * at) for g in self._risky}
        pause_s = min(self._course.recovery_s, self._course.horizon_s - at)
        total, more, more_alive = 0.0, 1.0, 0.0
        for g, survives in alive.items():
            more_alive += self._groups[g].count * survives
        for lost, rate in self._states:
            chance = 1.0
            for g, survives in alive.items():
                count, gone = self._groups[g].count, lost[g]
                chance *= comb(count, gone) * (1 - survives) ** gone * survives ** (count - gone)
            more -= chance
            more_alive -= chance * (self._count - sum(lost))
            total += chance * rate
        # with more losses, in proportion to those that are left
        total += max(more, 0.0) * self._safe
        if self._count > MOST_LOSSES:
            share = max(more_alive, 0.0) / (self._count - MOST_LOSSES)
            total += share * (self._least - self._safe)
        return total - pause_s * self._pauses(alive)


def _ends(groups: Sequence[RiskGroup], horizon_s: float) -> tuple[float, ...]:
    found = (max(group.ends_in_s, 0.0) for group in groups if group.ends_in_s is not None)
    return tuple(sorted({end for end in found if end < horizon_s}))


def _ended(groups: Sequence[RiskGroup], at: float) -> Gone:
    return tuple(
        group.count if group.ends_in_s is not None and group.ends_in_s <= at else 0
        for group in groups
    )


def _risky(groups: Sequence[RiskGroup], ended: Gone) -> tuple[int, ...]:
    """Numbers of the groups that are there and may be lost."""
    return tuple(i for i, one in enumerate(groups) if one.hazard_per_s > 0 and not ended[i])


def _losses(groups: Sequence[RiskGroup], risky: Sequence[int]) -> tuple[Gone, ...]:
    """No loss, then every choice of few."""
    found: dict[Gone, None] = {}
    for count in range(MOST_LOSSES + 1):
        for chosen in itertools.combinations_with_replacement(risky, count):
            lost = tuple(chosen.count(i) for i in range(len(groups)))
            if all(n <= group.count for n, group in zip(lost, groups, strict=True)):
                found.setdefault(lost)
    return tuple(found)


def _all_of(groups: Sequence[RiskGroup], some: Sequence[int]) -> Gone:
    return tuple(group.count if i in some else 0 for i, group in enumerate(groups))


def _sum(one: Gone, other: Gone) -> Gone:
    return tuple(a + b for a, b in zip(one, other, strict=True))


# --------------------------------------------------------------------------------- quadrature

_NODES = (
    (0.1834346424956498, 0.3626837833783620),
    (0.5255324099163290, 0.3137066458778873),
    (0.7966664774136267, 0.2223810344533745),
    (0.9602898564975363, 0.1012285362903763),
)
"""Gauss and Legendre's for eight points: places in [-1, 1], each with its mirror, and weights
(Abramowitz and Stegun, Handbook of Mathematical Functions, table 25.4)."""
_SPAN = 4.0
"""Losses expected in the first piece; what is left of it decays, so that later ones are longer."""


def _pieces(start: float, stop: float, hazard: float) -> Iterator[tuple[float, float]]:
    at, length = start, _SPAN / hazard
    while stop - at > length:
        yield at, at + length
        at, length = at + length, length * 2
    yield at, stop


def _quadrature(rate: Callable[[float], float], start: float, stop: float) -> float:
    half, middle = (stop - start) / 2, (start + stop) / 2
    if half <= 0:
        return 0.0
    return half * sum(w * (rate(middle - x * half) + rate(middle + x * half)) for x, w in _NODES)
