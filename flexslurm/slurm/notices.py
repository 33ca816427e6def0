"""What a hook's message means for the pilots of a service; pure, asks and sends nothing.

A hook is heard beside polling, signals and heartbeats: the same loss may be told several times, in
any order and late. So each notice names what it is about, and one that names no pilot of ours, or
an earlier run of its job, means nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from flexslurm.errors import SlurmError
from flexslurm.messages import NotifyAsk
from flexslurm.slurm.jobids import parse_job_id


class HookEvent(StrEnum):
    """What hooks can see."""

    JOB_START = "job-start"
    """The job begins (Prolog, PrologSlurmctld)."""
    JOB_LEAVING = "job-leaving"
    """Slurm will take the job: preemption, a time limit near (strigger --time), an operator."""
    JOB_END = "job-end"
    """The job's run has ended (Epilog, EpilogSlurmctld, strigger --fini); it may be requeued."""
    NODE_DOWN = "node-down"
    NODE_DRAIN = "node-drain"
    """No new jobs there; those that run may go on."""
    NODE_UP = "node-up"


@dataclass(frozen=True, slots=True)
class PilotAt:
    """A pilot as the head knows it."""

    fragment: str
    job_id: str | None
    nodes: tuple[str, ...] = ()
    warning_s: float = 0.0
    """What its partition promises from the warning to the end."""
    restarts: int = 0


@dataclass(frozen=True, slots=True)
class Leaving:
    """The pilot is on notice: it will be gone in `grace_s`."""

    fragment: str
    source: str
    grace_s: float


@dataclass(frozen=True, slots=True)
class PilotLost:
    """The pilot's GPUs are lost now."""

    fragment: str
    reason: str


@dataclass(frozen=True, slots=True)
class LookNow:
    """Something may have changed: ask Slurm at once instead of at the next poll."""

    reason: str


Notice = Leaving | PilotLost | LookNow


def meaning(ask: NotifyAsk, pilots: Sequence[PilotAt]) -> list[Notice]:
    """The notices that follow; empty for what concerns no pilot.

    Raises SlurmError for an event or job id that no hook of ours sends.
    """
    try:
        event = HookEvent(ask.event)
    except ValueError:
        legal = ", ".join(HookEvent)
        raise SlurmError(f"'{ask.event}' is no event of a hook", hint=f"legal: {legal}") from None
    about = f"{event} ({ask.source})"
    ours = [pilot for pilot in pilots if _meant(pilot, ask)]
    if not ours:
        return []
    match event:
        case HookEvent.JOB_LEAVING:
            return [Leaving(p.fragment, ask.source, _deadline_s(ask, p)) for p in ours]
        case HookEvent.JOB_END | HookEvent.NODE_DOWN:
            detail = f": {ask.reason}" if ask.reason else ""
            return [PilotLost(p.fragment, f"{about}{detail}") for p in ours]
        case HookEvent.JOB_START | HookEvent.NODE_DRAIN | HookEvent.NODE_UP:
            return [LookNow(about)]


def _meant(pilot: PilotAt, ask: NotifyAsk) -> bool:
    """By job where one is named, and then only this run of it; else by node."""
    if ask.job_id is not None:
        same = pilot.job_id is not None and _base(pilot.job_id) == _base(ask.job_id)
        return same and (ask.restarts is None or ask.restarts >= pilot.restarts)
    return bool(set(pilot.nodes) & set(ask.nodes))


def _base(job_id: str) -> str:
    return job_id if job_id.startswith("local-") else parse_job_id(job_id).base


def _deadline_s(ask: NotifyAsk, pilot: PilotAt) -> float:
    return pilot.warning_s if ask.grace_s is None else max(0.0, ask.grace_s)
