"""Which gear to be in: stay, shift or wait, each with its reason in words and figures; pure.

Membership changes force a shift. Otherwise a gear is left only for a clear gain: the tokens of
staying and of each reachable gear are added up over the horizon, the shift's own slow time and the
risk of losses counted. What comes of a changed load must show in two windows running; what comes of
new GPUs need not, since they are there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from flexslurm.control import reasons
from flexslurm.control.horizon import Leg, Outlook, expected_tokens
from flexslurm.control.trends import Window, corrected
from flexslurm.gear import Gear, NoGear
from flexslurm.planner.placement import bare_replica


@dataclass(frozen=True, slots=True)
class ShiftPrice:
    """What getting into a gear costs; by default nothing is known to."""

    seconds: float = 0.0
    """Of TRANSFER and CUTOVER together."""
    tokens_per_s: float = 0.0
    """Served meanwhile, on average."""
    lost_tokens: float = 0.0
    """Tokens of answers that recomputing the KV of sequences that cannot be moved takes up."""
    evicted: tuple[str, ...] = ()
    """Sequences that the gear has no room for, the newest first."""
    redone: int = 0
    """Sequences whose KV is computed again, evicted ones among them."""


@dataclass(frozen=True, slots=True)
class Option:
    """A gear that the members that are to stay can hold."""

    gear: Gear
    price: ShiftPrice = field(default_factory=ShiftPrice)
    outlook: Outlook = field(default_factory=Outlook)
    """Of the members it would use."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What a decision is made from."""

    current: Gear | None
    """The gear that serves; None when none does."""
    lost: tuple[str, ...]
    """Names of members of the current gear that are gone."""
    leaving: tuple[str, ...]
    """Names of members of the current gear that are on notice."""
    best: Gear | NoGear
    """For the members that are to stay."""
    best_with_leaving: Gear | NoGear
    since_shift_s: float | None
    """Seconds since the last shift; None when there was none."""
    options: tuple[Option, ...] = ()
    """Gears for the members that are to stay, with costs; `best` counts even if not among them."""
    outlook: Outlook = field(default_factory=Outlook)
    """Of the current gear's members."""
    windows: tuple[Window, ...] | None = None
    """What was measured, the latest window first; None: nothing is being measured."""
    corrections: Mapping[str, float] = field(default_factory=dict)
    """Measured over estimated tokens per second, by gear."""
    first: bool = False
    """No gear has served yet."""


@dataclass(frozen=True, slots=True)
class PolicySettings:
    min_action_gap_s: float = 180.0
    migration_benefit_ratio: float = 1.3
    """1 asks for no gain: a gear is then left for any that is at least as fast."""
    eviction_risk_weight: float = 0.8
    plans: tuple[str, ...] | None = None
    """Names of the only gears that may be installed; None: the table decides."""
    default_plan: str | None = None
    fallback_plan: str | None = None
    horizon_s: float = 3600.0
    """Where no loss is known of."""
    window_s: float = 300.0

    def allows(self, gear: Gear) -> bool:
        named = (self.default_plan, self.fallback_plan)
        return self.plans is None or gear.name in self.plans or gear.name in named


@dataclass(frozen=True, slots=True)
class Decision:
    """`gear` None: do nothing. `look_again_s`: when the same question may get another answer."""

    gear: Gear | None
    reason: str
    look_again_s: float | None = None


def decide(seen: Observation, settings: PolicySettings) -> Decision:
    """Membership changes force a shift; otherwise a gear is left only for a clear gain."""
    if seen.current is None or seen.lost:
        return _forced_by_loss(seen, settings)
    if seen.leaving:
        return _forced_by_notice(seen, settings)
    return _optional(seen, seen.current, settings)


# ------------------------------------------------------------------------------------ forced


def _forced_by_loss(seen: Observation, settings: PolicySettings) -> Decision:
    why = f"lost {', '.join(seen.lost)}" if seen.lost else "nothing serves"
    chosen = _pick(seen, settings)
    if seen.first:
        why = "the first gear" if chosen is not None else _awaited(seen.best)
    if chosen is not None:
        words = f"{why}: {chosen.gear.name} fits {'what is here' if seen.first else 'what is left'}"
        return Decision(chosen.gear, words + _which(chosen, seen, settings))
    late = seen.best_with_leaving
    if isinstance(late, Gear) and settings.allows(late):
        return Decision(late, f"{why}: {late.name} fits what is left with leaving GPUs")
    what = "" if seen.first else ", and nothing fits what is left"
    return Decision(None, f"{why}{what}: {_why_not(seen, settings)}")


def _awaited(best: Gear | NoGear) -> str:
    """Before anything has served."""
    short = isinstance(best, NoGear) and best.short_bytes
    return "waiting for more GPUs" if short else "waiting for the first gear"


