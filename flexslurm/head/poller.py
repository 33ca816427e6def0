"""Looks at the service's jobs in one call at a time and tells the controller what changed."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable

from flexslurm.control.events import Event, PilotGone, PilotLeaving
from flexslurm.errors import SlurmError
from flexslurm.head.status import JobView
from flexslurm.slurm.jobs import JobInfo
from flexslurm.slurm.pilot import Submitter
from flexslurm.wire.service_dir import Pilot

log = logging.getLogger(__name__)

_MAX_BACKOFF = 8


class JobPoller:
    """The one poller of a head. Unknown stays unknown: it never takes silence for an end."""

    def __init__(
        self,
        submitter: Submitter,
        pilots: Callable[[], Iterable[Pilot]],
        tell: Callable[[Event], None],
        interval_s: float,
    ) -> None:
        self._submitter, self._pilots, self._tell = submitter, pilots, tell
        self._interval_s = interval_s
        self._warned: set[tuple[str, int]] = set()
        self._over: set[str] = set()
        self.views: dict[str, JobView] = {}

    async def run(self) -> None:
        """Poll until cancelled, rarely while Slurm does not answer."""
        backoff = 1
        while True:
            try:
                infos = await asyncio.to_thread(
                    self._submitter.states, [p.job_id for p in self._pilots()]
                )
            except SlurmError as error:
                backoff = min(2 * backoff, _MAX_BACKOFF)
                log.warning("Slurm does not tell about our jobs: %s", error.message)
            else:
                backoff = 1
                self.take(infos)
            await asyncio.sleep(self._interval_s * backoff * random.uniform(0.9, 1.1))  # noqa: S311

    def take(self, infos: dict[str, JobInfo]) -> None:
        """One look: new ends and new preemptions become events."""
        for pilot in self._pilots():
            info = infos.get(pilot.job_id)
            if info is None:
                continue
            self.views[pilot.job_id] = JobView(str(info.state), info.reason, info.state.over)
            if info.state.over and pilot.job_id not in self._over:
                self._over.add(pilot.job_id)
                self._tell(PilotGone(pilot.fragment, f"Slurm: {info.state} {info.reason}".strip()))
            if not info.state.over:
                self._over.discard(pilot.job_id)
            if info.preempt_in_s is not None and (pilot.job_id, info.restarts) not in self._warned:
                self._warned.add((pilot.job_id, info.restarts))
                self._tell(PilotLeaving(pilot.fragment, "PreemptTime", max(info.preempt_in_s, 0.0)))
