"""The batch scripts, byte for byte; FLEXSLURM_WRITE_GOLDEN=1 writes them anew."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from flexslurm.config.schema import parse_section
from flexslurm.config.site import Site
from flexslurm.errors import ConfigError
from flexslurm.slurm.script import (
    BatchScript,
    HeadSpec,
    PilotSpec,
    head_options,
    head_script,
    pilot_options,
    pilot_script,
    warning_s,
)
from flexslurm.slurm.times import parse_duration

GOLDEN = Path(__file__).parent / "slurm"
SITE = """\
name: example
gpu_types:
  a100: {model: a100-80, slurm_type: nvidia_a100_80gb}
  l40s: {memory: 48GB}
partitions:
  spare:
    gpu_types: [a100, l40s]
    grace: 30s
    account: proj
    qos: low
    constraint: ib&nvme
    cpus_per_gpu: 6
    default_walltime: 4h
    max_walltime: 12h
    sbatch_args: ["--comment=preempt me", --exclusive]
  cancelled: {gpu_types: [l40s], requeue: false}
slurm:
  commands: {sbatch: sbatch.tiny, srun: srun.tiny, scontrol: scontrol.tiny}
head:
  partition: cpu
  cpus: 4
  memory: 8GiB
  walltime: 2d
  sbatch_args: [--nice=100]
setup: [module load cuda]
env: {HF_HOME: /scratch/it's mine}
"""
NODE = ("/opt/py/bin/python", "-P", "-u", "-m", "submitit.core._submit", "/svc/jobs")


@pytest.fixture(scope="module")
def site() -> Site:
    return parse_section(Site, SITE, "site.yaml")


def pilot(**changes: object) -> PilotSpec:
    fields: dict[str, object] = {
        "name": "chat.a100-1", "partition": "spare", "gpu_type": "a100", "gpus": 4, "nodes": 2,
        "walltime_s": 5400.0, "command": ("agent",), "log_dir": Path("/svc/logs/a100-1"),
        "env": {"GREETING": "$HOME; rm -rf /"},
    }  # fmt: skip
    return PilotSpec(**(fields | changes))  # type: ignore[arg-type]


HEAD = HeadSpec("chat.head", ("head",), Path("/svc/logs/head"), {})


def check(script: BatchScript, name: str) -> None:
    text = script.text + f"# arguments: {list(script.arguments)}\n"
    path = GOLDEN / name
    if os.environ.get("FLEXSLURM_WRITE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def test_a_pilot_with_everything(site: Site) -> None:
    check(pilot_script(pilot(), site, NODE), "pilot-full.sh")


def test_a_pilot_with_nothing(site: Site) -> None:
    bare = parse_section(Site, "name: x\ngpu_types: {l40s: {}}", "site.yaml")
    spec = pilot(partition=None, gpu_type="l40s", gpus=1, nodes=1, walltime_s=None, env={})
    check(pilot_script(spec, bare, NODE), "pilot-bare.sh")


def test_a_pilot_that_is_cancelled_rather_than_requeued(site: Site) -> None:
    spec = pilot(partition="cancelled", gpu_type="l40s", walltime_s=None)
    check(pilot_script(spec, site, NODE), "pilot-cancelled.sh")


def test_the_head(site: Site) -> None:
    check(head_script(HEAD, site, NODE), "head.sh")


def test_every_script_is_one_that_bash_reads(site: Site) -> None:
    for script in (pilot_script(pilot(), site, NODE), head_script(HEAD, site, NODE)):
        done = subprocess.run(["bash", "-n"], input=script.text.encode(), check=False)
        assert done.returncode == 0


def test_values_reach_the_process_and_nothing_else(tmp_path: Path) -> None:
    """An environment made of shell code arrives as it is; the script's own words are stand-ins."""
    nasty = "a'b\"c$HOME`id`\\ \n* $(touch owned)"
    bare = parse_section(Site, "name: x\ngpu_types: {l40s: {}}", "site.yaml")
    spec = HeadSpec("h", (), tmp_path, {"NASTY": nasty})
    script = head_script(spec, bare, ("printenv", "NASTY"))
    done = subprocess.run(
        ["bash"], input=script.text, text=True, cwd=tmp_path, capture_output=True, check=True
    )
    assert done.stdout == nasty + "\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("word", ["hetjob", "PackJob"])
def test_words_that_sbatch_misreads_go_to_the_command_line(word: str, site: Site) -> None:
    script = pilot_script(pilot(log_dir=Path(f"/{word}/logs")), site, NODE)
    assert script.arguments == (f"--output=/{word}/logs/chat.a100-1.%j.batch.log",)
    assert not any(word in line for line in script.text.splitlines() if line.startswith("#SBATCH"))


def test_percent_signs_in_a_path_are_not_slurms(site: Site) -> None:
    options = pilot_options(pilot(log_dir=Path("/100%j")), site)
    assert "--output=/100%%j/chat.a100-1.%j.batch.log" in options


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpu_type": "h100"}, "no GPU type 'h100'"),
        ({"name": "a b"}, "cannot be a job's name"),
        ({"env": {"A-B": "x"}}, "'A-B' cannot be the name"),
    ],
)
def test_what_slurm_could_not_take_is_refused(
    changes: dict[str, object], message: str, site: Site
) -> None:
    with pytest.raises(ConfigError, match=message):
        pilot_script(pilot(**changes), site, NODE)


@pytest.mark.parametrize("option", ["comment=x", "--comment=a\nb", ""])
def test_options_of_a_site_are_options(option: str) -> None:
    text = f"name: x\ngpu_types: {{a: {{}}}}\npartitions: {{p: {{sbatch_args: [{option!r}]}}}}"
    with pytest.raises(ConfigError, match=r"site\.yaml:3: .*is no option of sbatch"):
        parse_section(Site, text.replace("'", '"'), "site.yaml")


def test_the_walltime_keeps_to_the_partitions_limit(site: Site) -> None:
    def asked(walltime_s: float | None) -> float | None:
        (option,) = [o for o in pilot_options(pilot(walltime_s=walltime_s), site) if "--time=" in o]
        return parse_duration(option.removeprefix("--time="))

    assert asked(None) == 4 * 3600 and asked(60.0) == 60 and asked(1e6) == 12 * 3600


def test_the_head_is_submitted_as_its_partition_wants() -> None:
    """A site that demands an account demands it of the head's job too."""
    cpu = "{account: proj, qos: long, constraint: avx, default_walltime: 3d, max_walltime: 2d}"
    text = f"name: x\ngpu_types: {{a: {{}}}}\npartitions: {{cpu: {cpu}}}\nhead: {{partition: cpu}}"
    options = head_options(HEAD, parse_section(Site, text, "site.yaml"))
    assert options[-5:] == [
        "--partition=cpu", "--time=2-00:00:00", "--account=proj", "--qos=long", "--constraint=avx",
    ]  # fmt: skip


def test_the_warning_comes_early_enough_and_not_too_early() -> None:
    assert warning_s(None) == 120 and warning_s(60) == 30
    assert warning_s(600) == 60 and warning_s(86400) == 120
