"""Which gear to be in: stay, shift or wait, each with its reason in words and figures; pure.

Membership changes force a shift. Otherwise a gear is left only for a clear gain: the tokens of
staying and of each reachable gear are added up over the horizon, the shift's own slow time and the
risk of losses counted. What comes of a changed load must show in two windows running; what comes of
new GPUs need not, since they are there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from flexslurm.control import reasons
from flexslurm.control.choices import Decision, Observation, Option, PolicySettings
from flexslurm.control.horizon import Outlook
from flexslurm.control.trends import Window
from flexslurm.control.weighing import Weighed, most_tokens, useful, weigh
from flexslurm.gear import Gear, NoGear
from flexslurm.planner.placement import bare_replica


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
    return most_tokens(seen, settings, chosen)


def _which(chosen: Option, seen: Observation, settings: PolicySettings) -> str:
    """What else there is to say of a gear that is taken."""
    rate = useful(seen, settings, None)(chosen.gear)
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


def _optional(seen: Observation, current: Gear, settings: PolicySettings) -> Decision:
    """Whether another gear is worth the shift; asked again with every window."""
    found = _for_gain(seen, current, settings)
    if seen.windows is None:
        return found
    estimate = current.estimates.tokens_per_s
    measured = reasons.measured(seen.windows, settings.window_s, estimate, settings.targets)
    words = found.reason + measured
    again_s = settings.window_s if found.gear is None else None
    return Decision(found.gear, words, found.look_again_s or again_s)


def _for_gain(seen: Observation, current: Gear, settings: PolicySettings) -> Decision:
    others = [o for o in _allowed(seen, settings) if not same_layout(o.gear, current)]
    usual = [o for o in others if o.gear.name != settings.fallback_plan]
    if current.name == settings.default_plan:
        return Decision(None, f"{current.name} is the default plan")
    if not usual:
        return _is_best(seen, current, settings)
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


def _is_best(seen: Observation, current: Gear, settings: PolicySettings) -> Decision:
    rate = f"{useful(seen, settings, None)(current):.0f} tokens/s"
    return Decision(None, f"{current.name} is the best gear for this allocation ({rate})")


def _not_enough(
    seen: Observation, current: Gear, settings: PolicySettings, weighed: Weighed, words: str
) -> Decision:
    """Below the benefit ratio. That the best gear is better than others goes without figures."""
    best = isinstance(seen.best, Gear) and same_layout(seen.best, current)
    if best and weighed.option.words and weighed.ratio <= 1:
        return _is_best(seen, current, settings)
    ratio = f"{settings.migration_benefit_ratio:g}"
    return Decision(None, f"{words}, below the benefit ratio of {ratio}")


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
    weighed = weigh(seen, current, settings, options, horizon, None)
    words = _compared(weighed, current, horizon, seen, settings)
    if not weighed.enough(settings.migration_benefit_ratio):
        return _not_enough(seen, current, settings, weighed, words)
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
    weighed = weigh(seen, current, settings, options, horizon, windows[0])
    words = _compared(weighed, current, horizon, seen, settings)
    ratio = settings.migration_benefit_ratio
    if not weighed.enough(ratio):
        return _not_enough(seen, current, settings, weighed, words)
    if seen.windows is not None and len(seen.windows) < 2:
        return Decision(None, f"{words}: too little is measured yet", settings.window_s)
    chosen = (weighed.option,)
    before = (weigh(seen, current, settings, chosen, horizon, one) for one in windows[1:])
    if not all(one.enough(ratio) for one in before):
        return Decision(None, f"{words}, but the window before says otherwise", settings.window_s)
    return _unless_too_early(seen, settings, weighed.option, words)


def _unless_too_early(
    seen: Observation, settings: PolicySettings, option: Option, words: str
) -> Decision:
    if seen.since_shift_s is not None and seen.since_shift_s < settings.min_action_gap_s:
        wait = settings.min_action_gap_s - seen.since_shift_s
        return Decision(None, f"{words}: {wait:.0f} s too early", wait)
    return Decision(option.gear, words + reasons.evicted(option.price.evicted))


def _horizon(outlook: Outlook, settings: PolicySettings) -> float:
    """The time until the next known loss, where there is one."""
    return settings.horizon_s if outlook.known_end_s is None else outlook.known_end_s


# ------------------------------------------------------------------------------------- words


def _compared(
    weighed: Weighed, current: Gear, horizon: float, seen: Observation, settings: PolicySettings
) -> str:
    option, weight = weighed.option, settings.eviction_risk_weight
    course = reasons.rate(weighed.rate, weighed.every)
    if option.price.seconds > 0:
        during = min(option.price.tokens_per_s, weighed.rate)
        slow_s = reasons.duration(option.price.seconds)
        course = f"{during:.0f} tokens/s for {slow_s}, then {course}"
    course += reasons.redone(option.price.redone, option.price.lost_tokens)
    course += reasons.ends(option.outlook.ends_s, horizon)
    stay = reasons.rate(weighed.stay_rate, weighed.stay_every)
    late = "; nothing meets the targets, so that late tokens count too" if weighed.late else ""
    return (
        f"{option.gear.name}{reasons.about(option.words)} is estimated at "
        f"{weighed.ratio:.2f} times {current.name}: "
        f"{weighed.shift:,.0f} tokens in the next {reasons.duration(horizon)} "
        f"({course}{reasons.risk(option.outlook, weight)}) against {weighed.stay:,.0f} "
        f"({stay}{reasons.risk(seen.outlook, weight)}){late}"
    )


def same_layout(one: Gear, other: Gear) -> bool:
    """Whether two gears have equal replicas, whatever their order and the nodes' numbers."""
    if len(one.replicas) != len(other.replicas):
        return False
    return Counter(map(bare_replica, one.replicas)) == Counter(map(bare_replica, other.replicas))
