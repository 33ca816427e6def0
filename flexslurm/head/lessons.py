"""What shifts took beside what was expected of them, so that the next is expected better; pure.

Expectations come from bytes and the links' nominal rates. What they leave out (round trips, steps
that end, processors that are shared) is much alike from one shift to the next of its kind, so they
are stretched by what the last ones took longer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from flexslurm.engine.memory_plan import Verdict
from flexslurm.engine.shift_plan import ShiftPlan

_WEIGHT = 0.5
"""Of the last shift against those before it."""
_LEAST_S = 1e-4
"""What is expected to take less is no measure of anything."""
_MOST = 1000.0


class Part(StrEnum):
    TRANSFER = "transfer"
    PAUSE = "pause"


@dataclass(slots=True)
class Lessons:
    """Factors by kind of shift; 1 until something was measured."""

    _factors: dict[tuple[Verdict, Part], float] = field(default_factory=dict)

    def factor(self, verdict: Verdict, part: Part) -> float:
        return self._factors.get((verdict, part), 1.0)

    def corrected(self, plan: ShiftPlan) -> ShiftPlan:
        """The plan with the times that are to be expected here."""
        kind = plan.memory.verdict
        return msgspec.structs.replace(
            plan,
            transfer_s=plan.transfer_s * self.factor(kind, Part.TRANSFER),
            pause_s=plan.pause_s * self.factor(kind, Part.PAUSE),
        )

    def learn(self, plan: ShiftPlan, transfer_s: float, pause_s: float) -> None:
        """Take what a shift took; `plan` as it was before it was corrected."""
        kind = plan.memory.verdict
        self._take((kind, Part.TRANSFER), transfer_s, plan.transfer_s)
        self._take((kind, Part.PAUSE), pause_s, plan.pause_s)

    def _take(self, key: tuple[Verdict, Part], took_s: float, expected_s: float) -> None:
        if expected_s < _LEAST_S or took_s <= 0.0:
            return
        found = min(max(took_s / expected_s, 1 / _MOST), _MOST)
        before = self._factors.get(key)
        # By ratios, not differences: twice as long and half as long weigh the same.
        self._factors[key] = found if before is None else before ** (1 - _WEIGHT) * found**_WEIGHT
