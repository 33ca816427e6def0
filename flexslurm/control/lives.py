"""How long pilots live, by their kind, and what that says of those that are here; pure.

A pilot that is taken by Slurm, with notice or without, or that dies, is a loss. One whose walltime
ends, or that is sent away by us, is none: that was known beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from flexslurm.control.actions import Action, Record
from flexslurm.control.losses import LossHistory
from flexslurm.control.members import AgentRecord

WALLTIME_MARGIN_S = 300.0
"""A pilot that goes this shortly before its walltime's end has come to it."""
_ONE_LOSS_S = 30.0
"""Agents of one pilot that go within this time went with it."""
_RECORD_EVERY_S = 600.0
_HOUR_S = 3600.0


class Lives:
    """`kind_of`: the kind of a pilot by its name; one that has none is of its GPU type's."""

    def __init__(self, kind_of: Callable[[str], str]) -> None:
        self._kind_of = kind_of
        self._kinds: dict[str, str] = {}
        """Of pilots that are here, or were a moment ago."""
        self._history = LossHistory()
        self._at: float | None = None
        self._lost_at: dict[str, float] = {}
        self._recorded_at: float | None = None

    def kind_of(self, agent: AgentRecord) -> str:
        fragment = agent.hello.fragment
        known = self._kinds.get(fragment) or self._kind_of(fragment)
        if known:
            self._kinds[fragment] = known
        return known or agent.hello.gpu_type

    def pass_time(self, now: float, agents: Iterable[AgentRecord]) -> list[Action]:
        """These were here since the last call; gives a record once in a while."""
        passed_s = max(now - self._at, 0.0) if self._at is not None else 0.0
        self._at = now
        self._history.fade(passed_s)
        pilots = {agent.hello.fragment: self.kind_of(agent) for agent in agents}
        for kind in pilots.values():
            self._history.watched(kind, passed_s)
        recent = {f: at for f, at in self._lost_at.items() if now - at < _ONE_LOSS_S}
        self._lost_at = recent
        here = pilots.keys() | recent.keys()
        self._kinds = {name: kind for name, kind in self._kinds.items() if name in here}
        if self._recorded_at is None:
            self._recorded_at = now
        return [self._record(now)] if now - self._recorded_at >= _RECORD_EVERY_S else []

    def lost(self, now: float, agent: AgentRecord) -> list[Action]:
        """It is taken or gone: recorded, if that counts as a loss."""
        end = agent.walltime_ends_at
        known = end is not None and end - now <= WALLTIME_MARGIN_S
        before = self._lost_at.get(agent.hello.fragment)
        again = before is not None and now - before < _ONE_LOSS_S
        if known or again or agent.released or agent.dismissed:
            return []
        self._lost_at[agent.hello.fragment] = now
        self._history.lost(self.kind_of(agent))
        return [self._record(now)]

    def hazard_per_s(self, agent: AgentRecord) -> float:
        """Of the whole pilot that the agent is one node of."""
        return self._history.hazard_per_s(self.kind_of(agent))

    def hourly(self) -> dict[str, float]:
        """Losses that one pilot of each kind is expected to have in an hour."""
        kinds = self._history.counts()
        return {kind: round(_HOUR_S * self._history.hazard_per_s(kind), 6) for kind in kinds}

    def remember(self, counts: Mapping[str, tuple[float, float]]) -> None:
        self._history.remember(counts)

    def _record(self, now: float) -> Record:
        """A restarted head goes on from the last of these."""
        self._recorded_at = now
        counts = self._history.counts()
        rounded = {kind: [round(w, 1), round(n, 4)] for kind, (w, n) in counts.items()}
        return Record({"event": "lives", "kinds": rounded}, sync=False)
