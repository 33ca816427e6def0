"""Where the demo runs: a private real Slurm, or local processes that act its preemption."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from flexslurm.errors import EnvironmentFault, ServiceError, SlurmError
from flexslurm.wire.service_dir import Pilot, ServiceDir

Say = Callable[[str], None]


class DemoCluster(Protocol):
    """A cluster that the demo may do as it likes with."""

    name: str

    def up(self) -> Path:
        """Start it; returns its site file."""
        ...

    def preempt(self, pilot: Pilot, directory: ServiceDir) -> str:
        """Have the GPUs of a pilot that runs taken; returns what was done, in words."""
        ...

    def give_back(self) -> None:
        """Whoever took the GPUs is done with them."""
        ...

    def down(self) -> None: ...


class SlurmCluster:
    """The sandbox: munge, slurmctld and a slurmd for each node, all real."""

    name = "slurm"

    def __init__(self, directory: Path, say: Say) -> None:
        from flexslurm.slurm.sandbox import Sandbox
        from flexslurm.slurm.sandbox_config import default_config

        config = default_config()
        # two GPUs a node: then each pilot has a node of its own, and one can be taken alone
        nodes = {
            name: n.model_copy(update={"gpus": min(n.gpus, 2)}) for name, n in config.nodes.items()
        }
        self._box = Sandbox(directory, config.model_copy(update={"nodes": nodes}))
        self._say = say
        self._job: str | None = None

    def up(self) -> Path:
        self._box.up(timeout_s=60)
        # everything that the demo starts talks to this Slurm
        os.environ.update(self._box.env())
        return Path(self._box.site_file)

    def preempt(self, pilot: Pilot, directory: ServiceDir) -> str:
        """Submit a job of higher priority that wants the very node the pilot is on."""
        from flexslurm.config.schema import load_section
        from flexslurm.config.site import Site
        from flexslurm.slurm.client import SlurmClient

        client = SlurmClient(load_section(Site, directory.site).slurm)
        nodes = client.jobs([pilot.job_id])[pilot.job_id].nodes
        if not nodes:
            raise ServiceError(f"{pilot.fragment}, job {pilot.job_id}, has no node to be taken")
        node = nodes[0]
        script = directory.path / "urgent.sh"
        script.write_text("#!/bin/sh\nexec sleep 600\n")
        job = client.submit(
            script,
            "--partition=prio",
            "--job-name=urgent",
            f"--nodelist={node}",
            f"--gres=gpu:{pilot.gpu_type}:{pilot.gpus}",
            f"--output={directory.logs}/urgent.log",
        )
        self._job, self._client = job.base, client
        return (
            f"job {job.base} of partition prio wants all of {node}: Slurm preempts {pilot.fragment}"
        )

    def give_back(self) -> None:
        if self._job is not None:
            self._client.cancel([self._job])
            self._job = None

    def down(self) -> None:
        self._box.down()


class LocalCluster:
    """Local processes; a preemption is acted: SIGTERM, grace, SIGKILL, back when given back."""

    name = "local"

    def __init__(self, directory: Path, say: Say) -> None:
        self._directory = directory
        self._say = say

    def up(self) -> Path:
        from flexslurm.slurm.sandbox import Sandbox

        self._directory.mkdir(parents=True, exist_ok=True)
        site = self._directory / "site.yaml"
        site.write_text(Sandbox(self._directory).site_yaml())
        return site

    def preempt(self, pilot: Pilot, directory: ServiceDir) -> str:
        from flexslurm.slurm.local import LocalSubmitter

        submitter = LocalSubmitter(directory.path)
        submitter.preempt(pilot.job_id, grace_s=10.0, away_s=10.0)
        return f"{pilot.fragment} is told to leave, as Slurm would: SIGTERM, 10 s, SIGKILL"

    def give_back(self) -> None:
        """It comes back by itself after its time away."""

    def down(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)


def choose_cluster(directory: Path, local: bool, say: Say) -> DemoCluster:
    """A real Slurm where this machine can have one; else local processes, and says so."""
    if local:
        return LocalCluster(directory, say)
    try:
        from flexslurm.slurm.sandbox_host import check_programs

        check_programs()
        return SlurmCluster(directory, say)
    except (EnvironmentFault, SlurmError) as error:
        say(f"no real Slurm here, so local processes act one: {error.message}")
        if error.hint:
            say(f"  {error.hint}")
        return LocalCluster(directory, say)


def wait_for(what: Callable[[], bool], timeout_s: float, poll_s: float = 0.1) -> bool:
    """Whether it came true in time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if what():
            return True
        time.sleep(poll_s)
    return what()
