"""Slurm as a Submitter, and preemption as a pilot lives it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from submitter_suite import Diary, SubmitterSuite, wait

from flexslurm.config.site import Site
from flexslurm.errors import SlurmError
from flexslurm.slurm.client import SlurmClient
from flexslurm.slurm.pilot import SlurmSubmitter
from flexslurm.slurm.script import HeadSpec
from flexslurm.slurm.states import JobState


@pytest.fixture
def submitter(sandbox_site: Site, slurm: SlurmClient, tmp_path: Path) -> SlurmSubmitter:
    return SlurmSubmitter(sandbox_site, tmp_path / "svc")


def preemptor(client: SlurmClient, where: Path, seconds: int, *options: str) -> str:
    script = where / "high.sh"
    script.write_text(f"#!/bin/bash\nsleep {seconds}\n")
    return client.submit(script, "--partition=prio", "--output=/dev/null", *options).base


class TestSlurm(SubmitterSuite):
    partition = "scavenge"
    start_s = 20.0
    end_s = 40.0
    stray = "child"  # without cgroups Slurm loses sight of an orphan

    @pytest.mark.slow
    def test_a_preempted_pilot_is_told_at_once_and_comes_back_by_itself(
        self, submitter: SlurmSubmitter, tmp_path: Path
    ) -> None:
        diary = Diary(tmp_path / "diary")
        job_id = submitter.submit(self.spec(tmp_path, gpus=4))
        wait(lambda: diary.of("start"), self.start_s, "the task starts")
        asked = time.time()
        high = preemptor(submitter.client, tmp_path, 1, "--gres=gpu:a100:4", "--nodes=2")
        wait(lambda: diary.of("SIGTERM"), 10, "the warning")
        assert float(str(diary.of("SIGTERM")[0]["at"])) - asked < 5
        wait(lambda: self.state(submitter, job_id).preempt_in_s is not None, 5, "PreemptTime")
        info = self.state(submitter, job_id)
        assert info.state is JobState.RUNNING and 5 < (info.preempt_in_s or 0) <= 15
        wait(lambda: self.state(submitter, high).state is JobState.COMPLETED, 75, "the other job")
        wait(lambda: len(diary.of("start")) == 2, 60, "the pilot starts again")
        info = self.state(submitter, job_id)
        assert info.restarts == 1 and diary.of("start")[1]["restarts"] == "1"

    def test_leaving_early_hands_the_nodes_over_early(
        self, submitter: SlurmSubmitter, tmp_path: Path
    ) -> None:
        """A task that ends on the warning is requeued, though Slurm 22.05 would call it done."""
        diary = Diary(tmp_path / "diary")
        command = ("sh", "-c", f"trap 'exit 75' TERM; echo '{{\"what\": \"start\"}}' >> "
                   f"{tmp_path / 'diary'}; while :; do sleep 0.1; done")  # fmt: skip
        job_id = submitter.submit(self.spec(tmp_path, gpus=4, command=command))
        wait(lambda: diary.of("start"), self.start_s, "the task starts")
        took: list[float] = []
        while not took or (min(took) >= 14 and len(took) < 4):  # the grace time alone is 15 s
            asked = time.monotonic()
            high = preemptor(submitter.client, tmp_path, 1, "--gres=gpu:a100:4", "--nodes=2")
            over = self.reached(submitter, high, JobState.COMPLETED)
            wait(over, 30, "the other job")
            took.append(time.monotonic() - asked)
            starts = 1 + len(took)
            wait(lambda n=starts: len(diary.of("start")) == n, 40, "the pilot starts again")  # type: ignore[misc]
        assert min(took) < 14
        assert self.state(submitter, job_id).restarts == len(took)

    def test_the_head_is_the_batch_step(self, submitter: SlurmSubmitter, tmp_path: Path) -> None:
        diary = Diary(tmp_path / "diary")
        command = self.spec(tmp_path, "leave").command
        job_id = submitter.submit(HeadSpec("h", command, tmp_path / "logs", {"GREETING": "x"}))
        wait(lambda: diary.of("start"), self.start_s, "the head starts")
        info = self.state(submitter, job_id)
        assert info.partition == "cpu" and info.nodes == ("cpun1",)
        submitter.client.call("scancel", "--batch", "--signal=USR1", job_id)
        wait(lambda: diary.of("SIGUSR1"), 10, "the head hears its warning")
        submitter.cancel([job_id])
        wait(lambda: diary.of("SIGTERM"), 10, "the head hears that it is cancelled")

    def test_a_refused_submission_leaves_nothing(
        self, submitter: SlurmSubmitter, tmp_path: Path
    ) -> None:
        with pytest.raises(SlurmError, match="partition"):
            submitter.submit(self.spec(tmp_path, partition="nosuch"))
        assert list((tmp_path / "svc" / "jobs").iterdir()) == []

    def test_odd_paths_and_options_reach_slurm_whole(
        self, sandbox_site: Site, submitter: SlurmSubmitter, tmp_path: Path
    ) -> None:
        odd = "a comment with 'quotes' \"and\" hetjob # $HOME \\ x"
        scavenge = sandbox_site.partitions["scavenge"].model_copy(
            update={"sbatch_args": [f"--comment={odd}"]}
        )
        site = sandbox_site.model_copy(update={"partitions": {"scavenge": scavenge}})
        where = tmp_path / "it's a 100% hetjob"
        where.mkdir()
        job_id = SlurmSubmitter(site, where / "svc").submit(self.spec(where, "0"))
        wait(lambda: self.state(submitter, job_id).state.over, self.start_s, "it ends")
        assert self.state(submitter, job_id).state is JobState.COMPLETED
        assert submitter.client.job_record(job_id)["Comment"] == odd
        assert len(list((where / "logs").glob("p-0.*.log"))) == 2
