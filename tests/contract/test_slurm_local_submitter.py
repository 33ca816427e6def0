"""Local processes as a Submitter, and what only they do."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from submitter_suite import Diary, SubmitterSuite, wait

from flexslurm.errors import EnvironmentFault, SlurmError
from flexslurm.slurm import local, processes
from flexslurm.slurm.jobs import JobInfo
from flexslurm.slurm.local import LocalSubmitter
from flexslurm.slurm.script import HeadSpec
from flexslurm.slurm.states import JobState


@pytest.fixture
def submitter(tmp_path: Path) -> LocalSubmitter:
    """One that a busy machine, too, lets tell its tasks before it kills them."""
    return LocalSubmitter(tmp_path / "svc", kill_wait_s=2.0)


class TestLocal(SubmitterSuite):
    def test_another_process_sees_and_ends_the_job(
        self, submitter: LocalSubmitter, tmp_path: Path
    ) -> None:
        diary = Diary(tmp_path / "diary")
        job_id = submitter.submit(self.spec(tmp_path))
        wait(lambda: diary.of("start"), 10, "the task starts")
        other = LocalSubmitter(tmp_path / "svc")
        assert other.states([job_id])[job_id].state is JobState.RUNNING
        (task,) = diary.of("start")
        assert os.getsid(int(str(task["pid"]))) == task["pid"] != os.getsid(0)
        other.cancel([job_id])
        wait(self.reached(submitter, job_id, JobState.CANCELLED), 5, "it is cancelled")

    def test_an_acted_preemption_warns_kills_and_returns(
        self, submitter: LocalSubmitter, tmp_path: Path
    ) -> None:
        diary = Diary(tmp_path / "diary")
        job_id = submitter.submit(self.spec(tmp_path))
        wait(lambda: diary.of("start"), 10, "the task starts")
        asked = time.time()
        submitter.preempt(job_id, grace_s=4.0, away_s=0.2)
        seen: list[JobInfo] = []

        def visible() -> bool:
            seen.append(self.state(submitter, job_id))
            return seen[-1].preempt_in_s is not None

        wait(visible, 5, "it is visible")
        assert seen[-1].state is JobState.RUNNING and 0 < (seen[-1].preempt_in_s or 0) <= 4.0
        wait(lambda: diary.of("SIGTERM"), 5, "it is told at once")
        wait(lambda: len(diary.of("start")) == 2, 10, "it comes back")
        (_, second), (told, *_) = diary.of("start"), diary.of("SIGTERM")
        assert float(str(told["at"])) < asked + 4.0 < float(str(second["at"]))
        assert second["restarts"] == "1" and self.state(submitter, job_id).restarts == 1
        submitter.cancel([job_id])
        wait(self.reached(submitter, job_id, JobState.CANCELLED), 5, "it is cancelled")
        with pytest.raises(SlurmError, match="does not run"):
            submitter.preempt(job_id, grace_s=1.0)

    def test_tasks_outlive_a_killed_keeper_and_can_be_ended(
        self, submitter: LocalSubmitter, tmp_path: Path
    ) -> None:
        diary = Diary(tmp_path / "diary")
        job_id = submitter.submit(self.spec(tmp_path))
        wait(lambda: diary.of("start"), 10, "the task starts")
        keeper = submitter._keeper(job_id)
        assert keeper is not None
        processes.send(keeper, signal.SIGKILL)
        wait(lambda: self.state(submitter, job_id).reason, 5, "the keeper's end is seen")
        assert self.state(submitter, job_id).state is JobState.RUNNING
        submitter.cancel([job_id])
        wait(self.reached(submitter, job_id, JobState.FAILED), 5, "the task is gone")

    def test_a_keeper_that_was_stopped_goes_on(
        self, submitter: LocalSubmitter, tmp_path: Path
    ) -> None:
        """Stopped while the time runs out for which it waits: it is preempted all the same."""
        diary = Diary(tmp_path / "diary")
        job_id = submitter.submit(self.spec(tmp_path))
        wait(lambda: diary.of("start"), 10, "the task starts")
        submitter.preempt(job_id, grace_s=1.0, away_s=0.2)
        wait(lambda: diary.of("SIGTERM"), 5, "it is told")
        keeper = submitter._keeper(job_id)
        assert keeper is not None
        processes.send(keeper, signal.SIGSTOP)
        time.sleep(1.1)  # its grace time
        processes.send(keeper, signal.SIGCONT)
        wait(lambda: len(diary.of("start")) == 2, 10, "it comes back")
        submitter.cancel([job_id])
        wait(self.reached(submitter, job_id, JobState.CANCELLED), 5, "it is cancelled")

    def test_a_cancel_that_comes_before_the_start(
        self, submitter: LocalSubmitter, tmp_path: Path
    ) -> None:
        job_id = submitter.submit(self.spec(tmp_path))
        submitter.cancel([job_id])
        wait(self.reached(submitter, job_id, JobState.CANCELLED), 5, "it is cancelled")

    def test_its_files_are_its_owners_alone(
        self, submitter: LocalSubmitter, tmp_path: Path
    ) -> None:
        job_id = submitter.submit(self.spec(tmp_path, "0"))
        wait(lambda: self.state(submitter, job_id).state.over, 10, "it ends")
        described = tmp_path / "svc" / "jobs" / job_id / "job.json"
        assert described.stat().st_mode & 0o077 == 0 and "it's $HOME" in described.read_text()

    def test_a_command_that_does_not_exist(self, submitter: LocalSubmitter, tmp_path: Path) -> None:
        job_id = submitter.submit(self.spec(tmp_path, command=("/no/such/program",)))
        wait(self.reached(submitter, job_id, JobState.FAILED), 5, "it fails")
        assert "No such file" in self.state(submitter, job_id).reason


@pytest.mark.parametrize("fails_at", ["job.json", "keeper.json"])
def test_a_job_that_cannot_be_written_down_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: str
) -> None:
    write = local.write_json

    def full(path: Path, data: dict[str, object]) -> None:
        if path.name == fails_at:
            raise OSError(28, "No space left on device")
        write(path, data)

    monkeypatch.setattr(local, "write_json", full)
    submitter = local.LocalSubmitter(tmp_path)
    spec = HeadSpec(name="h", command=("sleep", "60"), log_dir=tmp_path / "logs", env={})
    before = {process.pid for process in processes.everything()}
    with pytest.raises(EnvironmentFault, match="No space"):
        submitter.submit(spec)
    assert list((tmp_path / "jobs").iterdir()) == []
    mine = [p for p in processes.everything() if p.pid not in before and p.parent == os.getpid()]
    assert mine == []
