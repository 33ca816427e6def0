"""When the policy is to be asked again; a moment and a count, which the controller keeps."""

from __future__ import annotations

from dataclasses import dataclass

_FIRST_WAIT_S = 0.1
_MOST_WAIT_S = 30.0
_MOST_DOUBLINGS = 16


@dataclass(slots=True)
class Agenda:
    """The next question, if there is one, and how many attempts have failed in a row."""

    at: float | None = None
    attempts: int = 0

    def soon(self, when: float) -> None:
        """Ask then, or earlier if that was the plan."""
        self.at = when if self.at is None else min(self.at, when)

    def comes_due(self, now: float) -> bool:
        """Whether the question is to be asked now; it is then asked, and no longer open."""
        due = self.at is not None and now >= self.at
        if due:
            self.at = None
        return due

    def failed(self, now: float) -> None:
        """An attempt failed: ask again after a wait, each time twice as long."""
        self.attempts += 1
        wait_s = _FIRST_WAIT_S * 2.0 ** min(self.attempts, _MOST_DOUBLINGS)
        self.soon(now + min(wait_s, _MOST_WAIT_S))
