"""Jobs that were submitted and not written down are found by their names, and are ours alone."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from flexslurm.cli.job_names import UNSENT, with_ids
from flexslurm.cli.stopping import stop_service
from flexslurm.config.site import SlurmSettings
from flexslurm.slurm.client import SlurmClient
from flexslurm.slurm.jobs import FIELDS, SEPARATOR
from flexslurm.slurm.local import LocalSubmitter
from flexslurm.slurm.script import PilotSpec
from flexslurm.slurm.states import JobState
from flexslurm.wire.service_dir import Pilot, Pilots, ServiceDir


class Named:
    """A submitter that knows jobs by name."""

    def __init__(self, jobs: dict[str, list[str]]) -> None:
        self.jobs = jobs

    def find(self, name: str) -> list[str]:
        return self.jobs.get(name, [])


def pilot(fragment: str, job_id: str) -> Pilot:
    return Pilot(fragment, job_id, None, "a100", 2, 1)


def filled(head: str | None, there: dict[str, list[str]], here: Sequence[str] = ()) -> Pilots:
    before = Pilots("slurm", (pilot("a-1", "7"), pilot("a-2", UNSENT)), head)
    local = Named({"svc.head": list(here)})
    return with_ids(before, "svc", Named(there), local)  # type: ignore[arg-type]


def test_what_was_written_down_stays_and_the_rest_is_looked_for() -> None:
    found = filled(UNSENT, {"svc.a-2": ["9"], "svc.head": ["10"]})
    assert [p.job_id for p in found.pilots] == ["7", "9"] and found.head_job == "10"


def test_what_was_never_submitted_is_left_out() -> None:
    found = filled(UNSENT, {})
    assert [p.job_id for p in found.pilots] == ["7"] and found.head_job is None


def test_a_head_of_this_machine_is_looked_for_here() -> None:
    assert filled(UNSENT, {}, ["local-1"]).head_job == "local-1"
    assert filled("11", {"svc.head": ["12"]}).head_job == "11"


def test_slurm_is_asked_for_live_jobs_of_this_directory(tmp_path: Path) -> None:
    commands = tmp_path / "bin"
    commands.mkdir()
    jobs = {
        "1": ("svc.a-1", "RUNNING"),
        "2": ("svc.a-1", "COMPLETED"),
        "3": ("svc.a-10", "PENDING"),
        "4": ("svc.a-1", "PENDING"),
    }
    where = "'/ours' if sys.argv[-1] == '1' else '/theirs'"
    rows = "\n".join(
        SEPARATOR.join(
            {"jobid": job, "name": name, "state": state}.get(field, "N/A") for field, _ in FIELDS
        )
        + SEPARATOR
        for job, (name, state) in jobs.items()
    )
    for name, body in (
        ("squeue", f"print({rows!r})"),
        ("scontrol", f"print('JobId=' + sys.argv[-1], 'WorkDir=' + ({where}))"),
    ):
        file = commands / name
        file.write_text(f"#!{sys.executable} -IS\nimport sys\n{body}\n")
        file.chmod(0o700)
    client = SlurmClient(SlurmSettings(), environ={"PATH": str(commands)})
    assert client.named("svc.a-1", Path("/ours")) == ["1"]


@pytest.mark.cluster
def test_a_launch_that_crashed_after_a_submission_can_be_stopped(tmp_path: Path) -> None:
    directory = ServiceDir(tmp_path / "service")
    directory.create()
    directory.service.write_text(
        yaml.safe_dump(
            {"name": "svc", "model": {"path": "/m"}, "pool": [{"gpu_type": "a100", "gpus": 2}]}
        )
    )
    directory.site.write_text(
        yaml.safe_dump({"name": "x", "gpu_types": {"a100": {"memory": "1GB"}}})
    )
    directory.write_pilots(Pilots("local", (pilot("a-1", UNSENT),)))
    jobs = LocalSubmitter(directory.path)
    command = (sys.executable, "-c", "import time; time.sleep(600)")
    spec = PilotSpec("svc.a-1", None, "a100", 2, 1, None, command, directory.logs)
    job = jobs.submit(spec)  # and here the launch died
    deadline = time.monotonic() + 200
    while jobs.states([job])[job].state is not JobState.RUNNING:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert jobs.find("svc.a-1") == [job] and jobs.find("svc.a") == []
    stop_service(directory, 0.0, 20.0, lambda line: None)
    assert jobs.states([job])[job].state.over and jobs.find("svc.a-1") == []
    assert directory.pilots() == Pilots("local")
