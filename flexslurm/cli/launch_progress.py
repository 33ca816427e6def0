"""What a launch says while it waits: each change once, and counts no oftener than is readable."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from flexslurm.messages import StatusAnswer

COUNTS_EVERY_S = 5.0
"""How often a pilot's detail is said whose state is the same, such as the weights it has read."""


@dataclass(frozen=True, slots=True)
class _Said:
    state: str
    detail: str
    at_s: float


class Progress:
    """Says what has changed since it was last said, by who it is about."""

    def __init__(
        self, say: Callable[[str], None], now: Callable[[], float] = time.monotonic
    ) -> None:
        """`now` gives seconds."""
        self._say, self._now = say, now
        self._told: dict[str, _Said] = {}

    def status(self, answer: StatusAnswer) -> None:
        """A head's answer."""
        for fragment in answer.fragments:
            self.tell(fragment.name, fragment.state, fragment.detail)
        for number, line in enumerate(answer.pool):
            if "no more" in line:  # the rest shows in the pilots' own lines
                self.tell(f"pool, entry {number + 1}", line)
        self.tell("service", f"{answer.state}: {answer.reason}")

    def tell(self, who: str, state: str, detail: str = "") -> None:
        """A new state at once; another detail of the same one after a while.

        That Slurm has not been asked about a pilot yet is said only where it stays so.
        """
        before, now = self._told.get(who), self._now()
        if before is None and state == "unknown":
            self._told[who] = _Said(state, "", now)
            return
        same = before is not None and before.state == state
        if before is not None and same:
            same = before.detail == detail or now < before.at_s + COUNTS_EVERY_S
        if same:
            return
        self._told[who] = _Said(state, detail, now)
        self._say(f"{who}: {state} ({detail})" if detail else f"{who}: {state}")
