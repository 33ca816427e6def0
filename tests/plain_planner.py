"""What planners of tests have in common: nothing but the best gear, its own estimate, no prices."""

from __future__ import annotations

from collections.abc import Sequence

from flexslurm.control.actions import PlanShift
from flexslurm.control.cards import Cards
from flexslurm.control.choices import ShiftPrice
from flexslurm.control.installed import InstalledGear
from flexslurm.control.members import AgentRecord
from flexslurm.gear import Gear, NoGear, Signature, Slot
from flexslurm.messages import Pacing


class PlainPlanner:
    """One says what `choose` finds, and where it places it."""

    def meet(self, cards: Cards) -> None:
        """Gears of tests fit any card."""

    def choose(self, signature: Signature) -> Gear | NoGear:
        raise NotImplementedError

    def look(self, signature: Signature) -> Gear | NoGear | None:
        return self.choose(signature)

    def options(self, signature: Signature) -> Sequence[Gear]:
        return ()

    def others(
        self, agents: Sequence[AgentRecord], current: InstalledGear | None
    ) -> Sequence[Gear]:
        return ()

    def within_targets(self, gear: Gear, speed: float) -> float:
        return speed * gear.estimates.tokens_per_s

    def price(self, ask: PlanShift) -> ShiftPrice:
        return ShiftPrice()

    def pacing(self, gear: Gear) -> dict[Slot, Pacing]:
        return {}
