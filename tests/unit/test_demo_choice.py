"""Where the demo runs: on a real Slurm where this machine can have one, else on local processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexslurm.cli.demo_cluster import DemoCluster, choose_cluster
from flexslurm.slurm import sandbox_host

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol")


class Machine:
    """A machine with these programs, in a directory that is on no PATH, and nothing else."""

    def __init__(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.home, self.said = home, list[str]()
        self.sbin, self.plugins = home / "sbin", home / "plugins"
        self.sbin.mkdir()
        self.plugins.mkdir()
        (self.plugins / "preempt_partition_prio.so").touch()
        for name in PROGRAMS:
            (self.sbin / name).touch(0o755)
        monkeypatch.setenv("PATH", str(home / "bin"))
        monkeypatch.setattr(sandbox_host, "_SBIN", (str(self.sbin),))
        monkeypatch.setattr(sandbox_host, "_plugin_dirs", lambda: [self.plugins])

    def choose(self, *, local: bool = False) -> DemoCluster:
        return choose_cluster(self.home / "cluster", local, self.said.append)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_a_slurm_off_the_path_is_taken(machine: Machine) -> None:
    assert machine.choose().name == "slurm" and not machine.said


@pytest.mark.parametrize(
    ("lost", "packages"),
    [
        (("slurmctld",), "slurmctld"),
        (("munged", "slurmctld", "slurmd"), "munge slurmctld slurmd"),
        (("sbatch",), "slurm-client"),
    ],
)
@pytest.mark.parametrize("how", ["removed", "empty and not executable"])
@pytest.mark.parametrize(("uid", "sudo"), [(0, ""), (1000, "sudo ")])
def test_without_its_daemons_local_processes_act_one_and_it_says_so(
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    lost: tuple[str, ...],
    packages: str,
    how: str,
    uid: int,
    sudo: str,
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: uid)
    for name in lost:
        if how == "removed":
            (machine.sbin / name).unlink()
        else:
            (machine.sbin / name).chmod(0o644)
    assert machine.choose().name == "local"
    assert machine.said == [
        "no real Slurm here, so local processes act one: "
        f"the sandbox needs these Debian packages: {packages}",
        f"  {sudo}apt-get install -y --no-install-recommends {packages}",
    ]


def test_without_its_plugins(machine: Machine) -> None:
    (machine.plugins / "preempt_partition_prio.so").unlink()
    assert machine.choose().name == "local"
    assert "slurm-wlm-basic-plugins" in machine.said[0]


def test_local_processes_that_were_asked_for_need_no_words(machine: Machine) -> None:
    assert machine.choose(local=True).name == "local" and not machine.said


def test_the_local_cluster_has_a_site_file_of_its_own(machine: Machine) -> None:
    (machine.sbin / "slurmctld").unlink()
    site = machine.choose().up()
    assert site.parent == machine.home / "cluster" and "gpu_types" in site.read_text()
