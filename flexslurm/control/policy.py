"""Which gear to be in: stay, shift or wait, each with its reason; pure."""

from __future__ import annotations

from dataclasses import dataclass

from flexslurm.gear import Gear, NoGear


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


@dataclass(frozen=True, slots=True)
class PolicySettings:
    min_action_gap_s: float = 180.0
    migration_benefit_ratio: float = 1.3


@dataclass(frozen=True, slots=True)
class Decision:
    """`gear` None: do nothing. `look_again_s`: when the same question may get another answer."""

    gear: Gear | None
    reason: str
    look_again_s: float | None = None


def decide(seen: Observation, settings: PolicySettings) -> Decision:
    """Membership changes force a shift; otherwise a gear is left only for a clear gain."""
    if seen.current is None or seen.lost:
        return _forced_by_loss(seen)
    if seen.leaving:
        return _forced_by_notice(seen)
    return _for_gain(seen, seen.current, settings)


def _forced_by_loss(seen: Observation) -> Decision:
    why = f"lost {', '.join(seen.lost)}" if seen.lost else "no gear is installed"
    for candidate, note in ((seen.best, ""), (seen.best_with_leaving, " with leaving GPUs")):
        if isinstance(candidate, Gear):
            return Decision(candidate, f"{why}: {candidate.name} fits what is left{note}")
    assert isinstance(seen.best, NoGear)
    return Decision(None, f"{why}, and nothing fits what is left: {seen.best.reason}")


def _forced_by_notice(seen: Observation) -> Decision:
    who = ", ".join(seen.leaving)
    if isinstance(seen.best, Gear):
        return Decision(seen.best, f"{who} must leave: {seen.best.name} fits the rest")
    return Decision(
        None, f"{who} must leave, and nothing fits without: serving until then ({seen.best.reason})"
    )


def _for_gain(seen: Observation, current: Gear, settings: PolicySettings) -> Decision:
    best = seen.best
    if isinstance(best, NoGear) or best.replicas == current.replicas:
        return Decision(None, f"{current.name} is the best gear for this allocation")
    now, then = current.estimates.tokens_per_s, best.estimates.tokens_per_s
    ratio = then / now if now > 0 else float("inf")
    if ratio < settings.migration_benefit_ratio:
        return Decision(
            None,
            f"{best.name} is estimated at {ratio:.2f} times {current.name}: below the benefit "
            f"ratio of {settings.migration_benefit_ratio:g}",
        )
    if seen.since_shift_s is not None and seen.since_shift_s < settings.min_action_gap_s:
        wait = settings.min_action_gap_s - seen.since_shift_s
        return Decision(
            None, f"{best.name} would be {ratio:.2f} times better: {wait:.0f} s too early", wait
        )
    return Decision(best, f"{best.name} is estimated at {ratio:.2f} times {current.name}")
