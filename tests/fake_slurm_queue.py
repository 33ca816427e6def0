"""A queue of Slurm in memory: jobs start, end and come back as a test says, by its own clock."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flexslurm.slurm.jobs import JobInfo, unknown
from flexslurm.slurm.states import JobState
from flexslurm.wire.service_dir import Pilot


@dataclass
class FakeJob:
    """One job; `pilot` as it was submitted."""

    pilot: Pilot
    info: JobInfo
    started_at: float | None = None
    walltime_s: float | None = None


class FakeQueue:
    """Answers as `Submitter.survey` does."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.jobs: dict[str, FakeJob] = {}
        self.submissions: list[float] = []
        self._next = 1

    def submit(self, pilot: Pilot, walltime_s: float | None = None) -> str:
        job_id, self._next = str(self._next), self._next + 1
        info = JobInfo(job_id, JobState.PENDING, "waits", name=f"chat.{pilot.fragment}")
        self.jobs[job_id] = FakeJob(pilot, info, walltime_s=walltime_s)
        self.submissions.append(self.now)
        return job_id

    def alive(self) -> list[FakeJob]:
        return [job for job in self.jobs.values() if not job.info.state.over]

    def set(self, job_id: str, state: JobState, **values: object) -> None:
        job = self.jobs[job_id]
        job.started_at = self.now if state is JobState.RUNNING else None
        job.info = replace(job.info, state=state, **values)  # type: ignore[arg-type]

    def start(self, job_id: str) -> None:
        self.set(job_id, JobState.RUNNING)

    def requeue(self, job_id: str) -> None:
        self.set(job_id, JobState.PENDING, restarts=self.jobs[job_id].info.restarts + 1)

    def end(self, job_id: str, state: JobState, exit_code: int | None = None) -> None:
        self.set(job_id, state, exit_code=exit_code)

    def purge(self) -> None:
        """Ended jobs are forgotten, as after MinJobAge."""
        self.jobs = {i: job for i, job in self.jobs.items() if not job.info.state.over}

    def told(self, job_id: str) -> JobInfo:
        job = self.jobs.get(job_id)
        if job is None:
            return unknown(job_id)
        if job.started_at is None:
            return job.info
        ran = self.now - job.started_at
        left = None if job.walltime_s is None else job.walltime_s - ran
        return replace(job.info, started_ago_s=ran, end_in_s=left)

    def survey(self, job_ids: list[str]) -> tuple[dict[str, JobInfo], tuple[JobInfo, ...]]:
        ours = tuple(self.told(i) for i, job in self.jobs.items() if not job.info.state.over)
        return {job_id: self.told(job_id) for job_id in job_ids}, ours
