"""Every example site, beside the cluster it describes: checked, and a service launched dry.

The clusters are scripts that answer as Slurm would; nothing is submitted.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from flexslurm.cli.main import run
from flexslurm.config.schema_page import page
from flexslurm.config.site import Site
from tests.fake_slurm import FakeSlurm, node, partition

CLUSTERS = {
    "dgx-pod": FakeSlurm(
        {"dgx01": node("gpu:nvidia_h100_80gb_hbm3:8(S:0-1)", cpus=224),
         "dgx02": node("gpu:nvidia_h100_80gb_hbm3:8(S:0-1)", cpus=224, state="MIXED"),
         "cpu01": node("")},
        {"batch": partition("dgx[01-02]", tier=10, longest="1-00:00:00"),
         "interruptible": partition("dgx[01-02]", grace=300, mode="REQUEUE", longest="2-00:00:00"),
         "cpu": partition("cpu01", longest="7-00:00:00")},
        {"KillWait": "60 sec", "PreemptExemptTime": "00:30:00"},
    ),
    "university": FakeSlurm(
        {"a01": node("gpu:a100:4"), "v01": node("gpu:tesla_v100:4"),
         "r01": node("gpu:nvidia_geforce_rtx_4090:8"), "c01": node("")},
        {"gpu": partition("a01,v01,r01", longest="1-00:00:00"),
         "gpu-cancel": partition("r01", longest="08:00:00"),
         "cpu": partition("c01", longest="14-00:00:00")},
        {"PreemptType": "preempt/qos"},
        qos="normal|00:00:00|cluster|scavenger,scavenger-nograce|\n"
        "scavenger|00:02:00|requeue||\nscavenger-nograce|00:00:00|cancel||\n",
    ),
    "cloud-burst": FakeSlurm(
        {"spot-l4-1": node("gpu:l4:4", cpus=24, state="IDLE+CLOUD+POWERED_DOWN"),
         "spot-a10-1": node("gpu:a10g:4", cpus=24, state="IDLE+CLOUD+POWERED_DOWN"),
         "od-1": node("gpu:a10g:1", cpus=8, state="IDLE+CLOUD+POWERING_UP"),
         "ctl": node("", cpus=4)},
        {"spot": partition("spot-l4-1,spot-a10-1", grace=90, mode="REQUEUE"),
         "ondemand": partition("od-1,spot-a10-1", tier=5, longest="1-00:00:00"),
         "control": partition("ctl")},
        {"PreemptMode": "REQUEUE"},
    ),
    "mig": FakeSlurm(
        {"g1": node("gpu:nvidia_a100_80gb_pcie:4", cpus=128),
         "g2": node("gpu:nvidia_a100_80gb_pcie:2,gpu:a100_3g.40gb:4", cpus=128),
         "g3": node("gpu:nvidia_a100_80gb_pcie:1,shard:8", cpus=128), "c1": node("")},
        {"whole": partition("g[1-2]", grace=60, mode="REQUEUE", longest="2-00:00:00"),
         "slices": partition("g2", grace=60, mode="REQUEUE", longest="12:00:00"),
         "shared": partition("g3", longest="4:00:00"),
         "high": partition("g[1-2]", tier=9), "cpu": partition("c1")},
    ),
    "federation": FakeSlurm(
        {"tg01": node("gpu:a100:4"), "tg10": node("gpu:rtx4090:4"), "w1": node("")},
        {"a100": partition("tg01", grace=30, mode="REQUEUE", longest="24:00:00"),
         "rtx": partition("tg10", grace=30, mode="REQUEUE", longest="24:00:00"),
         "owners": partition("tg01,tg10", tier=9),
         "work": partition("w1", longest="24:00:00")},
        {"KillWait": "120 sec"},
        suffix=".tinygpu",
    ),
    "example": FakeSlurm(
        {"g1": node("gpu:nvidia_a100_80gb:4"), "g2": node("gpu:l40s:4"), "c1": node("")},
        {"spare": partition("g[1-2]", grace=60, mode="REQUEUE", longest="2-00:00:00"),
         "owned": partition("g1", tier=9), "cpu": partition("c1")},
    ),
}  # fmt: skip
POOLS = {
    "dgx-pod": [("interruptible", "h100", 8)],
    "university": [("gpu", "a100", 4), ("gpu", "v100", 2), ("gpu-cancel", "rtx4090", 2)],
    "cloud-burst": [("spot", "l4", 4), ("ondemand", "a10", 1)],
    "mig": [("whole", "a100", 2), ("slices", "mig-3g", 1), ("shared", "quarter", 1)],
    "federation": [("a100", "a100", 4), ("rtx", "rtx4090", 2)],
    "example": [("spare", "a100", 4), ("spare", "l40s", 2)],
}
ASKED = {
    "dgx-pod": ("--gres=gpu:nvidia_h100_80gb_hbm3:8", "--cpus-per-task=112"),
    "university": ("--qos=scavenger", "--account=public", "--comment=preempt=yes",
                   "--gres=gpu:tesla_v100:2"),
    "cloud-burst": ("--constraint=ondemand", "--gres=gpu:a10g:1", "--time=0-02:00:00"),
    "mig": ("--gres=gpu:a100_3g.40gb:1", "--gres=shard:2", "--gres=gpu:nvidia_a100_80gb_pcie:2"),
    "federation": ("sbatch.tinygpu --clusters=tinygpu", "srun.tinygpu", "--gres=gpu:rtx4090:2"),
    "example": ("--comment=preempt", "module load cuda", "--gres=gpu:nvidia_a100_80gb:4"),
}  # fmt: skip


@pytest.fixture
def flexslurm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Run a command line beside a cluster's commands; what it printed."""

    def call(commands: Path, *arguments: str, code: int = 0) -> str:
        monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
        monkeypatch.setenv("FLEXSLURM_SITE__PATHS__SHARED_DIR", str(tmp_path))
        monkeypatch.setenv("FLEXSLURM_SERVICES", str(tmp_path))
        ended = run(arguments)
        out, err = capsys.readouterr()
        assert ended == code, out + err
        return out

    return call


