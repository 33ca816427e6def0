"""How long a phase may take where members of what serves must leave; pure, and no clock."""

from __future__ import annotations

from collections.abc import Iterable

from flexslurm.control.installed import InstalledGear, ReplicaKey
from flexslurm.control.members import Members


def patience_s(
    most_s: float,
    members: Members,
    old: InstalledGear | None,
    going: Iterable[ReplicaKey],
    now: float,
    reserve_s: float,
) -> float:
    """At most so long, or until members of what goes must leave, less what the rest takes."""
    found = () if old is None else (old.find(key) for key in going)
    agents = {agent for one in found if one is not None for agent in one.agents}
    ends = [
        record.leaves_at
        for agent in agents
        if (record := members.agents.get(agent)) is not None and record.leaves_at is not None
    ]
    if not ends:
        return most_s
    left = min(ends) - now
    return max(min(most_s, left - min(reserve_s, left / 2)), 0.0)
