"""A whole service on a real Slurm: preempted in mid-stream, requeued, back, and stopped clean."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from flexslurm.slurm.client import SlurmClient
from flexslurm.slurm.sandbox import Sandbox
from tests.service_harness import (
    RunningService,
    check,
    finish,
    in_the_middle,
    oracle,
    running,
    serves,
    some_asks,
    tiny_service,
)

pytestmark = [pytest.mark.shared_service, pytest.mark.timeout(600)]
FULL = "a100:4,l40s:2"


@pytest.fixture(scope="module")
def service(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_model: Path,
    slurm_sandbox: Sandbox,
) -> Iterator[RunningService]:
    """One pilot of each type, whole nodes, so that either can be taken alone."""
    site = yaml.safe_load(slurm_sandbox.site_file.read_text())
    site["gpu_types"]["a100"]["memory"] = "700kB"
    site["gpu_types"]["l40s"]["memory"] = "1200kB"
    asked = tiny_service(tiny_model, [("a100", 4, 1), ("l40s", 2, 1)], memory_fraction=1.0)
    for entry in asked["pool"]:
        entry["partition"] = "scavenge"
    home = tmp_path_factory.mktemp("service")
    with running(home, asked, site, cluster="slurm") as service:
        yield service


@pytest.mark.slow
def test_a_preempted_pilot(
    service: RunningService, tiny_model: Path, slurm: SlurmClient, tmp_path: Path
) -> None:
    """A job of higher priority takes the pilot's node; its streams go on; it comes back."""
    service.until(serves(FULL))
    asks = some_asks(6, 60)
    threads = service.start(asks)
    in_the_middle(asks)
    job = service.job_of("a100-1")
    node = slurm.jobs([job])[job].nodes[0]
    script = tmp_path / "urgent.sh"
    script.write_text("#!/bin/sh\nexec sleep 300\n")
    urgent = slurm.submit(
        script, "--partition=prio", f"--nodelist={node}", "--gres=gpu:a100:4",
        f"--output={tmp_path}/out",
    )  # fmt: skip
    finish(threads, 90)
    check(asks, oracle(tiny_model, asks))
    shifts = service.status().shifts
    assert any("must leave" in str(shift["why"]) for shift in shifts), shifts
    slurm.cancel([urgent.base])
    back = service.until(serves(FULL), 90)
    assert next(f for f in back.fragments if f.name == "a100-1").job_id == job
