"""What every Submitter does alike, told by a task that logs its life; one suite for all of them."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest

from flexslurm.slurm.jobs import JobInfo
from flexslurm.slurm.pilot import Submitter
from flexslurm.slurm.script import PilotSpec
from flexslurm.slurm.states import JobState

TASK = """\
import json, os, signal, sys, time
log, code = sys.argv[1], sys.argv[2]
def note(what):
    line = {"what": what, "node": os.environ.get("SLURMD_NODENAME"), "at": time.time(),
            "job": os.environ.get("SLURM_JOB_ID"), "pid": os.getpid(),
            "restarts": os.environ.get("SLURM_RESTART_COUNT"), "env": os.environ.get("GREETING")}
    with open(log, "a") as file:
        file.write(json.dumps(line) + "\\n")
def hear(got, frame):
    note(signal.Signals(got).name)
    if got == signal.SIGTERM and code == "leave":
        os._exit(0)
for number in (signal.SIGTERM, signal.SIGCONT, signal.SIGUSR1):
    signal.signal(number, hear)
note("start")
print("hello from", os.environ.get("SLURMD_NODENAME"), flush=True)
if code in ("child", "orphan"):
    if os.fork() == 0:
        os.setsid()
        if code == "child" or os.fork() == 0:
            note(code)
            time.sleep(600)
        os._exit(0)
elif code not in ("stay", "leave"):
    sys.exit(int(code))
while True:
    time.sleep(0.05)
"""


class Diary:
    """What a job's tasks have noted."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def lines(self) -> list[dict[str, object]]:
        if not self.path.exists():
            return []
        return [json.loads(line) for line in self.path.read_text().splitlines()]

    def of(self, what: str) -> list[dict[str, object]]:
        return [line for line in self.lines() if line["what"] == what]


def wait(until: Callable[[], object], within_s: float, what: str) -> None:
    """Until it is true; fails the test at the deadline, which is later than one may expect.

    A busy machine takes several times as long as an idle one; how long is never the question here.
    """
    deadline = time.monotonic() + 4 * within_s
    while not until():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {within_s:g} s: {what}")
        time.sleep(0.05)


