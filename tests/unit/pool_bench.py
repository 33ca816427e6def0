"""A pool whose Slurm is played, call by call."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fake_slurm_queue import FakeQueue
from virtual_time import run_virtual

from flexslurm.config.schema import parse_section
from flexslurm.config.service import Service
from flexslurm.config.site import Site
from flexslurm.control.keeper_load import ServiceLoad
from flexslurm.control.members import Members
from flexslurm.errors import SlurmUnavailable
from flexslurm.head.poller import JobPoller
from flexslurm.head.pool import Pool
from flexslurm.slurm.jobs import JobInfo
from flexslurm.slurm.script import PilotSpec
from flexslurm.slurm.states import JobState
from flexslurm.wire.service_dir import Pilot, Pilots, ServiceDir

IDLE = ServiceLoad(0, 0, 16, 0.5)


class FakeSubmitter:
    """A queue, with the times of all calls; pilots start at the next look."""

    def __init__(self, queue: FakeQueue, clock: Callable[[], float]) -> None:
        self.queue, self.clock = queue, clock
        self.calls: list[tuple[float, str]] = []
        self.on_submit: Callable[[], None] = lambda: None
        self.silent = False

    def _call(self, what: str) -> None:
        self.queue.now = self.clock()
        self.calls.append((self.queue.now, what))
        if self.silent:
            raise SlurmUnavailable("Slurm does not answer: Socket timed out")

    def submit(self, spec: PilotSpec) -> str:
        self._call("sbatch")
        self.on_submit()
        fragment = spec.name.partition(".")[2]
        return self.queue.submit(
            Pilot(fragment, "", spec.partition, spec.gpu_type, spec.gpus, spec.nodes)
        )

    def survey(self, ids: Sequence[str]) -> tuple[dict[str, JobInfo], tuple[JobInfo, ...]]:
        self._call("squeue")
        for job in self.queue.alive():
            if job.info.state is JobState.PENDING:
                self.queue.start(job.info.id)
        return self.queue.survey(list(ids))

    def cancel(self, ids: Sequence[str]) -> None:
        self._call("scancel")
        for job in ids:
            self.queue.end(job, JobState.CANCELLED)


class Bench:
    """A pool on a fake Slurm, by a virtual clock."""

    def __init__(
        self, home: Path, count: int, pilots: Pilots | None = None, more: str = ""
    ) -> None:
        """`more`: further keys of the pool's entry."""
        text = f"""
name: chat
model: {{path: /m}}
pool: [{{gpu_type: a100, gpus: 1, partition: p, count: {count}{more}}}]
"""
        self.service = parse_section(Service, text, "f")
        site = "name: s\ngpu_types: {a100: {}}\npartitions: {p: {}}\nslurm: {poll_interval: 5s}\n"
        self.site = parse_section(Site, site, "f")
        self.directory = ServiceDir(home / "svc")
        self.directory.create()
        self.now = 0.0
        self.submitter = FakeSubmitter(FakeQueue(), lambda: self.now)
        self.records: list[dict[str, Any]] = []
        self.members = Members()
        self.directory.write_pilots(pilots or Pilots("slurm"))

    def filled(self) -> Bench:
        """As a launch leaves it: all pilots submitted."""
        made = []
        for number in range(self.service.pool[0].count):
            pilot = Pilot(f"a100-{number + 1}", "", "p", "a100", 1, 1)
            job = self.submitter.queue.submit(pilot)
            made.append(Pilot(pilot.fragment, job, "p", "a100", 1, 1))
        self.directory.write_pilots(Pilots("slurm", tuple(made), "999999"))
        return self

    def drain(self, fragment: str) -> None:
        """An operator's order, as the members have it."""
        self.members.draining.add(fragment)

    def pool(self) -> Pool:
        pilots = self.directory.pilots()
        assert pilots is not None
        return Pool(
            self.service, self.site, self.directory, pilots, self.submitter,  # type: ignore[arg-type]
            tell=lambda event: None, record=self.records.append, now=lambda: self.now,
        )  # fmt: skip

    def run(self, seconds: float, *events: tuple[float, Callable[[], None]]) -> Pool:
        """A poller and its pool for this long; what is to happen at which second."""

        async def main(loop: asyncio.AbstractEventLoop) -> Pool:
            start = self.now
            pool = self.pool()
            poller = JobPoller(
                self.submitter, lambda: pool.pilots, lambda event: None,  # type: ignore[arg-type]
                self.site.slurm.poll_interval, pool,
            )  # fmt: skip
            task = asyncio.create_task(poller.run())
            due = sorted(events, key=lambda event: event[0])
            while loop.time() < seconds:
                self.now = start + loop.time()
                while due and due[0][0] <= loop.time():
                    due.pop(0)[1]()
                pool.tick(self.members, lambda: IDLE, ())
                assert not task.done(), task.exception()
                await asyncio.sleep(1.0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return pool

        return run_virtual(main)

    def gaps(self) -> list[float]:
        return [b - a for (a, _), (b, _) in itertools.pairwise(self.submitter.calls)]
