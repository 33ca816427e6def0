"""What Slurm itself does to tasks and jobs, on which our scripts and readings rest."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from submitter_suite import TASK, Diary, SubmitterSuite, wait

from flexslurm.config.schema import load_section, parse_section
from flexslurm.config.site import Site
from flexslurm.slurm.client import SlurmClient
from flexslurm.slurm.jobs import JobInfo
from flexslurm.slurm.pilot import SlurmSubmitter
from flexslurm.slurm.sandbox import Sandbox
from flexslurm.slurm.sandbox_config import SandboxConfig
from flexslurm.slurm.states import JobState

pytestmark = pytest.mark.slow
YAML = """\
nodes:
  f: {gpu_type: a100, gpus: 4}
  g: {gpu_type: a100, gpus: 4}
  h: {gpu_type: a100, gpus: 4}
gpu_types: {a100: {}}
partitions:
  all: {nodes: [f, g, h], default: true}
  first: {nodes: [f, g]}
  last: {nodes: [g, h]}
  low: {nodes: [f], preempt_mode: REQUEUE, grace: 10s}
  lowc: {nodes: [g], preempt_mode: CANCEL, grace: 10s}
  high: {nodes: [f, g, h], priority_tier: 10}
kill_wait: 2s
slurmd_timeout: 10s
"""


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    made = Sandbox(tmp_path_factory.mktemp("box"), parse_section(SandboxConfig, YAML, "s.yaml"))
    made.up()
    yield made
    made.down()


@pytest.fixture
def client(box: Sandbox) -> Iterator[SlurmClient]:
    made = SlurmClient(load_section(Site, box.site_file).slurm)
    yield made
    for state in ("PENDING", "RUNNING"):
        made.call("scancel", f"--user={os.geteuid()}", f"--state={state}")
    wait(lambda: not made.call("squeue", "-h").out.strip(), 30, "all jobs are gone")


class Job:
    """A batch script whose steps run the suite's task, each with a diary of its own."""

    def __init__(self, client: SlurmClient, where: Path, body: str, *options: str) -> None:
        where.mkdir(exist_ok=True)
        self.client, self.where = client, where
        (where / "task.py").write_text(TASK)
        script = where / "job.sh"
        head = "\n".join(f"#SBATCH {option}" for option in options)
        task = f"{sys.executable} -IS {where}/task.py"
        body = body.replace("TASK", task).replace("HERE", str(where))
        script.write_text(f"#!/bin/bash\n#SBATCH --output={where}/out\n{head}\n{body}\n")
        self.id = client.submit(script).base

    def diary(self, name: str = "diary") -> Diary:
        return Diary(self.where / name)

    @property
    def info(self) -> JobInfo:
        return self.client.jobs([self.id])[self.id]

    def said(self) -> str:
        path = self.where / "out"
        return path.read_text() if path.exists() else ""

    def started(self, count: int = 1, name: str = "diary") -> None:
        wait(lambda: len(self.diary(name).of("start")) == count, 20, f"{count} tasks run")


STEP = "srun --overlap TASK HERE/diary stay"


def test_signals_that_sound_like_an_end(client: SlurmClient, tmp_path: Path) -> None:
    """ "STEP … CANCELLED" and "JOB … CANCELLED" are printed, and both go on."""
    body = f"trap 'echo told >>HERE/batch' TERM\n{STEP} &\nwhile true; do wait; done"
    job = Job(client, tmp_path, body, "--partition=all", "--nodes=1")
    job.started()
    client.call("scancel", "-s", "TERM", job.id)
    wait(lambda: job.diary().of("SIGTERM"), 5, "the task hears it")
    assert not (tmp_path / "batch").exists()
    client.call("scancel", "-b", "-s", "TERM", job.id)
    wait(lambda: (tmp_path / "batch").exists(), 5, "the shell hears it")
    assert len(job.diary().of("SIGTERM")) == 1
    assert job.info.state is JobState.RUNNING and not job.info.orphaned
    wait(lambda: job.said().count("CANCELLED") == 2, 5, "both are printed")


def test_srun_is_never_what_gets_the_signal(client: SlurmClient, tmp_path: Path) -> None:
    """SIGTERM to srun kills its tasks at once, without a word to them."""
    body = f"{STEP} &\necho $! >HERE/srun\nwait $!\necho $? >HERE/code\nsleep 60"
    job = Job(client, tmp_path, body, "--partition=all", "--nodes=1")
    job.started()
    os.kill(int((tmp_path / "srun").read_text()), signal.SIGTERM)
    wait(lambda: (tmp_path / "code").exists(), 5, "srun has ended")
    assert (tmp_path / "code").read_text() == "137\n" and job.diary().of("SIGTERM") == []


