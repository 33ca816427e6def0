"""`flexslurm profile` as a Slurm job, `flexslurm probe` by srun."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from submitter_suite import wait

from flexslurm.cli.main import run
from flexslurm.errors import EnvironmentFault
from flexslurm.planner.links import node_link, read_links
from flexslurm.planner.profiles import read_profile
from flexslurm.slurm.client import SlurmClient
from flexslurm.slurm.probing import library_name
from flexslurm.slurm.sandbox import Sandbox

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_profile_is_measured_by_a_job(
    slurm_sandbox: Sandbox, slurm: SlurmClient, tiny_model: Path, tmp_path: Path, capsys
) -> None:
    code = run([
        "profile", str(tiny_model), "--site", str(slurm_sandbox.site_file), "--gpu-type", "l40s",
        "--tp", "2", "--partition", "scavenge", "--dtype", "float64", "--max-batch", "2",
        "--max-tokens", "8", "--max-context", "32", "--block-tokens", "16", "--no-serve",
        "--out", str(tmp_path),
    ])  # fmt: skip
    said = capsys.readouterr()
    assert code == 0, said.err
    assert "runs on l40n" in said.err
    (file,) = tmp_path.iterdir()
    profile = read_profile(file.read_text(), str(file))
    assert profile.kind == ("l40s", 2)


@pytest.mark.long
def test_a_job_serves_the_model_too(
    slurm_sandbox: Sandbox, slurm: SlurmClient, tiny_model: Path, tmp_path: Path, capsys
) -> None:
    """A service of its own on the job's node, which Slurm knows nothing of and which ends."""
    code = run([
        "profile", str(tiny_model), "--site", str(slurm_sandbox.site_file), "--gpu-type", "l40s",
        "--tp", "2", "--partition", "scavenge", "--dtype", "float64", "--max-batch", "2",
        "--max-tokens", "8", "--max-context", "32", "--block-tokens", "16",
        "--out", str(tmp_path),
    ])  # fmt: skip
    said = capsys.readouterr()
    assert code == 0, said.err
    assert "serving l40s tp2 [0,6) to 3 streams" in said.err
    assert "serving l40s tp2 [0,3) → l40s tp2 [3,6) to 3 streams" in said.err
    (file,) = tmp_path.iterdir()
    text = file.read_text()
    assert "\nhead,6,2,0," in text and "\npass,6,2,0," in text
    profile = read_profile(text, str(file))
    assert profile.head is not None and profile.head(2) > 0, "it is of one service: never negative"
    wait(lambda: not slurm.call("squeue", "-h").out.strip(), 30, "the trial's job is gone")


@pytest.fixture(scope="module")
def _mpi() -> None:
    try:
        library_name()
    except EnvironmentFault as error:
        pytest.skip(error.message)


@pytest.mark.usefixtures("_mpi", "slurm")
def test_links_between_nodes(slurm_sandbox: Sandbox, tmp_path: Path, capsys) -> None:
    file = tmp_path / "links.csv"
    code = run([
        "probe", "--site", str(slurm_sandbox.site_file), "--nodelist", "a100n[1-2],l40n1",
        "--nodes", "3", "--out", str(file),
    ])  # fmt: skip
    said = capsys.readouterr()
    assert code == 0, said.err
    rows = read_links(file.read_text(), str(file))
    pairs = {(row.source, row.target) for row in rows}
    assert pairs == {("a100n1", "a100n2"), ("a100n1", "l40n1"), ("a100n2", "l40n1")}
    assert node_link(rows).bandwidth > 1e6
    assert "node_link: {bandwidth:" in said.out


@pytest.mark.usefixtures("_mpi", "slurm")
def test_processes_that_do_not_find_each_other(slurm_sandbox: Sandbox, capsys) -> None:
    assert run(["probe", "--site", str(slurm_sandbox.site_file), "--mpi", "none"]) == 8
    assert "alone" in capsys.readouterr().err


@pytest.mark.usefixtures("_mpi", "slurm")
def test_a_step_of_a_job(slurm_sandbox: Sandbox, tmp_path: Path) -> None:
    """Inside of salloc: the ranks get the nodes of the job around it."""
    file = tmp_path / "links.csv"
    probe = [
        sys.executable, "-c", "from flexslurm.cli.main import main; main()", "probe", "--site",
        str(slurm_sandbox.site_file), "--out", str(file),
    ]  # fmt: skip
    subprocess.run(
        ["salloc", "--partition=scavenge", "--nodes=2", "--quiet", *probe],
        env=SlurmClient().env | slurm_sandbox.env(), check=True, timeout=200, cwd=tmp_path,
    )  # fmt: skip
    assert len({(r.source, r.target) for r in read_links(file.read_text(), str(file))}) == 1
