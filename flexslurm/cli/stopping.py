"""Ending a service: ask its head, then make sure that no job of it is left."""

from __future__ import annotations

import time
from collections.abc import Callable

from flexslurm.cli.ask import ask
from flexslurm.cli.job_names import with_ids
from flexslurm.config.schema import load_section
from flexslurm.config.service import Service
from flexslurm.config.site import Site
from flexslurm.errors import DeadlineExceeded, ServiceUnreachable
from flexslurm.messages import StopAsk
from flexslurm.wire.service_dir import Pilots, ServiceDir

Say = Callable[[str], None]


def stop_service(directory: ServiceDir, drain_s: float, timeout_s: float, say: Say) -> None:
    """End head and pilots. Raises DeadlineExceeded when jobs are still there after `timeout_s`."""
    deadline = time.monotonic() + timeout_s + drain_s
    try:
        ask(directory, StopAsk(drain_s=drain_s), timeout_s=drain_s + 15.0)
        say("the head has ended")
    except ServiceUnreachable as error:
        say(f"{error.message}: its jobs are cancelled all the same")
    pilots = directory.pilots()
    if pilots is None or (not pilots.pilots and pilots.head_job is None):
        return
    _cancel(directory, pilots, deadline, say)
    directory.write_pilots(Pilots(pilots.cluster))


def _cancel(directory: ServiceDir, pilots: Pilots, deadline: float, say: Say) -> None:
    from flexslurm.head.runtime import submitter_for
    from flexslurm.slurm.local import LocalSubmitter

    site, service = load_section(Site, directory.site), load_section(Service, directory.service)
    submitter = submitter_for(pilots.cluster, site, directory, pilots.allocation)
    local = LocalSubmitter(directory.path)
    pilots = with_ids(pilots, service.name, submitter, local)
    jobs = [pilot.job_id for pilot in pilots.pilots]
    heads = [pilots.head_job] if pilots.head_job else []
    groups = [(submitter, [*jobs, *(h for h in heads if not h.startswith("local-"))])]
    groups.append((local, [h for h in heads if h.startswith("local-")]))
    for owner, ids in groups:
        if not ids:
            continue
        owner.cancel(ids)
        while True:
            states = owner.states(ids)
            left = [job for job, info in states.items() if info.known and not info.state.over]
            if not left:
                break
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"these jobs are still there: {', '.join(left)}",
                    hint="Slurm ends them after its kill wait; look with squeue",
                )
            time.sleep(0.2)
    say(f"{len(jobs)} pilots have ended")
