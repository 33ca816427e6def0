"""Looks at the service's jobs in one call at a time and tells the controller what changed.

It paces all calls of a head: one in each interval, and of two in a row one is always a look.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from flexslurm.control.events import (
    PREEMPT_TIME,
    Event,
    PilotEnds,
    PilotGone,
    PilotLeaving,
    PilotStays,
)
from flexslurm.control.keeper_values import Look
from flexslurm.errors import FlexslurmError
from flexslurm.head.node_looks import NodeLooks
from flexslurm.head.pool import Pool
from flexslurm.head.status import JobView
from flexslurm.head.unkept import UnkeptPool
from flexslurm.slurm.command import backoff_s
from flexslurm.slurm.jobs import JobInfo
from flexslurm.slurm.pilot import Submitter
from flexslurm.slurm.states import JobState
from flexslurm.wire.service_dir import Pilot

log = logging.getLogger(__name__)

_MOST_INTERVALS = 8
_NEWS_S = 5.0
"""A walltime's end that differs by more is another one."""
_LEAST_GAP_S = 1.0
"""Between two looks, while there are no answers."""


class JobPoller:
    """The one poller of a head. Unknown stays unknown: it never takes silence for an end."""

    def __init__(
        self,
        submitter: Submitter,
        pilots: Callable[[], Iterable[Pilot]],
        tell: Callable[[Event], None],
        interval_s: float,
        pool: Pool | UnkeptPool | None = None,
        nodes: NodeLooks | None = None,
        kill_wait_s: Callable[[str], float] = lambda partition: 0.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`pool`: what it keeps is looked at, and its calls have their turn, as `nodes`' have.

        `kill_wait_s`: from the signal to the kill, by partition.
        """
        self._submitter, self._pilots, self._tell = submitter, pilots, tell
        self._interval_s, self._pool, self._nodes = interval_s, pool, nodes
        self._now, self._kill_wait_s = now, kill_wait_s
        self._warned: dict[str, int] = {}
        """The restarts of jobs when they were last said to be preempted."""
        self._hurry = asyncio.Event()
        self._calm: set[str] = set()
        """Jobs said to be preempted, of which the last look knew nothing of it."""
        self._ends_at: dict[str, float] = {}
        """By job: the end of its walltime, as it was last told."""
        self._completing: set[str] = set()
        self._over: set[str] = set()
        self._held: set[str] = set()
        self.views: dict[str, JobView] = {}

    async def run(self) -> None:
        """Poll until cancelled, rarely while there are no answers."""
        waits: Iterator[float] | None = None
        while True:
            try:
                await self._ask()
            except FlexslurmError as error:
                # also this machine's own troubles: no process, no memory, a file half there
                base_s = self._interval_s
                waits = waits or backoff_s(2 * base_s, _MOST_INTERVALS * base_s)
                log.warning("nothing is known of our jobs now: %s", error.message)
                await asyncio.sleep(next(waits))
                continue
            waits = None
            await self._pause()
            call = None if self._pool is None else self._pool.next_call()
            if self._pool is not None and call is not None:
                await self._pool.run_call(call)
                await self._pause()
            elif self._nodes is not None and self._nodes.due():
                await self._nodes.look()
                await self._pause()

    async def _ask(self) -> None:
        """One call about all jobs. Raises FlexslurmError where nothing is known."""
        pilots = [pilot for pilot in self._pilots() if pilot.job_id]
        ids = [pilot.job_id for pilot in pilots]
        if self._pool is None:
            self.take(pilots, await asyncio.to_thread(self._submitter.states, ids))
            return
        look: Look = await asyncio.to_thread(self._pool.look, ids)
        self.take(pilots, look.infos)
        self._pool.looked(look)

    async def _pause(self) -> None:
        """Until the next look: the interval, or less when somebody has seen something."""
        nap = asyncio.ensure_future(asyncio.sleep(self._interval_s))
        hurry = asyncio.ensure_future(self._hurry.wait())
        try:
            await asyncio.wait({nap, hurry}, return_when=asyncio.FIRST_COMPLETED)
            if not nap.done():  # however often it is called for, no more than one look a second
                await asyncio.wait({nap}, timeout=_LEAST_GAP_S)
        finally:
            nap.cancel()
            hurry.cancel()
            self._hurry.clear()

    def look_now(self) -> None:
        """Do not wait for the next look: a hook has seen something."""
        self._hurry.set()

    def take(self, pilots: Iterable[Pilot], infos: Mapping[str, JobInfo]) -> None:
        """One look: new ends and new preemptions become events."""
        known = {pilot.job_id: pilot for pilot in pilots}
        self._forget_all_but(known.keys())
        for job_id, pilot in known.items():
            if (info := infos.get(job_id)) is not None:
                self._look(pilot, info)

    def _look(self, pilot: Pilot, info: JobInfo) -> None:
        job_id, over = pilot.job_id, info.state.over
        before = self.views.get(job_id)
        nodes = info.nodes or (before.nodes if before is not None and over else ())
        self.views[job_id] = JobView(str(info.state), info.reason, over, nodes)
        if over and job_id not in self._over:
            self._over.add(job_id)
            self._tell(PilotGone(pilot.fragment, f"Slurm: {info.state} {info.reason}".strip()))
        if not over:
            self._over.discard(job_id)
        if info.preempt_in_s is not None and self._warned.get(job_id) != info.restarts:
            self._warned[job_id] = info.restarts
            self._tell(PilotLeaving(pilot.fragment, PREEMPT_TIME, max(info.preempt_in_s, 0.0)))
        self._look_whether_it_completes(pilot, info)
        self._look_whether_it_stays(pilot, info)
        self._look_at_its_end(pilot, info)
        if isinstance(self._pool, Pool):
            return  # which says more of held jobs
        if info.held and job_id not in self._held:
            self._held.add(job_id)
            log.warning("job %s of %s is held: scontrol release %s", job_id, pilot.fragment, job_id)
        elif not info.held:
            self._held.discard(job_id)

    def _look_whether_it_completes(self, pilot: Pilot, info: JobInfo) -> None:
        """Slurm has begun to end it: what still runs has the kill wait."""
        if info.state is not JobState.COMPLETING:
            self._completing.discard(pilot.job_id)
        elif pilot.job_id not in self._completing:
            self._completing.add(pilot.job_id)
            wait_s = self._kill_wait_s(pilot.partition or "")
            self._tell(PilotLeaving(pilot.fragment, str(info.state), wait_s, present=True))

    def _look_at_its_end(self, pilot: Pilot, info: JobInfo) -> None:
        """Its walltime's end, where that is news."""
        if info.end_in_s is None or info.preempt_in_s is not None:
            return
        ends_at, told = self._now() + info.end_in_s, self._ends_at.get(pilot.job_id)
        if told is None or abs(ends_at - told) > _NEWS_S:
            self._ends_at[pilot.job_id] = ends_at
            self._tell(PilotEnds(pilot.fragment, max(info.end_in_s, 0.0)))

    def _look_whether_it_stays(self, pilot: Pilot, info: JobInfo) -> None:
        """A preemption that two looks in a row know nothing of any more was called off."""
        job_id = pilot.job_id
        runs = info.state is JobState.RUNNING and self._warned.get(job_id) == info.restarts
        if not runs or info.preempt_in_s is not None:
            self._calm.discard(job_id)
        elif job_id not in self._calm:
            self._calm.add(job_id)
        else:
            self._calm.discard(job_id)
            del self._warned[job_id]
            self._tell(PilotStays(pilot.fragment, "Slurm's PreemptTime is gone, and it runs on"))

    def _forget_all_but(self, jobs: Iterable[str]) -> None:
        kept = set(jobs)
        self._over &= kept
        self._completing &= kept
        self._calm &= kept
        self._held &= kept
        for known in (self._warned, self.views, self._ends_at):
            for job_id in known.keys() - kept:
                del known[job_id]
