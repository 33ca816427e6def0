"""What a decision is made from, put together from what is known; decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from flexslurm.control.actions import PlanShift
from flexslurm.control.horizon import MemberRisk, Outlook, outlook_of
from flexslurm.control.installed import InstalledGear
from flexslurm.control.members import AgentRecord, GpuAt, Members, signature_of
from flexslurm.control.policy import Observation, Option, ShiftPrice
from flexslurm.gear import Gear, NoGear, Signature, Slot
from flexslurm.messages import Pacing


class Planner(Protocol):
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


def observe(
    now: float,
    members: Members,
    current: InstalledGear | None,
    planner: Planner,
    preview: Callable[[float, Gear], PlanShift | None],
    last_shift_at: float | None,
) -> Observation:
    """`preview`: a shift to a gear as it would be planned now; None where it does not fit."""
    usable = members.usable()
    best = planner.choose(signature_of(usable))
    found = {gear.name: gear for gear in planner.options(signature_of(usable))}
    if isinstance(best, Gear):
        found[best.name] = best
    options = []
    for gear in found.values() if current is not None else ():
        ask = preview(now, gear)
        if ask is not None:
            outlook = _outlook(now, members, ask.new)
            options.append(Option(gear, planner.price(ask), outlook))
    return Observation(
        current=current.gear if current is not None else None,
        lost=tuple(f"replica {n}" for n in current.lost) if current is not None else (),
        leaving=leaving_members(members, current),
        best=best,
        best_with_leaving=planner.choose(signature_of(members.usable(leaving=True))),
        since_shift_s=None if last_shift_at is None else now - last_shift_at,
        options=tuple(options),
        outlook=_outlook(now, members, current) if current is not None else Outlook(),
    )


def leaving_members(members: Members, current: InstalledGear | None) -> tuple[str, ...]:
    """Members of the present gear that must leave or are cordoned."""
    if current is None:
        return ()
    kept = {agent.id for agent in members.usable()}
    return tuple(sorted(members.agents[a].name for a in current.agents - kept))


def _outlook(now: float, members: Members, gear: InstalledGear) -> Outlook:
    """When the gear's members end, as far as it is known: by notice or by walltime."""
    risks = []
    for agent in sorted(gear.agents):
        ends_at = members.agents[agent].ends_at
        risks.append(MemberRisk(None if ends_at is None else max(ends_at - now, 0.0)))
    return outlook_of(risks)
