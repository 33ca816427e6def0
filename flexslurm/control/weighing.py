"""Gears in useful tokens over the horizon: staying against going; pure.

Useful is what is wanted and comes within the targets (time to the first token, time per token). Of
the gear that serves, the share within the targets is measured. Of others it is estimated: what they
can do with batches so small that the targets hold. A load that no gear carries is late in the next
gear as it is in this one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from flexslurm.control.choices import Observation, Option, PolicySettings
from flexslurm.control.horizon import Gone, Leg, Outlook, RiskGroup, expected_tokens
from flexslurm.control.trends import Window, corrected
from flexslurm.gear import Gear


@dataclass(frozen=True, slots=True)
class Weighed:
    """The best gear to go to, against staying."""

    option: Option
    stay: float
    """Useful tokens over the horizon where nothing is done."""
    shift: float
    """The same of going there, what the shift costs taken off."""
    rate: float
    """Useful tokens per second after the shift."""
    stay_rate: float
    every: float = 0.0
    """As `rate`, with what misses the targets."""
    stay_every: float = 0.0
    late: bool = False
    """Nothing meets the targets: what misses them was counted too."""

    @property
    def ratio(self) -> float:
        if self.stay > 0:
            return self.shift / self.stay
        return float("inf") if self.shift > 0 else 1.0

    def enough(self, benefit_ratio: float) -> bool:
        """Whether it is worth going; for a gear that is not the best, there must be some gain."""
        if benefit_ratio <= 1 and self.rate >= self.stay_rate and not self.option.words:
            return True
        return self.ratio >= benefit_ratio and (self.shift > self.stay or not self.option.words)


Rate = Callable[[Gear], float]


def weigh(
    seen: Observation,
    current: Gear,
    settings: PolicySettings,
    options: Sequence[Option],
    horizon_s: float,
    window: Window | None,
) -> Weighed:
    """The option with most tokens, against staying, under one window's load."""
    every = wanted(seen, window)
    found = _weighed(seen, current, settings, options, horizon_s, useful(seen, settings, window))
    late = found.stay <= 0 and found.shift <= 0 and bool(settings.targets)
    if late:
        found = _weighed(seen, current, settings, options, horizon_s, every)
    return replace(found, every=every(found.option.gear), stay_every=every(current), late=late)


def _weighed(
    seen: Observation,
    current: Gear,
    settings: PolicySettings,
    options: Sequence[Option],
    horizon_s: float,
    rate: Rate,
) -> Weighed:
    weight = settings.eviction_risk_weight
    stay = _course([Leg(rate(current))], seen.outlook, horizon_s, rate, weight)
    tokens = [shifted(option, rate, horizon_s, weight) for option in options]
    best = max(range(len(options)), key=lambda i: (tokens[i], -options[i].price.seconds))
    return Weighed(options[best], stay, tokens[best], rate(options[best].gear), rate(current))


def most_tokens(seen: Observation, settings: PolicySettings, options: Sequence[Option]) -> Option:
    """Of gears to go to whatever they cost, the one with most tokens over the whole horizon."""
    weight = settings.eviction_risk_weight

    def tokens(option: Option) -> tuple[float, float]:
        return tuple(
            shifted(option, rate, settings.horizon_s, weight)
            for rate in (useful(seen, settings, None), wanted(seen, None))
        )  # type: ignore[return-value]

    return max(options, key=tokens)


def shifted(option: Option, rate: Rate, horizon_s: float, risk_weight: float) -> float:
    """Tokens of going there now."""
    after, price = rate(option.gear), option.price
    legs = [Leg(min(price.tokens_per_s, after), price.seconds), Leg(after)]
    whole = _course(legs, option.outlook, horizon_s, rate, risk_weight)
    return max(whole - price.lost_tokens, 0.0)


def _course(
    legs: Sequence[Leg], outlook: Outlook, horizon_s: float, rate: Rate, risk_weight: float
) -> float:
    """Losses that may come count by their weight, and no loss is a gain."""
    groups = [
        RiskGroup(one.count, one.ends_in_s, one.hazard_per_s * risk_weight, one.used)
        for one in outlook.groups
    ]
    rates: dict[str, float] = {}

    def without(gone: Gone) -> float:
        if not outlook.hits(gone):
            return float("inf")
        left = outlook.after.get(gone, 0.0)
        if isinstance(left, float):
            return left * legs[-1].tokens_per_s
        if left.name not in rates:
            rates[left.name] = rate(left)
        return rates[left.name]

    return expected_tokens(legs, groups, without, outlook.recovery_s, horizon_s)


# ------------------------------------------------------------------------------------- rates


def wanted(seen: Observation, window: Window | None) -> Rate:
    """Tokens per second of a gear as measured or corrected, and no more than are wanted.

    What the present gear was seen to do it can do, whatever was estimated.
    """
    demand = window.demand_tokens_per_s if window is not None else None

    def rate(gear: Gear) -> float:
        own = corrected(gear.estimates.tokens_per_s, gear.name, seen.corrections)
        if window is None or demand is None:
            return own
        if gear == seen.current:
            own = max(own, window.p95_tokens_per_s)
        return min(own, demand)

    return rate


def useful(seen: Observation, settings: PolicySettings, window: Window | None) -> Rate:
    """Of what is wanted of a gear, what comes within the targets."""
    every = wanted(seen, window)
    if not settings.targets:
        return every
    share = settings.targets.share(window) if window is not None else None

    def rate(gear: Gear) -> float:
        own = every(gear)
        if gear == seen.current and share is not None:
            return own * share
        found = min(own, seen.within.get(gear.name, own))
        if window is None or not window.saturated:
            return found
        found = min(found, own * seen.attained.get(gear.name, 1.0))
        if (window.offered_tokens_per_s or 0.0) > own:
            found *= settings.targets.first_share(window)
        return found

    return rate
