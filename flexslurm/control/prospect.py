"""What may become of a gear's pilots, and what would serve then; decides nothing.

A known end comes by notice or by walltime, other losses as often as pilots of the kind were lost.
Whoever goes, the best gear of the other pilots follows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from flexslurm.control.horizon import Gone, Outlook, RiskGroup, states
from flexslurm.control.installed import InstalledGear
from flexslurm.control.members import AgentRecord, Members
from flexslurm.control.watch import Watch
from flexslurm.gear import Gear, NoGear, Shape, Signature

TOGETHER_S = 60.0
"""Pilots whose known ends are so close end together."""
MOST_ENDS = 6
"""Known ends that are told apart; with the last of them goes what ends later."""
MOST_GROUPS = 8
"""Kinds of pilots that are told apart; beyond, those that are lost least are taken to stay."""


class Gears(Protocol):
    """What is asked of the planner."""

    def look(self, signature: Signature) -> Gear | NoGear | None: ...


@dataclass(frozen=True, slots=True)
class _Pilot:
    """The nodes of one pilot."""

    nodes: tuple[AgentRecord, ...]
    used: bool

    def ends_in_s(self, now: float) -> float | None:
        ends = [node.ends_at for node in self.nodes if node.ends_at is not None]
        return max(min(ends) - now, 0.0) if ends else None


@dataclass(frozen=True, slots=True)
class _Kind:
    """What pilots of one group have in common."""

    shapes: tuple[tuple[Shape, int], ...]
    """Of those of its GPUs that a gear may use."""
    ends_in_s: float | None
    hazard_per_s: float
    used: bool


def outlook_of(
    now: float,
    members: Members,
    gears: Gears,
    watch: Watch,
    gear: InstalledGear,
    horizon_s: float,
) -> Outlook:
    """What may happen to the members of a gear within the horizon, and what serves then."""
    usable = members.usable()
    staying = {agent.id for agent in usable}
    pilots = _pilots(members, usable, gear)
    ends = _merged(pilots, now, horizon_s)
    kinds: Counter[_Kind] = Counter()
    for name, pilot in pilots.items():
        shapes = Counter(
            Shape(node.hello.gpu_type, len(node.hello.gpus))
            for node in pilot.nodes
            if node.id in staying and node.hello.gpus
        )
        hazard = watch.lives.hazard_per_s(pilot.nodes[0])
        if ends[name] is not None or hazard > 0:
            kinds[_Kind(tuple(sorted(shapes.items())), ends[name], hazard, pilot.used)] += 1
    chosen = sorted(kinds, key=lambda kind: _rank(kind, kinds[kind]))[:MOST_GROUPS]
    groups = tuple(RiskGroup(kinds[k], k.ends_in_s, k.hazard_per_s, k.used) for k in chosen)
    outlook = Outlook(groups)
    if not any(group.used for group in groups):
        return Outlook()
    after = _after(outlook, chosen, _counts(usable), gears, horizon_s)
    # replicas without the lost pilot serve on meanwhile
    after_loss = next((one for one in after.values() if isinstance(one, Gear)), gear.gear)
    recovery_s = watch.recovery_s(after_loss) / len(gear.gear.replicas)
    return Outlook(groups, after, recovery_s)


def _pilots(
    members: Members, usable: list[AgentRecord], gear: InstalledGear
) -> Mapping[str, _Pilot]:
    used = {members.agents[agent].hello.fragment for agent in gear.agents}
    here = {agent.id: agent for agent in usable}
    here |= {agent: members.agents[agent] for agent in gear.agents}
    found: dict[str, list[AgentRecord]] = {}
    for _, agent in sorted(here.items()):
        found.setdefault(agent.hello.fragment, []).append(agent)
    return {name: _Pilot(tuple(nodes), name in used) for name, nodes in sorted(found.items())}


def _merged(pilots: Mapping[str, _Pilot], now: float, horizon_s: float) -> dict[str, float | None]:
    """Ends within the horizon; those that are close together, and the last ones, count as one."""
    ends = {name: pilot.ends_in_s(now) for name, pilot in pilots.items()}
    found: dict[str, float | None] = dict.fromkeys(ends)
    firsts: list[float] = []
    for end, name in sorted((end, name) for name, end in ends.items() if end is not None):
        if end >= horizon_s:
            continue
        if not firsts or (end - firsts[-1] > TOGETHER_S and len(firsts) < MOST_ENDS):
            firsts.append(end)
        found[name] = firsts[-1]
    return found


def _rank(kind: _Kind, count: int) -> tuple[float, float, str]:
    """What must be told apart first: known ends, then frequent losses."""
    end = float("inf") if kind.ends_in_s is None else kind.ends_in_s
    return end, -count * kind.hazard_per_s, str(kind)


def _counts(agents: list[AgentRecord]) -> Counter[Shape]:
    return Counter(Shape(a.hello.gpu_type, len(a.hello.gpus)) for a in agents if a.hello.gpus)


def _after(
    outlook: Outlook,
    kinds: list[_Kind],
    here: Counter[Shape],
    gears: Gears,
    horizon_s: float,
) -> dict[Gone, Gear | float]:
    """The best gear of what is left, for every state that hits the gear and leaves any.

    Where none is known, the tokens are taken to fall with the GPUs.
    """
    found: dict[Gone, Gear | float] = {}
    gpus = sum(shape.gpus * n for shape, n in here.items())
    for gone in states(outlook.groups, horizon_s):
        if not outlook.hits(gone):
            continue
        left = Counter(here)
        for kind, times in zip(kinds, gone, strict=True):
            left.subtract({shape: n * times for shape, n in kind.shapes})
        signature = Signature(tuple(sorted((s, n) for s, n in left.items() if n > 0)))
        best = gears.look(signature) if signature.counts else None
        if isinstance(best, Gear):
            found[gone] = best
        elif best is None and signature.counts:
            found[gone] = signature.gpus() / gpus
    return found
