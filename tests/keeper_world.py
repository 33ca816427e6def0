"""A pool keeper and a queue of Slurm in played time."""

from __future__ import annotations

from fake_slurm_queue import FakeQueue

from flexslurm.control.keeper import PoolKeeper
from flexslurm.control.keeper_values import (
    CancelJobs,
    Drain,
    KeeperSettings,
    Look,
    PilotShape,
    PilotStage,
    PoolEntry,
    Present,
    Submit,
    Tell,
)
from flexslurm.slurm.states import JobState
from flexslurm.wire.service_dir import Pilot

ONE = (PilotShape(4),)


class World:
    """A keeper and a queue; each `step` is one interval, with one call to Slurm."""

    def __init__(
        self, *entries: PoolEntry, pilots: tuple[Pilot, ...] = (), **settings: float
    ) -> None:
        self.queue = FakeQueue()
        self.keeper = PoolKeeper(
            entries,
            KeeperSettings(**settings),
            pilots,
            self.queue.now,  # type: ignore[arg-type]
        )
        self.present: dict[str, Present] = {}
        self.said: list[str] = []
        self.drains: list[str] = []
        self.walltime_s: float | None = None
        self.refuse = ""
        self.begin = True

    def act(self) -> object:
        keeper, queue = self.keeper, self.queue
        call = keeper.next_call(queue.now)
        match call:
            case Submit(pilot) if self.refuse:
                keeper.refused(queue.now, pilot.fragment, self.refuse)
            case Submit(pilot):
                job = queue.submit(pilot, self.walltime_s)
                keeper.submitted(queue.now, pilot.fragment, job)
            case CancelJobs(jobs):
                for job in jobs:
                    queue.end(job, JobState.CANCELLED)
                keeper.cancelled(jobs)
        return call

    def look(self) -> None:
        keeper, queue = self.keeper, self.queue
        if self.begin:
            for job in queue.alive():
                if job.info.state is JobState.PENDING and not job.info.held:
                    queue.start(job.info.id)
        ids = [pilot.job_id for pilot in keeper.pilots() if pilot.job_id]
        infos, ours = queue.survey(ids)
        keeper.looked(queue.now, Look(infos, ours))
        for word in keeper.words():
            if isinstance(word, Tell):
                self.said.append(word.text)
            if isinstance(word, Drain):
                self.drains.append(word.fragment)

    def step(self, seconds: float = 5.0, times: int = 1) -> None:
        for _ in range(times):
            self.queue.now += seconds
            self.act()
            self.look()

    def join(self) -> None:
        running = [k.fragment for k in self.keeper.kept.values() if k.stage is PilotStage.RUNNING]
        self.present |= {name: Present(True, True) for name in running}
        self.keeper.present(self.queue.now, self.present)

    def names(self) -> list[str]:
        return sorted(job.pilot.fragment for job in self.queue.alive())

    def job(self, fragment: str) -> str:
        return self.keeper.kept[fragment].pilot.job_id


def entry(least: int = 2, wanted: int = 2, most: int = 2, **more: object) -> PoolEntry:
    return PoolEntry("a100", "scavenge", ONE, least, wanted, most, **more)  # type: ignore[arg-type]
