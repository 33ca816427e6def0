"""The discovered site file and the doctor on a real Slurm."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from submitter_suite import wait

from flexslurm.slurm.command import clean_env
from flexslurm.slurm.sandbox import Sandbox
from tests.service_harness import running, some_asks, tiny_service

pytestmark = [pytest.mark.timeout(600)]
IN_JOB = ("doctor", "--job", "--timeout", "200")
"""The nodes of a busy machine meet late."""
MAIN = [sys.executable, "-c", "from flexslurm.cli.main import main; main()"]


def flexslurm(
    box: Sandbox, *arguments: str, before: tuple[str, ...] = (), **env: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*before, *MAIN, *arguments], env={**clean_env(str(box.conf)), **env},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def discovered(slurm_sandbox: Sandbox, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("site") / "site.yaml"
    done = flexslurm(slurm_sandbox, "site", "discover", "--to", str(path))
    assert done.returncode == 0, done.stderr
    return path


def test_the_check_passes_what_was_discovered(slurm_sandbox: Sandbox, discovered: Path) -> None:
    done = flexslurm(slurm_sandbox, "site", "check", str(discovered), "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert told["problems"] == []
    assert told["partitions"]["scavenge"]["warning_s"] == 15
    assert not told["partitions"]["prio"]["preemptible"]
    # it promises what the sandbox's own file promises
    ours, own = (yaml.safe_load(p.read_text()) for p in (discovered, slurm_sandbox.site_file))
    assert ours["gpu_types"] == own["gpu_types"] and ours["slurm"] == own["slurm"]


def test_the_check_finds_what_is_wrong(
    slurm_sandbox: Sandbox, discovered: Path, tmp_path: Path
) -> None:
    data = yaml.safe_load(discovered.read_text())
    data["partitions"]["scavenge"]["grace"] = "10min"
    data["partitions"]["nowhere"] = {}
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(yaml.safe_dump(data))
    done = flexslurm(slurm_sandbox, "site", "check", str(wrong))
    assert done.returncode == 3 and "Traceback" not in done.stderr
    assert "Slurm gives 15 s of warning" in done.stdout and "'nowhere'" in done.stdout


@pytest.mark.slow
@pytest.mark.shared_service
def test_launch_serves_with_it_unedited(discovered: Path, tiny_model: Path, tmp_path: Path) -> None:
    asked = tiny_service(tiny_model, [("a100", 1, 1)])
    for entry in asked["pool"]:
        entry["partition"] = "scavenge"
    site = yaml.safe_load(discovered.read_text())
    with running(tmp_path, asked, site, cluster="slurm") as service:
        service.until(lambda status: status.state == "serving")
        asks = some_asks(2, 8)
        service.run(asks)
        assert [ask.finish for ask in asks] == ["length", "length"]


def test_the_doctor_at_the_door(slurm_sandbox: Sandbox, discovered: Path, tmp_path: Path) -> None:
    env = {"FLEXSLURM_SERVICES": str(tmp_path / "services")}
    done = flexslurm(slurm_sandbox, "doctor", "--site", str(discovered), "--json", **env)
    assert done.returncode == 0, done.stdout + done.stderr
    verdicts = {v["check"]: v for v in json.loads(done.stdout)}
    assert {"slurm", "nodes", "site file", "shared directory", "clock", "packages"} <= set(verdicts)
    assert verdicts["slurm"]["result"] == "ok"


def test_the_doctor_in_an_allocation(
    slurm_sandbox: Sandbox, discovered: Path, tiny_model: Path, tmp_path: Path
) -> None:
    salloc = ("salloc", "--quiet", "--partition=scavenge", "--nodes=2", "--gres=gpu:a100:1")
    done = flexslurm(
        slurm_sandbox, *IN_JOB, "--site", str(discovered), "--model", str(tiny_model),
        "--json", before=salloc, FLEXSLURM_SERVICES=str(tmp_path / "services"),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    verdicts = json.loads(done.stdout)
    assert [v for v in verdicts if v["result"] == "FAIL"] == []
    reached = {v["where"]: v["words"] for v in verdicts if v["check"] == "ports"}
    assert set(reached) == {"a100n1", "a100n2"}
    assert all("reaches all 1" in words for words in reached.values())
    assert list((tmp_path / "services").iterdir()) == []


def test_the_doctor_finds_a_model_that_is_not_there(
    slurm_sandbox: Sandbox, discovered: Path, tmp_path: Path
) -> None:
    salloc = ("salloc", "--quiet", "--partition=scavenge", "--nodes=1", "--gres=gpu:a100:1")
    done = flexslurm(
        slurm_sandbox, *IN_JOB, "--site", str(discovered), "--model", "/nonexistent",
        before=salloc, FLEXSLURM_SERVICES=str(tmp_path / "services"),
    )  # fmt: skip
    assert done.returncode == 8 and "-> put the model where" in done.stdout


def test_the_doctor_finds_several_induced_failures_at_once(
    slurm_sandbox: Sandbox, discovered: Path, tmp_path: Path
) -> None:
    """A wrong interface, NCCL told of another, cards that no driver shows, a damaged model."""
    data = yaml.safe_load(discovered.read_text())
    data["network"] = {"interface": "ib9", "nccl_env": {"NCCL_SOCKET_IFNAME": "=ib9"}}
    for entry in data["gpu_types"].values():
        del entry["virtual"]
    site = tmp_path / "site.yaml"
    site.write_text(yaml.safe_dump(data))
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").symlink_to(tmp_path / "nowhere")
    salloc = ("salloc", "--quiet", "--partition=scavenge", "--nodes=2", "--gres=gpu:a100:2")
    done = flexslurm(
        slurm_sandbox, *IN_JOB, "--site", str(site), "--model", str(model), "--json",
        before=salloc, FLEXSLURM_SERVICES=str(tmp_path / "services"),
    )  # fmt: skip
    assert done.returncode == 8 and "Traceback" not in done.stderr, done.stderr
    verdicts = json.loads(done.stdout)
    failed = {(v["check"], v["where"]) for v in verdicts if v["result"] == "FAIL"}
    checks = ("address", "nccl", "gpus", "model")
    assert failed == {(check, node) for check in checks for node in ("a100n1", "a100n2")}
    assert all(v["mend"] for v in verdicts if v["result"] == "FAIL")
    # what does work is still said
    assert {"python", "packages", "shared directory", "slurm"} <= {
        v["check"] for v in verdicts if v["result"] == "ok"
    }


@pytest.mark.shared_service  # the sandbox's slurmctld is another one afterwards
@pytest.mark.usefixtures("slurm")  # a killed one may remember jobs that had just ended
@pytest.mark.slow
def test_the_doctor_while_the_controller_is_away(
    slurm_sandbox: Sandbox, discovered: Path, tmp_path: Path
) -> None:
    slurm_sandbox.kill("slurmctld")
    try:
        data = yaml.safe_load(discovered.read_text())
        data["slurm"]["command_timeout"] = "5s"
        site = tmp_path / "site.yaml"
        site.write_text(yaml.safe_dump(data))
        env = {"FLEXSLURM_SERVICES": str(tmp_path / "services")}
        done = flexslurm(slurm_sandbox, "doctor", "--site", str(site), "--json", **env)
        assert done.returncode == 8 and "Traceback" not in done.stderr
        failed = {v["check"]: v for v in json.loads(done.stdout) if v["result"] == "FAIL"}
        assert set(failed) == {"slurm"} and failed["slurm"]["mend"]
        check = flexslurm(slurm_sandbox, "site", "check", str(site))
        assert check.returncode == 6 and "Traceback" not in check.stderr
    finally:
        slurm_sandbox.start("slurmctld")
        wait(lambda: flexslurm(slurm_sandbox, "site", "discover").returncode == 0, 60, "it is back")
