"""What a launch says of the cluster: the warnings it counts on, and where Slurm says otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexslurm.cli.main import run
from flexslurm.cli.slurm_notes import surprises, warnings_of
from flexslurm.config.schema import parse_section
from flexslurm.config.service import Fragment
from flexslurm.config.site import Site

SCONTROL = """\
#!/bin/sh
case "$2" in
partition)
  echo "PartitionName=low Nodes=n[1-2] PreemptMode=REQUEUE PriorityTier=1 GraceTime=20 State=UP"
  echo "PartitionName=high Nodes=n[1-2] PreemptMode=OFF PriorityTier=9 GraceTime=0 State=UP" ;;
config)
  printf 'KillWait = 30 sec\\nPreemptType = preempt/partition_prio\\nPreemptMode = REQUEUE\\n' ;;
esac
"""


def site_text(tmp_path: Path, grace: str) -> str:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(SCONTROL)
    scontrol.chmod(0o755)
    return (
        "name: x\n"
        "gpu_types: {a: {memory: 1GiB, virtual: {}, memory_bandwidth: 1GB/s, flops: 1e9}}\n"
        f"partitions: {{low: {{grace: {grace}}}}}\n"
        f"slurm: {{commands: {{scontrol: {scontrol}}}}}\n"
    )


def read(text: str) -> Site:
    return parse_section(Site, text, "site.yaml")


def test_a_promise_that_slurm_does_not_keep_is_said(tmp_path: Path) -> None:
    assert surprises(read(site_text(tmp_path, "20s"))) == []
    (line,) = surprises(read(site_text(tmp_path, "60s")))
    assert line == "partition 'low': Slurm gives 20 s of warning, the site file says 60 s"


def test_without_slurm_there_is_nothing_to_say() -> None:
    assert surprises(read("name: x\ngpu_types: {a: {}}\nslurm: {commands: {scontrol: /no}}")) == []


def test_each_partition_is_named_once(tmp_path: Path) -> None:
    pool = [Fragment(partition="low", gpu_type="a", gpus=1)] * 2 + [Fragment(gpu_type="a", gpus=1)]
    (words,) = warnings_of(pool, read(site_text(tmp_path, "20s")))
    assert words.startswith("low: 20 s from warning to end, then requeued")


def test_a_dry_run_says_both(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "site.yaml").write_text(site_text(tmp_path, "60s"))
    (tmp_path / "chat.yaml").write_text(
        f"name: chat\nmodel: {{path: {tiny_model}, dtype: float32}}\n"
        "pool: [{partition: low, gpu_type: a, gpus: 1}]\n"
    )
    words = ["launch", str(tmp_path / "chat.yaml"), "--site", str(tmp_path / "site.yaml")]
    assert run([*words, "--service-dir", str(tmp_path / "s"), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "note: partition 'low': Slurm gives 20 s of warning, the site file says 60 s" in out
    assert "partition low: 60 s from warning to end" in out


SILENT = "exec sleep 60"


@pytest.mark.parametrize(
    ("scontrol", "code", "words"),
    [
        (None, 8, "scontrol' is not on this machine"),
        ("echo 'scontrol: fatal: Could not establish a configuration source' >&2; exit 1", 6,
         "scontrol finds no configuration of Slurm"),
        ("echo 'slurm_load_ctl_conf error: Unable to contact slurm controller (connect failure)' "
         ">&2; exit 1", 6, "Slurm does not answer"),
        (SILENT, 6, "did not answer within 1 s"),
    ],
)  # fmt: skip
def test_without_slurm_a_launch_says_one_thing_and_makes_nothing(
    scontrol: str | None, code: int, words: str, tmp_path: Path, tiny_model: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    text = site_text(tmp_path, "20s")
    if scontrol == SILENT:
        text = text.replace("slurm: {", "slurm: {command_timeout: 1s, ")
    if scontrol is None:
        (tmp_path / "scontrol").unlink()
    else:
        (tmp_path / "scontrol").write_text(f"#!/bin/sh\n{scontrol}\n")
    (tmp_path / "site.yaml").write_text(text)
    (tmp_path / "chat.yaml").write_text(
        f"name: chat\nmodel: {{path: {tiny_model}, dtype: float32}}\n"
        "pool: [{partition: low, gpu_type: a, gpus: 1}]\n"
    )
    launch = ["launch", str(tmp_path / "chat.yaml"), "--site", str(tmp_path / "site.yaml")]
    launch += ["--service-dir", str(tmp_path / "s")]
    assert run(launch) == code
    told = capsys.readouterr()
    assert words in told.err and told.err.count("flexslurm: error:") == 1
    assert told.out == "" and not (tmp_path / "s").exists()
    assert run([*launch, "--dry-run"]) == 0  # which needs no Slurm, and says what is not known
    assert "leaf switches are not known" in capsys.readouterr().out
