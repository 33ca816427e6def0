"""What decisions are made from and what they are: only values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flexslurm.control.horizon import Outlook
from flexslurm.control.trends import Targets, Window
from flexslurm.gear import Gear, NoGear

HORIZON_S = 3600.0
"""How far decisions look where no end is known of."""


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
    words: str = ""
    """Why it is looked at, unless it is the best gear for the allocation."""


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
    within: Mapping[str, float] = field(default_factory=dict)
    """Tokens per second that gears can give within the targets, by estimate; the others: all."""
    attained: Mapping[str, float] = field(default_factory=dict)
    """Share of tokens within the targets that gears had when they were last saturated."""
    first: bool = False
    """No gear has served yet."""


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """See `DecisionSettings` and `SchedulingSettings` of the service file."""

    min_action_gap_s: float = 180.0
    """Between an optional shift and whatever shift was before it."""
    migration_benefit_ratio: float = 1.3
    """Tokens after over tokens without, at least; 1 asks for no gain: a gear is then left for any
    that is at least as fast."""
    eviction_risk_weight: float = 0.8
    """Of losses that may come; 0 ignores them."""
    plans: tuple[str, ...] | None = None
    """Names of the only gears that may be installed; None: the table decides."""
    default_plan: str | None = None
    fallback_plan: str | None = None
    horizon_s: float = HORIZON_S
    """Where no end is known of."""
    window_s: float = 300.0
    """How long the windows are that measurements are averaged over."""
    targets: Targets = field(default_factory=Targets)
    """Tokens that miss them are of no use."""

    def allows(self, gear: Gear) -> bool:
        named = (self.default_plan, self.fallback_plan)
        return self.plans is None or gear.name in self.plans or gear.name in named


@dataclass(frozen=True, slots=True)
class Decision:
    """`gear` None: do nothing. `look_again_s`: when the same question may get another answer."""

    gear: Gear | None
    reason: str
    look_again_s: float | None = None
