"""Which sequence it is that steps fail by, as far as one can tell from outside; ends none itself.

A step that fails, or a worker that dies in it, says nothing of the sequences in it. One that has
been in several failures without a token in between is a suspect; a token clears it. Of suspects a
replica is given one at a time, so what fails then, fails by that one. Another that has just come
may be to blame instead: it is a suspect itself before the first one is found guilty, and then they
are told apart. A node that is lost looks the same, and comes not so often in a row.
"""

from __future__ import annotations

from collections.abc import Sequence

SUSPECT_FAILURES = 2
"""Failures in a row that make a suspect."""
GUILTY_FAILURES = 3
"""Failures in a row as the only suspect after which a sequence is ended."""


class Suspicion:
    """One sequence's failures since its last token."""

    __slots__ = ("_alone", "_failures")

    def __init__(self) -> None:
        self._failures = self._alone = 0

    def fail(self, *, alone: bool) -> None:
        """A step with it has failed; `alone`: no other that was in it can be blamed."""
        self._failures += 1
        self._alone = self._alone + 1 if alone else 0

    def clear(self) -> None:
        """It has got a token."""
        self._failures = self._alone = 0

    @property
    def suspect(self) -> bool:
        """It shall not run beside another suspect."""
        return self._failures >= SUSPECT_FAILURES

    @property
    def guilty(self) -> bool:
        """It is not to be run again."""
        return self._alone >= GUILTY_FAILURES


def blame(in_step: Sequence[Suspicion]) -> None:
    """A replica has failed in the steps that these were in."""
    suspects = [one for one in in_step if one.suspect] or list(in_step)
    for one in in_step:
        one.fail(alone=[one] == suspects)
