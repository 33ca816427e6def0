"""What is known of the ends of pilots: one entry for each run of an agent and cause; pure.

The same act of Slurm is told by several sources, in any order and more than once: signals to the
agent, `PreemptTime`, hooks, the state of the job. The first makes the entry, later ones only
sharpen its deadline: another event it is not.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from flexslurm.control.events import PREEMPT_TIME

_WALLTIME_SIGNALS = ("SIGUSR1", "SIGUSR2")
_WALLTIME_NEAR_S = 240.0
"""Slurm sends our `--signal` at most two minutes before a walltime's end, or a minute earlier."""


class Cause(StrEnum):
    """Why a pilot goes."""

    TAKEN = "taken"
    """Preempted, requeued or cancelled: which of them, signals do not say."""
    WALLTIME = "walltime"


@dataclass(slots=True)
class Ending:
    """One end of one run, however many tell of it."""

    fragment: str
    incarnation: str
    """Of the agent: a run that begins anew is another one."""
    cause: Cause
    source: str
    """Which told of it first."""
    told_at: float
    ends_at: float
    heard: dict[str, float] = field(default_factory=dict)
    """By source: seconds after the first word."""


class Endings:
    """Those of agents that are here, and of pilots whose agents are still to come."""

    def __init__(self) -> None:
        self._by_run: dict[tuple[str, Cause], Ending] = {}
        self._early: dict[str, tuple[str, float]] = {}

    def take(
        self,
        now: float,
        fragment: str,
        incarnation: str,
        source: str,
        grace_s: float,
        walltime_ends_at: float | None,
    ) -> tuple[Ending, bool, bool]:
        """The entry that a word belongs to; whether it is new, and whether it says more.

        The deadline is the earliest that was told, but for Slurm's own word on a preemption: a
        signal may be a cancel's, so that it promises the shorter. A walltime's end is known.
        """
        cause, ends_at = Cause.TAKEN, now + grace_s
        signalled = source in _WALLTIME_SIGNALS
        left_s = None if walltime_ends_at is None else walltime_ends_at - now
        if signalled and left_s is not None and left_s <= _WALLTIME_NEAR_S:
            cause, ends_at = Cause.WALLTIME, now + left_s
        known = self._by_run.get((incarnation, cause))
        if known is None:
            made = Ending(fragment, incarnation, cause, source, now, ends_at, {source: 0.0})
            self._by_run[incarnation, cause] = made
            return made, True, True
        news = source not in known.heard
        known.heard.setdefault(source, now - known.told_at)
        before = known.ends_at
        known.ends_at = ends_at if source == PREEMPT_TIME else min(before, ends_at)
        return known, False, news

    def deadline(self, incarnation: str) -> float | None:
        """The first of its ends."""
        ends = [ending.ends_at for (who, _), ending in self._by_run.items() if who == incarnation]
        return min(ends, default=None)

    def early(self, fragment: str, source: str, ends_at: float) -> None:
        """A pilot is taken before any of its agents is here: they are to know when they come."""
        known = self._early.get(fragment)
        if known is None or ends_at < known[1]:
            self._early[fragment] = (source, ends_at)

    def met(self, now: float, fragment: str) -> tuple[str, float] | None:
        """What was said before an agent of this pilot came: source and seconds left."""
        source, ends_at = self._early.get(fragment, ("", now))
        return (source, ends_at - now) if ends_at > now else None

    def stays(self, fragment: str, incarnation: str) -> None:
        """It does not go after all."""
        self.forget(incarnation)
        self._early.pop(fragment, None)

    def gone(self, fragment: str) -> None:
        """This run of its job is over: another one is not what was meant."""
        self._early.pop(fragment, None)

    def forget(self, incarnation: str) -> None:
        for cause in Cause:
            self._by_run.pop((incarnation, cause), None)
