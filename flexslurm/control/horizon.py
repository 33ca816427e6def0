"""What a gear is worth until the next loss of GPUs, and how likely that loss is; pure.

The worth of a course is its integral of useful tokens per second over the horizon. A loss that may
come is weighed in: with hazard h the course is still under way at time t with probability
`exp(-h t)`, and after the loss comes a pause and then whatever the rest can do. All integrals are
in closed form.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, expm1

_NEVER = 1e-12
"""A chance below which a loss does not happen, and the closed forms lose their digits."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """What may happen to the members of a gear; by default nothing does."""

    known_end_s: float | None = None
    """Until the first loss that is known beforehand: a notice, a walltime."""
    hazard_per_s: float = 0.0
    """Rate of losses that nobody announces; 1 over the mean time to one."""
    after_loss_tokens_per_s: float = 0.0
    """What serves after a loss."""
    recovery_s: float = 0.0
    """Without tokens, from the loss until that serves."""


@dataclass(frozen=True, slots=True)
class Leg:
    """A rate that is held for a time; None: to the end of the horizon."""

    tokens_per_s: float
    seconds: float | None = None


def expected_tokens(legs: Sequence[Leg], outlook: Outlook, horizon_s: float) -> float:
    """Tokens of a course over the horizon: `∫ r(t) e^{-ht} dt`, and what follows a loss.

    The last leg goes on to the horizon or to the known end, after which only recovery and the rate
    after a loss are left.
    """
    end = outlook.known_end_s
    until = horizon_s if end is None else min(end, horizon_s)
    hazard, at, total = outlook.hazard_per_s, 0.0, 0.0
    for number, leg in enumerate(legs):
        last = leg.seconds is None or number == len(legs) - 1
        stop = until if last else min(at + (leg.seconds or 0.0), until)
        total += leg.tokens_per_s * _alive(hazard, at, stop)
        at = stop
    after = outlook.after_loss_tokens_per_s
    total += after * _after_loss(hazard, until, horizon_s - outlook.recovery_s)
    if until < horizon_s:
        left = max(horizon_s - until - outlook.recovery_s, 0.0)
        total += after * left * exp(-hazard * until)
    return total


def _alive(hazard: float, start: float, stop: float) -> float:
    """`∫ e^{-ht} dt` from start to stop."""
    if stop <= start:
        return 0.0
    if hazard * (stop - start) < _NEVER:
        return exp(-hazard * start) * (stop - start)
    return exp(-hazard * start) * -expm1(-hazard * (stop - start)) / hazard


def _after_loss(hazard: float, until: float, resumed: float) -> float:
    """Expected seconds served after an unannounced loss at some t < until: `∫ h e^{-ht} (T-t)⁺ dt`.

    `resumed` is T: the horizon less the recovery.
    """
    last = min(until, resumed)
    if last <= 0 or hazard * last < _NEVER:
        return 0.0
    lost = -expm1(-hazard * last)
    # ∫ h t e^{-ht} dt from 0 to s is (1 - e^{-hs})/h - s e^{-hs}.
    mean = lost / hazard - last * exp(-hazard * last)
    return resumed * lost - mean


@dataclass(frozen=True, slots=True)
class MemberRisk:
    """One member of a gear."""

    ends_in_s: float | None = None
    hazard_per_s: float = 0.0


def outlook_of(
    members: Iterable[MemberRisk], after_loss_tokens_per_s: float = 0.0, recovery_s: float = 0.0
) -> Outlook:
    """A gear ends with its first member, and hazards of members that fall alone add up."""
    risks = list(members)
    ends = [risk.ends_in_s for risk in risks if risk.ends_in_s is not None]
    return Outlook(
        known_end_s=min(ends, default=None),
        hazard_per_s=sum(risk.hazard_per_s for risk in risks),
        after_loss_tokens_per_s=after_loss_tokens_per_s,
        recovery_s=recovery_s,
    )


class LossHistory:
    """How often members of each kind (a partition, a GPU type) were taken, but for known ends.

    The rate is losses / (time watched + prior): a kind that never lost anything is taken to be
    safe, and one loss soon after the start does not count for many. Both fade: what was lost a
    half-life ago counts half.
    """

    def __init__(self, prior_s: float = 6 * 3600.0, half_life_s: float = 7 * 86400.0) -> None:
        assert prior_s > 0 and half_life_s > 0
        self._prior_s, self._half_life_s = prior_s, half_life_s
        self._watched_s: dict[str, float] = {}
        self._losses: dict[str, float] = {}

    def fade(self, seconds: float) -> None:
        """So much time has passed."""
        left = 0.5 ** (seconds / self._half_life_s)
        for counts in (self._watched_s, self._losses):
            for kind in counts:
                counts[kind] *= left

    def watched(self, kind: str, member_seconds: float) -> None:
        """Members of this kind lived for so long, all together."""
        assert member_seconds >= 0
        self._watched_s[kind] = self._watched_s.get(kind, 0.0) + member_seconds

    def lost(self, kind: str) -> None:
        self._losses[kind] = self._losses.get(kind, 0.0) + 1

    def hazard_per_s(self, kind: str) -> float:
        """Losses per second and member."""
        return self._losses.get(kind, 0.0) / (self._watched_s.get(kind, 0.0) + self._prior_s)

    def counts(self) -> dict[str, tuple[float, float]]:
        """Seconds watched and losses by kind: what `remember` takes."""
        kinds = sorted(self._watched_s.keys() | self._losses.keys())
        return {k: (self._watched_s.get(k, 0.0), self._losses.get(k, 0.0)) for k in kinds}

    def remember(self, counts: Mapping[str, tuple[float, float]]) -> None:
        """Go on from what an earlier history had counted."""
        for kind, (watched_s, losses) in counts.items():
            self._watched_s[kind], self._losses[kind] = watched_s, losses
