"""A real Slurm for the tests that want one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from submitter_suite import wait

from flexslurm.config.schema import load_section
from flexslurm.config.site import Site
from flexslurm.slurm import sandbox_host
from flexslurm.slurm.client import SlurmClient
from flexslurm.slurm.sandbox import Sandbox


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.path.is_relative_to(Path(__file__).parent):
        missing = sandbox_host.missing_packages()
        if missing:
            pytest.skip(f"needs Debian's packages {' '.join(missing)}")


@pytest.fixture(scope="session")
def slurm_sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    """The default sandbox: a100n[1-2] with 4 GPUs, l40n[1-2] with 2, cpun1; one per session."""
    box = Sandbox(tmp_path_factory.mktemp("slurm"))
    box.up()
    yield box
    box.down()


@pytest.fixture(scope="session")
def sandbox_site(slurm_sandbox: Sandbox) -> Site:
    """The site file that goes with it."""
    return load_section(Site, slurm_sandbox.site_file)


@pytest.fixture
def slurm(sandbox_site: Site) -> Iterator[SlurmClient]:
    """A client of it; the jobs of the test are ended, and gone, afterwards."""
    client = SlurmClient(sandbox_site.slurm)
    yield client
    for state in ("PENDING", "RUNNING"):
        client.call("scancel", f"--user={os.geteuid()}", f"--state={state}")
    wait(lambda: not client.call("squeue", "-h").out.strip(), 30, "all jobs are gone")
