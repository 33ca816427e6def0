"""Jobs whose ids a launch had no time to write down, found by their names."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from flexslurm.slurm.job_names import UNSENT, head_job, pilot_job
from flexslurm.wire.service_dir import Pilot, Pilots

if TYPE_CHECKING:
    from flexslurm.slurm.pilot import Submitter

__all__ = ["UNSENT", "head_job", "pilot_job", "with_ids"]


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
