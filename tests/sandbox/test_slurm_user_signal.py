"""A site that warns with the job's own signal: its pilots hear it as well."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from submitter_suite import Diary, SubmitterSuite, wait

from flexslurm.config.schema import load_section, parse_section
from flexslurm.config.site import Site
from flexslurm.slurm.pilot import SlurmSubmitter
from flexslurm.slurm.sandbox import Sandbox
from flexslurm.slurm.sandbox_config import SandboxConfig
from flexslurm.slurm.window import disagreements, slurm_window

YAML = """\
nodes:
  g: {gpu_type: a100, gpus: 1}
gpu_types: {a100: {}}
partitions:
  low: {nodes: [g], default: true, preempt_mode: REQUEUE, grace: 10s}
  high: {nodes: [g], priority_tier: 5}
kill_wait: 2s
slurm_conf: [SlurmctldParameters=preempt_send_user_signal]
"""


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Sandbox]:
    box = Sandbox(tmp_path / "box", parse_section(SandboxConfig, YAML, "s.yaml"))
    box.up()
    yield box
    box.down()


def test_the_agents_hear_sigusr1(box: Sandbox, tmp_path: Path) -> None:
    site = load_section(Site, box.site_file)
    submitter = SlurmSubmitter(site, tmp_path / "svc")
    client = submitter.client
    low = next(part for part in client.partitions() if part.name == "low")
    window = slurm_window(low, client.partitions(), client.config())
    assert window.user_signal and (window.warning_s, window.kill_wait_s) == (10, 2)
    assert disagreements(site, client.partitions(), client.config()) == []

    diary = Diary(tmp_path / "diary")
    job_id = submitter.submit(SubmitterSuite().spec(tmp_path, "leave", partition="low"))
    wait(lambda: diary.of("start"), 20, "the task starts")
    high = tmp_path / "high.sh"
    high.write_text("#!/bin/bash\nsleep 60\n")
    client.submit(high, "--partition=high", "--gres=gpu:1", "--output=/dev/null")
    wait(lambda: diary.of("SIGUSR1"), 10, "the warning")
    assert diary.of("SIGTERM") == []
    assert submitter.states([job_id])[job_id].preempt_in_s is not None
    client.call("scancel", f"--user={os.geteuid()}")
