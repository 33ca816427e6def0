"""Streams through one shift, and what their tokens' times say of it; asks nobody anything."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from flexslurm.cli.demo_streams import StreamRun
from flexslurm.messages import StatusAnswer

BEGUN = 16
"""Tokens that every stream has before a shift is asked for."""
TAIL = 24
"""Tokens that every stream gets after the cut-over, before it is ended."""


@dataclass(slots=True)
class Round:
    """Streams through one shift. Times are seconds on the monotonic clock."""

    runs: list[StreamRun]
    before: StatusAnswer
    after: StatusAnswer
    line: dict[str, Any]
    """The shift in the head's history."""
    planned: dict[str, Any]
    """What the head wrote down before it began."""
    switched: dict[str, Any]
    """What the head wrote down when the new gear served."""
    asked_at: float
    cut_at: float
    """When the head opened the new gear."""
    link_bytes_per_s: float
    """What one connection carried beside the old gear, while it decoded as it does here."""

    @property
    def tokens(self) -> list[list[int]]:
        return [run.tokens for run in self.runs]

    @property
    def lived(self) -> list[StreamRun]:
        """Streams that were there before and after the cut-over."""
        return [run for run in self.runs if run.times and run.times[-1] > self.cut_at]

    @property
    def step_s(self) -> float:
        """Time between two tokens, in the slower of the two gears."""
        old = [[at for at in run.times if at <= self.asked_at] for run in self.runs]
        new = [[at for at in run.times if at > self.cut_at][-TAIL:] for run in self.lived]
        return max(_step_s(old), _step_s(new))

    @property
    def extra_gap_s(self) -> float | None:
        """The longest time between two tokens since the shift was asked for, less a step.

        None: no stream lived through.
        """
        gaps = [b - a for run in self.lived for a, b in pairwise(run.times) if b >= self.asked_at]
        return max(max(gaps) - self.step_s, 0.0) if gaps else None


def calm_extra_gap_s(runs: Sequence[StreamRun]) -> float:
    """The longest time between two tokens of streams that nothing disturbs, less a step.

    What this machine does to streams by itself: gaps of shifts are to be held against it.
    """
    gaps = [b - a for run in runs for a, b in pairwise(run.times)]
    return max(max(gaps, default=0.0) - _step_s([run.times for run in runs]), 0.0)


def _step_s(times: Sequence[Sequence[float]]) -> float:
    """The median stream's mean: several tokens may come in one read, so single gaps tell little."""
    means = [(run[-1] - run[0]) / (len(run) - 1) for run in times if len(run) > 1]
    return statistics.median(means) if means else 0.0


def same_tokens(found: Sequence[Sequence[int]], whole: Sequence[Sequence[int]]) -> bool:
    """Whether streams that were ended early are the beginnings of the undisturbed ones."""
    return all(tokens == other[: len(tokens)] for tokens, other in zip(found, whole, strict=True))
