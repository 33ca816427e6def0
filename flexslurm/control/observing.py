"""What a decision is made from, put together from what is known; decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from flexslurm.control.actions import PlanShift
from flexslurm.control.horizon import MemberRisk, Outlook, outlook_of
from flexslurm.control.installed import InstalledGear
from flexslurm.control.lives import Lives
from flexslurm.control.members import AgentRecord, GpuAt, Members, signature_of
from flexslurm.control.policy import Observation, Option, ShiftPrice
from flexslurm.control.trends import corrected
from flexslurm.control.watch import Watch
from flexslurm.gear import Gear, NoGear, Signature, Slot
from flexslurm.messages import Pacing

_TOGETHER_S = 60.0
"""Pilots whose known ends are so close end together."""
_SOON_S = 3600.0
"""Ends that are further off are no reason to look for a gear without."""


class GearSource(Protocol):
    """What the controller asks of the planner; pure and quick."""

    def choose(self, signature: Signature) -> Gear | NoGear: ...

    def options(self, signature: Signature) -> Sequence[Gear]:
        """Gears that were named for use and that an allocation can hold."""
        ...

    def place(
        self, gear: Gear, agents: Sequence[AgentRecord], current: InstalledGear | None
    ) -> dict[Slot, GpuAt]:
        """Raises CapacityError where the agents cannot hold the gear."""
        ...

    def price(self, ask: PlanShift) -> ShiftPrice:
        """What getting into a gear would cost now."""
        ...

    def parking_s(self, current: InstalledGear) -> float | None:
        """How long parking the gear's live KV in files takes; None where it cannot be parked."""
        ...

    def pacing(self, gear: Gear) -> dict[Slot, Pacing]: ...


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
    """`first`: no gear has served yet."""
    members, planner, watch = known.members, known.planner, known.watch
    best = planner.choose(signature_of(members.usable()))
    options = []
    for gear in _reachable(now, best, known):
        ask = known.preview(now, gear)
        if ask is not None:
            price = ShiftPrice()
            if current is not None:
                price = _corrected(planner.price(ask), current.gear, watch.corrections)
            options.append(Option(gear, price, _outlook(now, known, ask.new)))
    return Observation(
        current=current.gear if current is not None else None,
        lost=tuple(f"replica {n}" for n in current.lost) if current is not None else (),
        leaving=leaving_members(members, current),
        best=best,
        best_with_leaving=planner.choose(signature_of(members.usable(leaving=True))),
        since_shift_s=None if last_shift_at is None else now - last_shift_at,
        options=tuple(options),
        outlook=_outlook(now, known, current) if current is not None else Outlook(),
        windows=watch.windows(now),
        corrections=watch.corrections,
        first=first,
    )


def _reachable(now: float, best: Gear | NoGear, known: Known) -> list[Gear]:
    """Named for use, proven under load, without pilots that may be lost or end; the best gear."""
    usable, planner = known.members.usable(), known.planner
    present = signature_of(usable)
    found = {gear.name: gear for gear in planner.options(present)}
    for gear in known.watch.proven():
        if present.covers(gear.signature):
            found.setdefault(gear.name, gear)
    for safer in _safer(now, usable, known.watch.lives):
        choice = planner.choose(signature_of(safer)) if safer else None
        if isinstance(choice, Gear):
            found.setdefault(choice.name, choice)
    if isinstance(best, Gear):
        found[best.name] = best
    return list(found.values())


def _safer(now: float, usable: Sequence[AgentRecord], lives: Lives) -> list[list[AgentRecord]]:
    """Without each kind of pilot that is lost at times, and without those that end soon."""
    risky = sorted({lives.kind_of(one) for one in usable if lives.hazard_per_s(one) > 0})
    found = [[one for one in usable if lives.kind_of(one) != kind] for kind in risky]
    lasting = [one for one in usable if one.ends_at is None or one.ends_at - now > _SOON_S]
    return found if len(lasting) == len(usable) else [*found, lasting]


def _corrected(price: ShiftPrice, current: Gear, factors: Mapping[str, float]) -> ShiftPrice:
    """What serves meanwhile is the present gear: its estimate is off as it was measured to be."""
    return replace(price, tokens_per_s=corrected(price.tokens_per_s, current.name, factors))


def leaving_members(members: Members, current: InstalledGear | None) -> tuple[str, ...]:
    """Members of the present gear that must leave or are cordoned."""
    if current is None:
        return ()
    kept = {agent.id for agent in members.usable()}
    return tuple(sorted(members.agents[a].name for a in current.agents - kept))


def _outlook(now: float, known: Known, gear: InstalledGear) -> Outlook:
    """When the gear's pilots end, as far as it is known, how likely they go before, and what then.

    A known end comes by notice or by walltime. After the first loss the best gear of the other
    pilots serves.
    """
    agents, lives = known.members.agents, known.watch.lives
    pilots: dict[str, list[AgentRecord]] = {}
    for agent in sorted(gear.agents):
        pilots.setdefault(agents[agent].hello.fragment, []).append(agents[agent])
    risks = {
        name: MemberRisk(_ends_in(now, nodes), lives.hazard_per_s(nodes[0]))
        for name, nodes in pilots.items()
    }
    outlook = outlook_of(risks.values())
    if outlook.known_end_s is None and not outlook.hazard_per_s:
        return outlook
    after = _after_loss(now, known, risks)
    if after is None:
        return outlook
    rate = corrected(after.estimates.tokens_per_s, after.name, known.watch.corrections)
    # replicas without the lost pilot serve on meanwhile
    recovery_s = known.watch.recovery_s(after) / len(gear.gear.replicas)
    return outlook_of(risks.values(), rate, recovery_s)


def _ends_in(now: float, nodes: Sequence[AgentRecord]) -> float | None:
    ends = [node.ends_at for node in nodes if node.ends_at is not None]
    return max(min(ends) - now, 0.0) if ends else None


def _after_loss(now: float, known: Known, risks: Mapping[str, MemberRisk]) -> Gear | None:
    """The gear without the pilot that goes first, or most likely, and those that end with it."""
    never = float("inf")

    def ends(risk: MemberRisk) -> float:
        return never if risk.ends_in_s is None else risk.ends_in_s

    first = min(risks, key=lambda name: (ends(risks[name]), -risks[name].hazard_per_s))
    last_s = ends(risks[first]) + _TOGETHER_S
    rest = [
        agent
        for agent in known.members.usable()
        if agent.hello.fragment != first
        and (agent.ends_at is None or agent.ends_at - now > last_s or last_s == never)
    ]
    after = known.planner.choose(signature_of(rest)) if rest else None
    return after if isinstance(after, Gear) else None
