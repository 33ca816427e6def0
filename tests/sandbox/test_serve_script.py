"""What `flexslurm script` prints, handed to a real Slurm: one heterogeneous job that serves."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from submitter_suite import wait

from flexslurm.cli.ask import ask_status
from flexslurm.errors import FlexslurmError
from flexslurm.messages import StatusAnswer
from flexslurm.slurm.client import SlurmClient
from flexslurm.slurm.command import clean_env
from flexslurm.slurm.sandbox import Sandbox
from flexslurm.wire.service_dir import ServiceDir
from tests.service_harness import Ask, check, finish, oracle, some_asks, stream, tiny_service

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
MAIN = [sys.executable, "-c", "from flexslurm.cli.main import main; main()"]


def status(directory: ServiceDir) -> StatusAnswer | None:
    try:
        return ask_status(directory)
    except FlexslurmError:
        return None


def start(endpoint: str, asks: Sequence[Ask]) -> list[threading.Thread]:
    threads = [threading.Thread(target=stream, args=(endpoint, a), daemon=True) for a in asks]
    for thread in threads:
        thread.start()
    return threads


def test_two_components_serve_streams(
    slurm_sandbox: Sandbox, slurm: SlurmClient, tiny_model: Path, tmp_path: Path, root: Path
) -> None:
    site = yaml.safe_load(slurm_sandbox.site_file.read_text())
    site["gpu_types"]["a100"]["memory"] = site["gpu_types"]["l40s"]["memory"] = "700kB"
    site["env"] = {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    asked = tiny_service(tiny_model, [("a100", 2, 1), ("l40s", 1, 2)], memory_fraction=1.0)
    for entry in asked["pool"]:
        entry["partition"] = "scavenge"
    for name, data in (("site.yaml", site), ("service.yaml", asked)):
        (tmp_path / name).write_text(yaml.safe_dump(data))
    directory = ServiceDir(tmp_path / "service")
    script = tmp_path / "job.sh"
    done = subprocess.run(
        [*MAIN, "script", str(tmp_path / "service.yaml"), "--site", str(tmp_path / "site.yaml"),
         "--head-node", "--service-dir", str(directory.path), "--to", str(script)],
        env=clean_env(str(slurm_sandbox.conf)), capture_output=True, text=True, timeout=200,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    job = slurm.submit(script, cwd=tmp_path).base
    log = tmp_path / f"flexslurm.tiny.{job}.log"

    def serves() -> bool:
        told = status(directory)
        over = slurm.jobs([job])[job].state.over
        assert not over, log.read_text()[-3000:]
        return told is not None and told.state == "serving"

    wait(serves, 120, "the service in the job serves")
    told = status(directory)
    assert told is not None and told.gear is not None
    assert {f.gpu_type for f in told.fragments} == {"a100", "l40s"} and len(told.fragments) == 3
    asks = some_asks(4, 30)
    finish(start(told.endpoint, asks), 60)
    check(asks, oracle(tiny_model, asks))
