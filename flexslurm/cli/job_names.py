"""Jobs whose ids a launch had no time to write down, found by their names."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from flexslurm.wire.service_dir import Pilot, Pilots

if TYPE_CHECKING:
    from flexslurm.slurm.pilot import Submitter

UNSENT = ""
"""The job id of what is about to be submitted: written before, replaced after."""


def pilot_job(service: str, fragment: str) -> str:
    return f"{service}.{fragment}"


def head_job(service: str) -> str:
    return f"{service}.head"


def with_ids(pilots: Pilots, service: str, submitter: Submitter, local: Submitter) -> Pilots:
    """The same with the ids of what was submitted all the same; what was not is left out.

    `local` is where the head may have gone instead. Raises SlurmError where Slurm cannot be asked.
    """
    found: list[Pilot] = []
    for pilot in pilots.pilots:
        ids = [pilot.job_id]
        if pilot.job_id == UNSENT:
            ids = submitter.find(pilot_job(service, pilot.fragment))
        found += [msgspec.structs.replace(pilot, job_id=job_id) for job_id in ids]
    head = pilots.head_job
    if head == UNSENT:
        name = head_job(service)
        head = next(iter([*local.find(name), *submitter.find(name)]), None)
    return msgspec.structs.replace(pilots, pilots=tuple(found), head_job=head)