def test_a_requeue_tells_several_times(client: SlurmClient, tmp_path: Path) -> None:
    """Handlers must not mind; what stays is killed after the kill wait."""
    job = Job(client, tmp_path, STEP, "--partition=all", "--nodes=1", "--requeue")
    job.started()
    client.requeue(job.id)
    wait(lambda: job.info.state is JobState.PENDING, 20, "it is in the queue again")
    # Slurm sends it twice within a millisecond, which a process may see as one
    assert job.diary().of("SIGTERM") and job.info.restarts == 1


def test_a_shrink_kills_without_a_word(client: SlurmClient, tmp_path: Path) -> None:
    """So whoever shrinks a job empties the node before."""
    body = "srun --overlap --no-kill --kill-on-bad-exit=0 TASK HERE/diary stay\nsleep 60"
    job = Job(client, tmp_path, body, "--partition=first", "--nodes=2", "--no-kill")
    job.started(2)
    update = ("scontrol", "update", f"jobid={job.id}", "nodelist=f1")
    client.call(*update, cwd=tmp_path)
    wait(lambda: job.info.nodes == ("f1",), 10, "one node is left")
    pids = {str(line["node"]): int(str(line["pid"])) for line in job.diary().of("start")}
    wait(lambda: not Path(f"/proc/{pids['g1']}").exists(), 10, "the task there has gone")
    assert Path(f"/proc/{pids['f1']}").exists() and job.info.state is JobState.RUNNING
    assert job.diary().of("SIGTERM") == []


def test_a_heterogeneous_job_has_one_fate(client: SlurmClient, tmp_path: Path) -> None:
    """Only the second component's node is wanted, and it would be cancelled: all are requeued."""
    body = "srun --het-group=0,1 TASK HERE/diary stay"
    first = ("--partition=low --nodes=1 --gres=gpu:a100:1 --requeue", "hetjob")
    job = Job(client, tmp_path, body, *first, "--partition=lowc --nodes=1 --gres=gpu:a100:4")
    job.started(2)
    urgent = tmp_path / "urgent.sh"
    urgent.write_text("#!/bin/sh\nexec sleep 60\n")
    client.submit(
        urgent, "--partition=high", "--nodelist=g1", "--gres=gpu:a100:4", "--output=/dev/null"
    )
    wait(lambda: {x["node"] for x in job.diary().of("SIGTERM")} == {"f1", "g1"}, 15, "both hear it")
    first_at = {str(x["node"]): float(str(x["at"])) for x in reversed(job.diary().of("SIGTERM"))}
    assert abs(first_at["f1"] - first_at["g1"]) < 1.0
    wait(lambda: job.info.state is JobState.PENDING, 60, "the first component waits again")
    rows = client.call("squeue", "-h", "-o", "%i %T %P").out
    assert f"{job.id}+0 PENDING low\n" in rows and f"{job.id}+1 PENDING lowc" in rows


@pytest.mark.shared_service
def test_a_node_is_lost_under_three_kinds_of_job(
    box: Sandbox, client: SlurmClient, tmp_path: Path
) -> None:
    """--no-kill for the job alone, for the step as well (our pilots), and a lost batch host."""
    body = "srun --overlap --kill-on-bad-exit=0 TASK HERE/diary stay\necho $? >HERE/code\nsleep 90"
    plain = Job(client, tmp_path / "plain", body, "--partition=first", "--nodes=2", "--no-kill")
    last = Job(client, tmp_path / "last", STEP, "--partition=last", "--nodes=2", "--no-kill")
    submitter = SlurmSubmitter(load_section(Site, box.site_file), tmp_path / "svc")
    ours = submitter.submit(SubmitterSuite().spec(tmp_path, partition="first", nodes=2))
    for job in (plain, last):
        job.started(2)
    wait(lambda: len(Diary(tmp_path / "diary").of("start")) == 2, 20, "the pilot runs")
    box.kill("g1")
    try:
        ids = [plain.id, last.id, ours]
        wait(
            lambda: not any("g1" in info.nodes for info in client.jobs(ids).values()),
            45, "Slurm has seen it",
        )  # fmt: skip
        wait(lambda: (tmp_path / "plain" / "code").exists(), 10, "the plain step has ended")
        # --no-kill of sbatch is not its steps': the task on the other node was killed as well
        assert (tmp_path / "plain" / "code").read_text() == "137\n"
        assert plain.info.state is JobState.RUNNING and plain.info.nodes == ("f1",)
        # ours goes on where it was not hit
        info = client.jobs([ours])[ours]
        assert (info.state, info.nodes, info.orphaned) == (JobState.RUNNING, ("f1",), False)
        task = next(x for x in Diary(tmp_path / "diary").of("start") if x["node"] == "f1")
        assert Path(f"/proc/{task['pid']}").exists()
        # whoever sees the orphan must cancel it: it holds its nodes and has no script any more
        assert last.info.state is JobState.RUNNING and last.info.nodes == ("h1",)
        assert last.info.orphaned
    finally:
        box.start("g1")
        client.cancel([plain.id, last.id, ours])
        idle = ("sinfo", "-h", "-n", "g1", "-o", "%T")
        wait(lambda: "idle" in client.call(*idle).out, 30, "the node is back")