class SubmitterSuite:
    """Subclasses give `submitter`, and where its jobs go."""

    partition: ClassVar[str | None] = None
    start_s: ClassVar[float] = 10.0
    end_s: ClassVar[float] = 20.0
    stray: ClassVar[str] = "orphan"
    """What of a task must die with its job: an `orphan` that left its tree, or a `child`."""

    def spec(self, where: Path, code: str = "stay", **changes: object) -> PilotSpec:
        (where / "task.py").write_text(TASK)
        fields: dict[str, object] = {
            "name": "p-0", "partition": self.partition, "gpu_type": "a100", "gpus": 1, "nodes": 1,
            "walltime_s": None, "log_dir": where / "logs", "env": {"GREETING": "it's $HOME"},
            "command": (
                sys.executable, "-IS", str(where / "task.py"), str(where / "diary"), code,
            ),
        }  # fmt: skip
        return PilotSpec(**(fields | changes))  # type: ignore[arg-type]

    def state(self, submitter: Submitter, job_id: str) -> JobInfo:
        return submitter.states([job_id])[job_id]

    def reached(self, submitter: Submitter, job_id: str, state: JobState) -> Callable[[], bool]:
        return lambda: self.state(submitter, job_id).state is state

    def test_a_job_runs_its_command_on_every_node(
        self, submitter: Submitter, tmp_path: Path
    ) -> None:
        diary = Diary(tmp_path / "diary")
        job_id = submitter.submit(self.spec(tmp_path, "leave", nodes=2))
        wait(lambda: len(diary.of("start")) == 2, self.start_s, "both tasks start")
        info = self.state(submitter, job_id)
        assert info.state is JobState.RUNNING and info.name == "p-0" and info.restarts == 0
        assert {line["node"] for line in diary.lines()} == set(info.nodes)
        for line in diary.lines():
            assert line["job"] == job_id and line["restarts"] is None
            assert line["env"] == "it's $HOME"
        submitter.cancel([job_id])
        wait(self.reached(submitter, job_id, JobState.CANCELLED), self.end_s, "it is cancelled")
        logs = "".join(path.read_text() for path in (tmp_path / "logs").glob("p-0.*.log"))
        assert logs.count("hello from") == 2

    def test_a_cancelled_job_is_told_and_then_killed(
        self, submitter: Submitter, tmp_path: Path
    ) -> None:
        diary = Diary(tmp_path / "diary")
        job_id = submitter.submit(self.spec(tmp_path, self.stray))
        wait(lambda: diary.of(self.stray), self.start_s, "the task and its child start")
        submitter.cancel([job_id])
        submitter.cancel([job_id])
        wait(lambda: diary.of("SIGTERM"), 5.0, "it is told")
        wait(self.reached(submitter, job_id, JobState.CANCELLED), self.end_s, "it is cancelled")
        for line in (*diary.of("start"), *diary.of(self.stray)):
            wait(lambda: not _lives(line["pid"]), 5.0, f"{line['what']} is gone")  # noqa: B023
        submitter.cancel([job_id])

    @pytest.mark.parametrize(("code", "state"), [("0", "COMPLETED"), ("3", "FAILED")])
    def test_a_job_ends_with_its_command(
        self, code: str, state: str, submitter: Submitter, tmp_path: Path
    ) -> None:
        job_id = submitter.submit(self.spec(tmp_path, code))
        wait(lambda: self.state(submitter, job_id).state.over, self.start_s, "it ends")
        info = self.state(submitter, job_id)
        assert (info.state.value, info.exit_code, info.nodes and info.known) == (
            state, int(code), info.nodes and True,
        )  # fmt: skip
        assert len(Diary(tmp_path / "diary").of("start")) == 1

    def test_a_job_that_gives_its_gpus_back_comes_again(
        self, submitter: Submitter, tmp_path: Path
    ) -> None:
        diary = Diary(tmp_path / "diary")
        job_id = submitter.submit(self.spec(tmp_path, "75"))
        wait(lambda: len(diary.of("start")) >= 2, self.start_s + self.end_s, "a second start")
        assert [line["restarts"] for line in diary.of("start")][:2] == [None, "1"]
        assert {line["job"] for line in diary.lines()} == {job_id}
        submitter.cancel([job_id])
        wait(lambda: self.state(submitter, job_id).state.over, self.end_s, "it is cancelled")

    def test_a_cancelled_job_does_not_come_again(
        self, submitter: Submitter, tmp_path: Path
    ) -> None:
        """Not even one whose task answers the cancel by giving its GPUs back."""
        diary = Diary(tmp_path / "diary")
        said = 'echo \'{"what": "start"}\' >> diary'
        command = ("sh", "-c", f"cd {tmp_path}; trap 'exit 75' TERM; {said}; "
                   "while :; do sleep 0.1; done")  # fmt: skip
        job_id = submitter.submit(self.spec(tmp_path, command=command))
        wait(lambda: diary.of("start"), self.start_s, "the task starts")
        submitter.cancel([job_id])
        wait(self.reached(submitter, job_id, JobState.CANCELLED), self.end_s, "it is cancelled")
        assert len(diary.of("start")) == 1 and self.state(submitter, job_id).restarts == 0

    def test_unknown_jobs_are_unknown(self, submitter: Submitter) -> None:
        strange = self.state(submitter, "987654")
        assert strange.state is JobState.UNKNOWN and not strange.known
        assert submitter.states([]) == {}

    def test_a_survey_finds_jobs_that_nobody_wrote_down(
        self, submitter: Submitter, tmp_path: Path
    ) -> None:
        """Of the service's own directory, by name, until they are over."""
        job_id = submitter.submit(self.spec(tmp_path, "stay"))
        infos, ours = submitter.survey(["987654"])
        assert not infos["987654"].known
        assert [(job.id, job.name) for job in ours] == [(job_id, "p-0")]
        submitter.cancel([job_id])
        wait(lambda: self.state(submitter, job_id).state.over, self.end_s, "it is cancelled")
        infos, ours = submitter.survey([job_id])
        assert infos[job_id].state is JobState.CANCELLED and ours == ()

    def test_a_preview_submits_nothing(self, submitter: Submitter, tmp_path: Path) -> None:
        text = submitter.preview(self.spec(tmp_path))
        assert "p-0" in text and str(tmp_path / "task.py") in text
        assert not (tmp_path / "logs").exists() and not (tmp_path / "diary").exists()


def _lives(pid: object) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX" and int(str(pid)) != os.getpid()
