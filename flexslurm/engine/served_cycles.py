"""What a served cycle takes besides its stage's step; arithmetic on counters, never asks anybody.

Steps and the seconds that workers computed are counted in the same service and over the same
times, so that a machine which is slow for a while is slow in both: their difference is what lies
between two steps (the head, messages, processes that share the cores), and it is never negative.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from flexslurm.errors import ServiceError


class Reading(NamedTuple):
    """The head's counters of steps at one moment."""

    steps: int
    computed_s: float
    """Seconds that these steps computed, as the workers say."""
    at_s: float
    """When the last of them was answered, on any clock that is steady."""


class Cycles(msgspec.Struct, frozen=True):
    """A mean cycle, in seconds: medians over the parts of the time that was looked at.

    `low_s` and `high_s` are the quartiles of `besides_s`. `spread_s` is how far off the median of
    the step may be: 1.57 times what its quartiles lie apart, over the root of the number of parts
    (McGill, Tukey, Larsen, "Variations of Box Plots", 1978).
    """

    cycle_s: float
    step_s: float
    """What the last stage computed in a step, as the workers say."""
    besides_s: float
    low_s: float
    high_s: float
    spread_s: float

    def longer_s(self, alone_s: float) -> float:
        """What a step takes more in a service than measured alone; 0 where that is all noise."""
        longer = self.step_s - alone_s
        return longer if longer > self.spread_s else 0.0

    def words(self, alone_s: float) -> str:
        """All of it in one line, with what lies below the noise."""
        longer_s = self.step_s - alone_s
        noise = "" if abs(longer_s) > self.spread_s else ", which is within its spread"
        return (
            f"a served cycle: {_ms(self.cycle_s)}; its step {_ms(self.step_s)}, alone "
            f"{_ms(alone_s)}{noise}; besides {_ms(self.besides_s)} ({_ms(self.low_s)} to "
            f"{_ms(self.high_s)})"
        )

    def words_of_halves(self, passed_s: float) -> str:
        return (
            f"a served cycle of two stages: {_ms(self.cycle_s)}; a step of the last "
            f"{_ms(self.step_s)}; passing on {_ms(passed_s)}"
        )

    def head_s(self, alone_s: float) -> float:
        """What a cycle takes more than a step that was measured alone."""
        return self.besides_s + self.longer_s(alone_s)


def cycles_of(readings: Sequence[Reading], stages: int = 1) -> Cycles:
    """What the parts between readings say of a replica of so many stages that was always busy.

    In a cycle each stage does a step for each of as many micro-batches as there are stages; of
    more than one stage `besides_s` is what the last one waits in that time. Raises ServiceError
    where no part has a step.
    """
    parts = [_mean(a, b, stages) for a, b in itertools.pairwise(readings) if b.steps > a.steps]
    if not parts:
        raise ServiceError("the replica of the trial did no step while it was looked at")
    cycles, steps = [cycle for cycle, _ in parts], [step for _, step in parts]
    besides = [max(0.0, cycle - stages * step) for cycle, step in parts]
    low_s, besides_s, high_s = _quartiles(besides)
    step_low_s, step_s, step_high_s = _quartiles(steps)
    return Cycles(
        cycle_s=statistics.median(cycles),
        step_s=step_s,
        besides_s=besides_s,
        low_s=low_s,
        high_s=high_s,
        spread_s=1.57 * (step_high_s - step_low_s) / len(parts) ** 0.5,
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"


def _mean(since: Reading, now: Reading, stages: int) -> tuple[float, float]:
    """Seconds of a cycle, and of a step of the last stage."""
    steps = now.steps - since.steps
    return stages * (now.at_s - since.at_s) / steps, (now.computed_s - since.computed_s) / steps


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high
