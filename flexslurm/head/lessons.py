"""What shifts took beside what was expected of them, so that the next is expected better; pure.

Expectations come from bytes and the links' nominal rates. What they leave out (round trips, steps
that end, groups that close, processors that are shared) is much alike from one shift to the next of
its kind: the median of what the last ones took longer, or less, is added.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from flexslurm.engine.memory_plan import MemoryVerdict
from flexslurm.engine.shift_plan import ShiftPlan

_LAST = 5
"""Shifts of a kind that count."""


class LessonPart(StrEnum):
    """Which of a shift's times."""

    TRANSFER = "transfer"
    PAUSE = "pause"


@dataclass(slots=True)
class Lessons:
    """Seconds by kind of shift; none until something was measured."""

    _more: dict[tuple[MemoryVerdict, LessonPart], deque[float]] = field(default_factory=dict)

    def more_s(self, verdict: MemoryVerdict, part: LessonPart) -> float:
        """What shifts of this kind take beyond what their bytes would."""
        seen = self._more.get((verdict, part))
        return statistics.median(seen) if seen else 0.0

    def corrected(self, plan: ShiftPlan) -> ShiftPlan:
        """The plan with the times that are to be expected here."""
        kind = plan.memory.verdict
        return msgspec.structs.replace(
            plan,
            transfer_s=max(plan.transfer_s + self.more_s(kind, LessonPart.TRANSFER), 0.0),
            pause_s=max(plan.pause_s + self.more_s(kind, LessonPart.PAUSE), 0.0),
        )

    def learn(self, plan: ShiftPlan, transfer_s: float, pause_s: float) -> None:
        """Take what a shift took; `plan` as it was before it was corrected."""
        kind = plan.memory.verdict
        for part, took_s, expected_s in (
            (LessonPart.TRANSFER, transfer_s, plan.transfer_s),
            (LessonPart.PAUSE, pause_s, plan.pause_s),
        ):
            self._more.setdefault((kind, part), deque(maxlen=_LAST)).append(took_s - expected_s)
