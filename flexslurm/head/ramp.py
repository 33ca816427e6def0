"""How much of its usual traffic a new replica gets; pure, sees only counts of good steps."""

from __future__ import annotations

from dataclasses import dataclass

from flexslurm.gateway.router import RAMP

STEPS_EACH = 16
"""Good steps that a replica must do at each weight before it gets the next."""


@dataclass(slots=True)
class _Climb:
    stage: int
    since_steps: int


class Ramps:
    """The replicas that are being ramped up, by seat."""

    def __init__(self, steps_each: int = STEPS_EACH) -> None:
        self._steps_each = steps_each
        self._climbs: dict[int, _Climb] = {}

    def begin(self, seat: int, steps: int) -> float:
        """Start at the first weight, which is returned; `steps`: done so far."""
        self._climbs[seat] = _Climb(0, steps)
        return RAMP[0]

    def drop(self, seat: int) -> None:
        self._climbs.pop(seat, None)

    def alone(self) -> list[int]:
        """No replica is left that could take the rest: all are at their full weight from now on."""
        seats = list(self._climbs)
        self._climbs.clear()
        return seats

    def look(self, seat: int, steps: int) -> float | None:
        """The next weight, if enough steps were done since the last one."""
        climb = self._climbs.get(seat)
        if climb is None or steps - climb.since_steps < self._steps_each:
            return None
        climb.stage += 1
        climb.since_steps = steps
        if climb.stage == len(RAMP) - 1:
            del self._climbs[seat]
        return RAMP[climb.stage]

    @property
    def seats(self) -> tuple[int, ...]:
        return tuple(self._climbs)