def _forced_by_notice(seen: Observation, settings: PolicySettings) -> Decision:
    who = ", ".join(seen.leaving)
    chosen = _pick(seen, settings)
    if chosen is not None:
        words = f"{who} must leave: {chosen.gear.name} fits the rest"
        return Decision(chosen.gear, words + _which(chosen, seen, settings))
    return Decision(
        None,
        f"{who} must leave, and nothing fits without: serving until then "
        f"({_why_not(seen, settings)})",
    )


def _pick(seen: Observation, settings: PolicySettings) -> Option | None:
    """The gear for a forced shift: the default plan, else the most tokens, else the fallback."""
    found = _allowed(seen, settings)
    usual = [o for o in found if o.gear.name != settings.fallback_plan] or found
    chosen = [o for o in usual if o.gear.name == settings.default_plan] or usual
    if not chosen:
        return None
    horizon = min(_horizon(o.outlook, settings) for o in chosen)
    return max(chosen, key=lambda o: _shifted(o, seen, settings, horizon, None))


def _which(chosen: Option, seen: Observation, settings: PolicySettings) -> str:
    """What else there is to say of a gear that is taken."""
    rate = _useful(seen, None)(chosen.gear)
    words = f" ({rate:.0f} tokens/s{reasons.risk(chosen.outlook, settings.eviction_risk_weight)})"
    if chosen.gear.name == settings.default_plan:
        words += " and is the default plan"
    elif chosen.gear.name == settings.fallback_plan:
        words += " and is the fallback plan"
    return words + reasons.evicted(chosen.price.evicted)


def _why_not(seen: Observation, settings: PolicySettings) -> str:
    if isinstance(seen.best, NoGear):
        return seen.best.reason
    return f"{seen.best.name} would, but only {', '.join(settings.plans or ())} may be installed"


def _allowed(seen: Observation, settings: PolicySettings) -> tuple[Option, ...]:
    """All gears that may be installed now; `best` first."""
    found = {option.gear.name: option for option in seen.options}
    if isinstance(seen.best, Gear):
        own = found.pop(seen.best.name, Option(seen.best))
        found = {own.gear.name: own, **found}
    return tuple(option for option in found.values() if settings.allows(option.gear))


# ---------------------------------------------------------------------------------- optional


@dataclass(frozen=True, slots=True)
class _Weighed:
    """The best gear to go to, against staying."""

    option: Option
    stay: float
    shift: float
    rate: float
    """Useful tokens per second after the shift."""
    stay_rate: float

    @property
    def ratio(self) -> float:
        if self.stay > 0:
            return self.shift / self.stay
        return float("inf") if self.shift > 0 else 1.0

    def enough(self, benefit_ratio: float) -> bool:
        if benefit_ratio <= 1 and self.rate >= self.stay_rate:
            return True
        return self.ratio >= benefit_ratio


def _optional(seen: Observation, current: Gear, settings: PolicySettings) -> Decision:
    """Whether another gear is worth the shift; asked again with every window."""
    found = _for_gain(seen, current, settings)
    if seen.windows is None:
        return found
    estimate = current.estimates.tokens_per_s
    words = found.reason + reasons.measured(seen.windows, settings.window_s, estimate)
    again_s = settings.window_s if found.gear is None else None
    return Decision(found.gear, words, found.look_again_s or again_s)


def _for_gain(seen: Observation, current: Gear, settings: PolicySettings) -> Decision:
    others = [o for o in _allowed(seen, settings) if not same_layout(o.gear, current)]
    usual = [o for o in others if o.gear.name != settings.fallback_plan]
    if current.name == settings.default_plan:
        return Decision(None, f"{current.name} is the default plan")
    if not usual:
        rate = f"{_useful(seen, None)(current):.0f} tokens/s"
        return Decision(None, f"{current.name} is the best gear for this allocation ({rate})")
    default = [o for o in usual if o.gear.name == settings.default_plan]
    if default:
        return _unless_too_early(
            seen, settings, default[0], f"{default[0].gear.name} is the default plan and fits"
        )
    horizon = _horizon(seen.outlook, settings)
    new_gpus = [o for o in usual if not current.signature.covers(o.gear.signature)]
    decision = _for_new_gpus(seen, current, settings, new_gpus, horizon) if new_gpus else None
    if decision is not None and decision.gear is not None:
        return decision
    same = [o for o in usual if current.signature.covers(o.gear.signature)]
    if not same:
        assert decision is not None
        return decision
    other = _for_load(seen, current, settings, same, horizon)
    return other if decision is None or other.gear is not None else _neither(decision, other)


def _neither(one: Decision, other: Decision) -> Decision:
    """Two reasons to do nothing; asked again when the first of them may change."""
    waits = [w for w in (one.look_again_s, other.look_again_s) if w is not None]
    return Decision(None, f"{one.reason}; {other.reason}", min(waits, default=None))


def _for_new_gpus(
    seen: Observation,
    current: Gear,
    settings: PolicySettings,
    options: Sequence[Option],
    horizon: float,
) -> Decision:
    """Other GPUs than before: what they can do counts, whatever the load was."""
    weighed = _weigh(seen, current, settings, options, horizon, None)
    words = _compared(weighed, current, horizon, seen, settings)
    if not weighed.enough(settings.migration_benefit_ratio):
        return Decision(None, f"{words}, below the benefit ratio of {_ratio(settings)}")
    return _unless_too_early(seen, settings, weighed.option, words)


