"""When Slurm takes the GPUs and nothing else can hold the model: KV is parked in time; pure.

    serving ─▶ parking ─▶ gone          (parking ─▶ serving, if the notice is taken back)

The gear serves as long as parking its live KV leaves time for. Then its streams pause, the KV goes
to files, most valuable first, and the GPUs are given back. It is what the first pilots that come
back begin with; whatever is not parked in time is recomputed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flexslurm.control.actions import Action, Detach, DropAway, ParkAway, Record, Say
from flexslurm.control.holdings import Holdings
from flexslurm.control.installed import InstalledGear, ReplicaKey
from flexslurm.control.members import AgentRecord, AgentState, Members

RESERVE_S = 0.5
"""Left of the notice when parking must have ended: to close epochs and give the GPUs back."""


@dataclass(slots=True)
class Farewell:
    """Replicas whose KV is being parked."""

    keys: tuple[ReplicaKey, ...]
    ends_at: float
    parked: bool = False


class Farewells:
    """At most one is under way."""

    def __init__(self, members: Members, holdings: Holdings) -> None:
        self._members, self._holdings = members, holdings
        self.under_way: Farewell | None = None

    def is_due(
        self, now: float, current: InstalledGear, needed: Callable[[InstalledGear], float | None]
    ) -> bool:
        """Whether to begin; `needed`: how long parking takes, None where it cannot be done."""
        ends_at = self._ends_at(current)
        if self.under_way is not None or ends_at is None:
            return False
        left_s, needed_s = ends_at - RESERVE_S - now, needed(current)
        return needed_s is not None and 0.0 < left_s <= needed_s

    def _ends_at(self, current: InstalledGear) -> float | None:
        """When the first member on notice goes."""
        ends = [agent.leaves_at for agent in self._leaving(current) if agent.leaves_at is not None]
        return min(ends, default=None)

    def _leaving(self, current: InstalledGear) -> list[AgentRecord]:
        agents = (self._members.agents[one] for one in sorted(current.agents))
        return [agent for agent in agents if agent.state is AgentState.LEAVING]

    def begin(self, now: float, current: InstalledGear) -> list[Action]:
        leaving = {agent.id for agent in self._leaving(current)}
        ends_at = self._ends_at(current)
        assert leaving and ends_at is not None, "nobody leaves"
        keys = tuple(one.key for _, one in sorted(current.replicas.items()) if one.agents & leaving)
        self.under_way = Farewell(keys, ends_at - RESERVE_S)
        left_s = self.under_way.ends_at - now
        return [
            Record({"event": "parking", "replicas": [str(key) for key in keys]}),
            Say(f"nothing else can hold the model: its KV is parked within {left_s:.1f} s", True),
            ParkAway(keys, left_s),
        ]

    def lose(self, key: ReplicaKey) -> None:
        """A replica is no more: nothing is waited for on its account."""
        farewell = self.under_way
        if farewell is not None:
            farewell.keys = tuple(one for one in farewell.keys if one != key)
            if not farewell.keys:
                self.under_way = None

    def cancel(self) -> list[Action]:
        """The members stay after all."""
        if self.under_way is None:
            return []
        self.under_way = None
        return [DropAway()]

    def finish(
        self, now: float, current: InstalledGear
    ) -> tuple[InstalledGear | None, list[Action]]:
        """Once parked, or out of time: close the replicas; what is left in place, and what to do.

        Their members that leave are of no more use, and are given back.
        """
        farewell = self.under_way
        if farewell is None or not (farewell.parked or now >= farewell.ends_at):
            return current, []
        self.under_way = None
        actions: list[Action] = [Detach(farewell.keys, "all its GPUs are taken; its KV is parked")]
        for key in farewell.keys:
            one = current.find(key)
            assert one is not None, f"{key} is parked and not in place"
            actions += self._holdings.close(now, key.epoch, one.workers)
            for agent in one.agents:
                record = self._members.agents[agent]
                record.dismissed = record.state is AgentState.LEAVING
        actions.append(Record({"event": "parked", "in_time": farewell.parked}))
        return current.without(farewell.keys), actions
