"""What the answers to pulls amount to: bytes, and how long workers were at it; asks nothing."""

from __future__ import annotations

from collections.abc import Sequence

from flexslurm.messages import KvPulled


class Pulls:
    """The answers of one shift."""

    def __init__(self) -> None:
        self.moved_bytes = 0
        self._spans: dict[str, list[tuple[float, float]]] = {}

    def add(self, now: float, answer: KvPulled) -> None:
        self.moved_bytes += answer.moved_bytes
        self._spans.setdefault(answer.worker, []).append((now - answer.seconds, now))

    @property
    def longest_s(self) -> float:
        """Of the worker that pulled for longest, however many at a time."""
        return max(map(_covered, self._spans.values()), default=0.0)


def _covered(spans: Sequence[tuple[float, float]]) -> float:
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(end - max(begin, reached), 0.0)
        reached = max(reached, end)
    return total