def _for_load(
    seen: Observation,
    current: Gear,
    settings: PolicySettings,
    options: Sequence[Option],
    horizon: float,
) -> Decision:
    """The same GPUs: only a gain in useful tokens counts, in two windows running."""
    windows: tuple[Window | None, ...] = (seen.windows or ())[:2] or (None,)
    weighed = [_weigh(seen, current, settings, options, horizon, window) for window in windows]
    words = _compared(weighed[0], current, horizon, seen, settings)
    good = [one.enough(settings.migration_benefit_ratio) for one in weighed]
    if not good[0]:
        return Decision(None, f"{words}, below the benefit ratio of {_ratio(settings)}")
    if seen.windows is not None and len(seen.windows) < 2:
        return Decision(None, f"{words}: too little is measured yet", settings.window_s)
    names = {one.option.gear.name for one in weighed}
    if not all(good) or len(names) > 1:
        return Decision(None, f"{words}, but the window before says otherwise", settings.window_s)
    return _unless_too_early(seen, settings, weighed[0].option, words)


def _unless_too_early(
    seen: Observation, settings: PolicySettings, option: Option, words: str
) -> Decision:
    if seen.since_shift_s is not None and seen.since_shift_s < settings.min_action_gap_s:
        wait = settings.min_action_gap_s - seen.since_shift_s
        return Decision(None, f"{words}: {wait:.0f} s too early", wait)
    return Decision(option.gear, words + reasons.evicted(option.price.evicted))


def _weigh(
    seen: Observation,
    current: Gear,
    settings: PolicySettings,
    options: Sequence[Option],
    horizon: float,
    window: Window | None,
) -> _Weighed:
    """The option with most tokens, against staying, under one window's load."""
    useful = _useful(seen, window)
    stay_rate = useful(current)
    outlook = _weighted(seen.outlook, settings)
    stay = expected_tokens([Leg(stay_rate)], outlook, horizon)
    tokens = [_shifted(option, seen, settings, horizon, window) for option in options]
    best = max(range(len(options)), key=lambda i: (tokens[i], -options[i].price.seconds))
    return _Weighed(options[best], stay, tokens[best], useful(options[best].gear), stay_rate)


def _shifted(
    option: Option,
    seen: Observation,
    settings: PolicySettings,
    horizon: float,
    window: Window | None,
) -> float:
    """Tokens of going there now."""
    rate = _useful(seen, window)(option.gear)
    legs = [Leg(min(option.price.tokens_per_s, rate), option.price.seconds), Leg(rate)]
    whole = expected_tokens(legs, _weighted(option.outlook, settings), horizon)
    return max(whole - option.price.lost_tokens, 0.0)


def _useful(seen: Observation, window: Window | None) -> Callable[[Gear], float]:
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


def _horizon(outlook: Outlook, settings: PolicySettings) -> float:
    """The time until the next known loss, where there is one."""
    return settings.horizon_s if outlook.known_end_s is None else outlook.known_end_s


def _weighted(outlook: Outlook, settings: PolicySettings) -> Outlook:
    """Losses that may come count by their weight."""
    return Outlook(
        outlook.known_end_s,
        outlook.hazard_per_s * settings.eviction_risk_weight,
        outlook.after_loss_tokens_per_s,
        outlook.recovery_s,
    )


# ------------------------------------------------------------------------------------- words


def _compared(
    weighed: _Weighed, current: Gear, horizon: float, seen: Observation, settings: PolicySettings
) -> str:
    option, weight = weighed.option, settings.eviction_risk_weight
    course = f"{weighed.rate:.0f} tokens/s"
    if option.price.seconds > 0:
        during = min(option.price.tokens_per_s, weighed.rate)
        slow_s = reasons.duration(option.price.seconds)
        course = f"{during:.0f} tokens/s for {slow_s}, then {course}"
    course += reasons.redone(option.price.redone, option.price.lost_tokens)
    return (
        f"{option.gear.name} is estimated at {weighed.ratio:.2f} times {current.name}: "
        f"{weighed.shift:,.0f} tokens in the next {reasons.duration(horizon)} "
        f"({course}{reasons.risk(option.outlook, weight)}) against {weighed.stay:,.0f} "
        f"({weighed.stay_rate:.0f} tokens/s{reasons.risk(seen.outlook, weight)})"
    )


def _ratio(settings: PolicySettings) -> str:
    return f"{settings.migration_benefit_ratio:g}"


def same_layout(one: Gear, other: Gear) -> bool:
    """Whether two gears have equal replicas, whatever their order and the nodes' numbers."""
    if len(one.replicas) != len(other.replicas):
        return False
    return Counter(map(bare_replica, one.replicas)) == Counter(map(bare_replica, other.replicas))
