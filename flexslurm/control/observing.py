"""What a decision is made from, put together from what is known; decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from flexslurm.control.actions import PlanShift
from flexslurm.control.cards import Cards
from flexslurm.control.choices import HORIZON_S, Observation, Option, ShiftPrice
from flexslurm.control.horizon import Outlook
from flexslurm.control.installed import InstalledGear
from flexslurm.control.lives import Lives
from flexslurm.control.members import AgentRecord, GpuAt, Members, signature_of
from flexslurm.control.policy import same_layout
from flexslurm.control.prospect import outlook_of
from flexslurm.control.trends import corrected
from flexslurm.control.watch import Watch
from flexslurm.gear import Gear, NoGear, Signature, Slot
from flexslurm.messages import Pacing

_SOON_S = HORIZON_S
"""Ends that are further off are no reason to look for a gear without."""


class GearSource(Protocol):
    """What the controller asks of the planner; pure and quick."""

    def meet(self, cards: Cards) -> None:
        """What cards there are now: whatever is chosen from now on fits them."""
        ...

    def choose(self, signature: Signature) -> Gear | NoGear:
        """The best gear for an allocation that is known at once; a better one may be planned."""
        ...

    def look(self, signature: Signature) -> Gear | NoGear | None:
        """As `choose`, but only what is known: nothing is planned for it."""
        ...

    def options(self, signature: Signature) -> Sequence[Gear]:
        """Gears that were named for use and that an allocation can hold."""
        ...

    def others(
        self, agents: Sequence[AgentRecord], current: InstalledGear | None
    ) -> Sequence[Gear]:
        """Gears for these besides the best, such as one that is cheaper to reach."""
        ...

    def place(
        self, gear: Gear, agents: Sequence[AgentRecord], current: InstalledGear | None
    ) -> dict[Slot, GpuAt]:
        """Raises CapacityError where the agents cannot hold the gear."""
        ...

    def price(self, ask: PlanShift) -> ShiftPrice:
        """What getting into a gear would cost now."""
        ...

    def within_targets(self, gear: Gear, speed: float) -> float:
        """Tokens per second that come within the service's targets; `speed`: over estimated."""
        ...

    def parking_s(self, current: InstalledGear) -> float | None:
        """How long parking the gear's live KV in files takes; None where it cannot be parked."""
        ...

    def pacing(self, gear: Gear) -> dict[Slot, Pacing]:
        """How virtual GPUs are to act, by slot; slots of real ones are left out."""
        ...


@dataclass(frozen=True, slots=True)
class Known:
    """Where observations come from. Read only."""

    members: Members
    planner: GearSource
    watch: Watch
    preview: Callable[[float, Gear], PlanShift | None]
    """A shift to a gear as it would be planned now; None where it does not fit."""


def observe(
    now: float,
    known: Known,
    current: InstalledGear | None,
    last_shift_at: float | None,
    *,
    first: bool,
) -> Observation:
    """What the policy is to decide from now; `first`: no gear has served yet."""
    members, planner, watch = known.members, known.planner, known.watch
    planner.meet(members.cards())
    best = planner.choose(signature_of(members.usable()))
    outlook = _outlook(now, known, current) if current is not None else Outlook()
    options = tuple(_options(now, best, known, current))
    now_and_then = [option.gear for option in options] + [
        gear
        for one in (outlook, *(option.outlook for option in options))
        for gear in one.after.values()
        if isinstance(gear, Gear)
    ]
    if current is not None:
        now_and_then.append(current.gear)
    return Observation(
        current=current.gear if current is not None else None,
        lost=tuple(f"replica {n}" for n in current.lost) if current is not None else (),
        leaving=leaving_members(members, current),
        best=best,
        best_with_leaving=planner.choose(signature_of(members.usable(leaving=True))),
        since_shift_s=None if last_shift_at is None else now - last_shift_at,
        options=options,
        outlook=outlook,
        windows=watch.windows(now),
        corrections=watch.corrections,
        within=_within(now_and_then, known),
        attained=watch.attained,
        first=first,
    )


def _options(
    now: float, best: Gear | NoGear, known: Known, current: InstalledGear | None
) -> Iterator[Option]:
    """What can be gone to, with what it costs and what may become of it."""
    for gear, words in _reachable(now, best, known, current).values():
        ask = known.preview(now, gear)
        if ask is None:
            continue
        price = ShiftPrice()
        if current is not None:
            price = _corrected(known.planner.price(ask), current.gear, known.watch.corrections)
        yield Option(gear, price, _outlook(now, known, ask.new), words)


def _outlook(now: float, known: Known, gear: InstalledGear) -> Outlook:
    return outlook_of(now, known.members, known.planner, known.watch, gear, HORIZON_S)


def _within(gears: Iterable[Gear], known: Known) -> dict[str, float]:
    """What each can give within the targets, as fast as it was measured to be."""
    if not known.watch.targets:
        return {}
    factors = known.watch.corrections
    return {
        gear.name: known.planner.within_targets(gear, corrected(1.0, gear.name, factors))
        for gear in {gear.name: gear for gear in gears}.values()
    }


def _reachable(
    now: float, best: Gear | NoGear, known: Known, current: InstalledGear | None
) -> dict[str, tuple[Gear, str]]:
    """By name, with why they are looked at, where that is not plain; the best gear last.

    Named for use, proven under load, without pilots that may be lost or end; cheaper to reach, or
    nearly as good.
    """
    usable, planner = known.members.usable(), known.planner
    present = signature_of(usable)
    found = {gear.name: (gear, "") for gear in planner.options(present)}
    for gear in known.watch.proven():
        if present.covers(gear.signature):
            found.setdefault(gear.name, (gear, ""))
    for safer in _safer(now, usable, known.watch.lives):
        choice = planner.choose(signature_of(safer)) if safer else None
        if isinstance(choice, Gear):
            found.setdefault(choice.name, (choice, ""))
    if isinstance(best, Gear):
        found[best.name] = best, ""
    mine = [current.gear] if current is not None else []
    for gear in planner.others(usable, current) if current is not None else ():
        if not any(same_layout(gear, one) for one in (*mine, *(one for one, _ in found.values()))):
            found[gear.name] = gear, gear.reason
    return found


def _safer(now: float, usable: Sequence[AgentRecord], lives: Lives) -> list[list[AgentRecord]]:
    """Without each kind of pilot that is lost at times, and without those that end soon.

    Of those that end soon, without the one that is first, and without all.
    """
    risky = sorted({lives.kind_of(one) for one in usable if lives.hazard_per_s(one) > 0})
    found = [[one for one in usable if lives.kind_of(one) != kind] for kind in risky]
    ends = {one.id: one.ends_at for one in usable if one.ends_at is not None}
    soon = {agent: end for agent, end in ends.items() if end - now <= _SOON_S}
    if soon:
        first = min(soon.values())
        pilots = {one.hello.fragment for one in usable if soon.get(one.id) == first}
        found.append([one for one in usable if one.hello.fragment not in pilots])
        found.append([one for one in usable if one.id not in soon])
    return found


def _corrected(price: ShiftPrice, current: Gear, factors: Mapping[str, float]) -> ShiftPrice:
    """What serves meanwhile is the present gear: its estimate is off as it was measured to be."""
    return replace(price, tokens_per_s=corrected(price.tokens_per_s, current.name, factors))


def leaving_members(members: Members, current: InstalledGear | None) -> tuple[str, ...]:
    """Members of the present gear that must leave or are cordoned."""
    if current is None:
        return ()
    kept = {agent.id for agent in members.usable()}
    return tuple(sorted(members.agents[a].name for a in current.agents - kept))
