"""What was decided and what came of it, for whoever asks; never decides."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from flexslurm.control.actions import Action, Record, Say
from flexslurm.control.choices import Decision
from flexslurm.control.events import DecisionReport, ShiftReport
from flexslurm.control.shift import Shift

_MOST = 100


class Decisions:
    """The last decisions; one that is no other than the one before is not told again."""

    def __init__(self) -> None:
        self._made: deque[DecisionReport] = deque(maxlen=_MOST)

    def __iter__(self) -> Iterator[DecisionReport]:
        return iter(self._made)

    def note(self, now: float, decision: Decision, *, serving: bool) -> list[Action]:
        """Remember it; what to say and record of one that does nothing. `serving`: some gear."""
        verdict = "shift" if decision.gear is not None else "stay" if serving else "wait"
        last = self._made[-1] if self._made else None
        if last is not None and (last.verdict, last.reason) == (verdict, decision.reason):
            last.at_s = now
            return []
        self._made.append(DecisionReport(now, verdict, decision.reason))
        if decision.gear is not None:
            return []  # the record of its epoch has the reason
        record = {"event": "decided", "verdict": verdict, "reason": decision.reason}
        return [Record(record, sync=False), Say(f"{verdict}: {decision.reason}")]


def report_of(now: float, shift: Shift, outcome: str) -> ShiftReport:
    """A shift that is over, as a line of the history."""
    return ShiftReport(
        epoch=shift.epoch,
        why=shift.reason,
        before=shift.before,
        after=shift.gear.layout(),
        started_at=shift.started_at,
        took_s=now - shift.started_at,
        outcome=outcome,
        mode=str(shift.order.mode) if shift.order is not None else "",
        evicted=len(shift.order.evicted) if shift.order is not None else 0,
    )