@pytest.mark.parametrize("name", sorted(CLUSTERS))
def test_the_check_passes_beside_its_cluster(
    name: str, root: Path, tmp_path: Path, flexslurm: Callable[..., str]
) -> None:
    commands = CLUSTERS[name].install(tmp_path / "bin")
    out = flexslurm(commands, "site", "check", str(root / "site-configs" / f"{name}.yaml"))
    assert "problem:" not in out and out.endswith("fine\n")
    windows = [line for line in out.splitlines() if "s from warning to end" in line]
    data = yaml.safe_load((root / "site-configs" / f"{name}.yaml").read_text())
    assert len(windows) == sum(p.get("preemptible", True) for p in data["partitions"].values())


@pytest.mark.parametrize("name", sorted(CLUSTERS))
def test_a_launch_asks_slurm_for_the_right_things(
    name: str, root: Path, tmp_path: Path, tiny_model: Path, flexslurm: Callable[..., str]
) -> None:
    fake = CLUSTERS[name]
    commands = fake.install(tmp_path / "bin")
    pool = [{"partition": p, "gpu_type": t, "gpus": n} for p, t, n in POOLS[name]]
    service = tmp_path / "service.yaml"
    service.write_text(
        yaml.safe_dump({"name": "chat", "model": {"path": str(tiny_model)}, "pool": pool})
    )
    site = root / "site-configs" / f"{name}.yaml"
    out = flexslurm(commands, "launch", str(service), "--site", str(site), "--dry-run")
    assert "note: partition" not in out  # it promises no more than Slurm does
    for words in ASKED[name]:
        assert words in out, out
    assert not any(call.startswith(("sbatch", "srun")) for call in fake.calls(commands))


def test_a_qos_that_gives_less_than_the_file_says(
    root: Path, tmp_path: Path, flexslurm: Callable[..., str]
) -> None:
    fake = replace(
        CLUSTERS["university"],
        qos="normal|00:00:00|cluster|scavenger|\nscavenger|00:00:30|cancel||\n",
    )
    site = root / "site-configs" / "university.yaml"
    out = flexslurm(fake.install(tmp_path / "bin"), "site", "check", str(site), code=3)
    assert "partition 'gpu': Slurm gives 30 s of warning, the site file says 120 s" in out
    assert "partition 'gpu': Slurm cancels preempted jobs" in out
    assert "partition 'gpu-cancel': Slurm has no QOS 'scavenger-nograce' (it has" in out


def test_slices_in_one_pilot_are_told_of(
    root: Path, tmp_path: Path, tiny_model: Path, flexslurm: Callable[..., str]
) -> None:
    pool = [{"partition": "slices", "gpu_type": "mig-3g", "gpus": 2, "count": 2}]
    data = {"name": "chat", "model": {"path": str(tiny_model)}, "pool": pool}
    (tmp_path / "service.yaml").write_text(yaml.safe_dump(data))
    commands = CLUSTERS["mig"].install(tmp_path / "bin")
    out = flexslurm(
        commands, "config", "check", "--service", str(tmp_path / "service.yaml"),
        "--site", str(root / "site-configs" / "mig.yaml"),
    )  # fmt: skip
    assert "note: pool.0: slices and shares" in out and "a count of 4" in out


def test_the_page_of_keys_is_the_schema_s(root: Path) -> None:
    """FLEXSLURM_WRITE_GOLDEN=1 writes it anew."""
    path = root / "docs" / "site-file.md"
    text = page(Site, "Keys of a site file")
    assert " object at 0x" not in text
    if os.environ.get("FLEXSLURM_WRITE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text
