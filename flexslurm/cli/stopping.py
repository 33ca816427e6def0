"""Ending a service: ask its head, then make sure that no job of it is left."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flexslurm.cli.ask import ask
from flexslurm.cli.job_names import UNSENT, with_ids
from flexslurm.config.schema import load_section
from flexslurm.config.service import Service
from flexslurm.config.site import Site
from flexslurm.errors import DeadlineExceeded, EnvironmentFault, FlexslurmError, ServiceError
from flexslurm.messages import StopAsk
from flexslurm.slurm.command import backoff_s
from flexslurm.slurm.local import LocalSubmitter
from flexslurm.wire.service_dir import Pilots, ServiceDir

if TYPE_CHECKING:
    from flexslurm.slurm.pilot import Submitter

Say = Callable[[str], None]

_ANSWER_S = 15.0
"""A head closes its connections before it answers."""
_FIRST_LOOK_S, _MOST_LOOK_S = 0.2, 2.0
"""Between looks at jobs that are to end, the first and the longest."""


def stop_service(
    directory: ServiceDir, drain_s: float, timeout_s: float, say: Say, *, head_over: bool = False
) -> None:
    """End head and pilots. Raises DeadlineExceeded when jobs are still there after `timeout_s`.

    The drain and the wait for a head that may hang come before, and have their own bounds.

    Whatever is damaged in the directory, the jobs that can be found are cancelled. That no head
    answers is not said where the caller knows it (`head_over`).
    """
    if directory.stopped():
        if not head_over:
            say(f"the service in {directory.path} has been stopped already")
        return
    try:
        ask(directory, StopAsk(drain_s=drain_s), drain_s + min(timeout_s, _ANSWER_S))
        say("the head has ended")
    except (ServiceError, EnvironmentFault) as error:
        if not head_over:
            say(f"{error.message}: what is left of its jobs is cancelled")
    deadline = time.monotonic() + timeout_s
    with directory.changing(max(deadline - time.monotonic(), 0.0)):
        try:
            pilots = directory.pilots()
        except ServiceError as error:
            say(f"{error.message}: its jobs are found by their files")
            _cancel(directory, _found(directory), deadline, say)
            directory.forget_pilots()
        else:
            if pilots is not None and (pilots.pilots or pilots.head_job is not None):
                _cancel(directory, _jobs(directory, pilots), deadline, say)
                _forget(directory, pilots)
        directory.forget_head()


def _forget(directory: ServiceDir, pilots: Pilots) -> None:
    try:
        directory.write_pilots(Pilots(pilots.cluster))
    except OSError:  # a full disk still lets a file be removed
        directory.forget_pilots()


@dataclass(frozen=True, slots=True)
class _Jobs:
    """Jobs to end, and where those that are not local run."""

    cluster: str
    pilots: tuple[str, ...]
    head: tuple[str, ...] = ()
    allocation: str | None = None


def _jobs(directory: ServiceDir, pilots: Pilots) -> _Jobs:
    unsent = [pilot for pilot in pilots.pilots if pilot.job_id == UNSENT]
    if unsent or pilots.head_job == UNSENT:
        service = load_section(Service, directory.service)
        submitter = _submitter(directory, pilots.cluster, pilots.allocation)
        pilots = with_ids(pilots, service.name, submitter, LocalSubmitter(directory.path))
    ids = tuple(pilot.job_id for pilot in pilots.pilots)
    head = (pilots.head_job,) if pilots.head_job else ()
    ids += _unwritten(directory, pilots, {*ids, *head})
    return _Jobs(pilots.cluster, ids, head, pilots.allocation)


def _unwritten(directory: ServiceDir, pilots: Pilots, known: set[str]) -> tuple[str, ...]:
    """Jobs that no list has: submitted by a head that died before it heard of them."""
    if pilots.cluster != "slurm":
        return ()
    try:
        _, ours = _submitter(directory, pilots.cluster, pilots.allocation).survey([])
    except FlexslurmError:
        return ()  # those that are known are ended all the same, or say why not
    return tuple(job.id for job in ours if job.id not in known)


def _found(directory: ServiceDir) -> _Jobs:
    ids = directory.jobs_found()
    return _Jobs("local" if all(map(_is_local, ids)) else "slurm", ids)


def _is_local(job: str) -> bool:
    return job.startswith("local-")


def _submitter(directory: ServiceDir, cluster: str, allocation: str | None) -> Submitter:
    from flexslurm.head.settings import submitter_for

    if cluster == "local":  # whose site may be damaged
        return LocalSubmitter(directory.path)
    return submitter_for(cluster, load_section(Site, directory.site), directory, allocation)


def _cancel(directory: ServiceDir, jobs: _Jobs, deadline: float, say: Say) -> None:
    """End them; local processes are ended even where Slurm cannot be asked."""
    here = [job for job in jobs.head if _is_local(job)]
    there = [job for job in (*jobs.pilots, *jobs.head) if job not in here]
    if jobs.cluster == "slurm":
        here += [job for job in jobs.pilots if _is_local(job)]
        there = [job for job in there if job not in here]
    _end(LocalSubmitter(directory.path), here, deadline)
    if there:
        _end(_submitter(directory, jobs.cluster, jobs.allocation), there, deadline)
    say(f"{len(jobs.pilots)} pilot{' has' if len(jobs.pilots) == 1 else 's have'} ended")


def _end(owner: Submitter, ids: list[str], deadline: float) -> None:
    if not ids:
        return
    owner.cancel(ids)
    for pause_s in backoff_s(_FIRST_LOOK_S, _MOST_LOOK_S):
        states = owner.states(ids)
        left = [job for job, info in states.items() if info.known and not info.state.over]
        if not left:
            return
        if time.monotonic() > deadline:
            raise DeadlineExceeded(
                f"these jobs are still there: {', '.join(left)}",
                hint="Slurm ends them after its kill wait; look with squeue",
            )
        time.sleep(pause_s)
