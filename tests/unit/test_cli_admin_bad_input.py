"""Wrong input to the admin's commands: one clear message, the right exit code, no traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexslurm.cli.main import run

SITE = """\
name: x
gpu_types:
  a: {memory: 1GiB, memory_bandwidth: 1GB/s, flops: 1TFLOPS, virtual: {}}
partitions:
  p: {gpu_types: [a], gpus_per_node: 2}
"""
FILES = {
    "ok.yaml": SITE,
    "key.yaml": SITE.replace("gpu_types:\n", "gpu_typs:\n", 1),
    "type.yaml": SITE.replace("gpus_per_node: 2", "gpus_per_node: many"),
    "unit.yaml": SITE.replace("1GiB", "1 potato"),
    "empty.yaml": "",
    "list.yaml": "- a\n",
    "broken.yaml": "name: [\n",
    "mode.yaml": SITE + "paths: {shared_dir: /proc/nope}\n",
}
NO_SLURM = "is not on this machine"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory with these files, and no Slurm anywhere."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\x00")
    (tmp_path / "dir.yaml").mkdir()
    pool = "pool: [{gpu_type: a, gpus: 1, partition: p}]\n"
    (tmp_path / "svc.yaml").write_text(f"name: s\nmodel: {{path: {tiny_model}}}\n{pool}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setenv("FLEXSLURM_SERVICES", str(tmp_path / "services"))
    for name in ("FLEXSLURM_SITE", "SLURM_CONF", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("site check key.yaml --offline", 3, ["key.yaml:2", "did you mean 'gpu_types'"]),
        ("site check type.yaml --offline", 3, ["type.yaml:5", "gpus_per_node", "'many'"]),
        ("site check unit.yaml --offline", 3, ["unit.yaml:3", "memory", "potato"]),
        ("site check empty.yaml --offline", 3, ["empty.yaml", "required"]),
        ("site check list.yaml --offline", 3, ["list.yaml"]),
        ("site check broken.yaml --offline", 3, ["broken.yaml"]),
        ("site check binary.yaml --offline", 3, ["not UTF-8"]),
        ("site check dir.yaml --offline", 3, ["Is a directory"]),
        ("site check none.yaml --offline", 3, ["none.yaml: no such file"]),
        ("site check ok.yaml", 8, [NO_SLURM]),
        ("site check", 2, ["missing argument"]),
        ("site discover", 8, [NO_SLURM, "login node"]),
        ("site discover --command squeue", 2, ["NAME=OTHER"]),
        ("site discover --command squeeue=x", 3, ["did you mean 'squeue'"]),
        ("site discover --to ok.yaml", 8, ["is there already", "--force"]),
        ("script svc.yaml --site key.yaml", 3, ["key.yaml:2"]),
        ("script none.yaml --site ok.yaml", 3, ["none.yaml: no such file"]),
        ("script svc.yaml", 2, ["--site"]),
        ("script svc.yaml --site ok.yaml --to dir.yaml", 8, ["is there already"]),
        ("script svc.yaml --site ok.yaml --to /proc/x", 8, ["cannot write /proc/x"]),
        ("script svc.yaml --site ok.yaml --components b:1", 3, ["no GPU type 'b'", "legal here"]),
        ("script svc.yaml --site ok.yaml --components q/a:1", 3, ["no partition 'q'"]),
        ("script svc.yaml --site ok.yaml --components p/a:3", 3, ["at most 2 GPUs", "more nodes"]),
        ("script svc.yaml --site ok.yaml --components a", 3, ["TYPE:GPUS"]),
        ("hooks show nothing", 3, ["no hook 'nothing'", "job_submit"]),
        ("hooks install prolog", 2, ["--to"]),
        ("hooks install prolog --to /proc/x", 8, ["cannot write into /proc/x", "--to"]),
        ("hooks install job_submit --to h --site key.yaml", 3, ["key.yaml:2"]),
        ("hooks install strigger --to h --register", 8, [NO_SLURM]),
        ("hooks uninstall prolog --to h", 8, [NO_SLURM, "--force"]),
        ("hooks status nothing", 3, ["no hook 'nothing'"]),
        ("doctor --site none.yaml", 3, ["none.yaml: no such file"]),
        ("doctor --site key.yaml", 3, ["key.yaml:2"]),
        ("doctor --timeout soon --job", 2, ["--timeout"]),
        ("doctor --timeout -1 --job", 2, ["--timeout"]),
        ("doctor --job", 8, ["not inside a Slurm job", "salloc"]),
        ("config schema nothing", 2, ["'nothing'"]),
    ],
)
def test_wrong_input(
    line: str, code: int, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    ended = run(line.split())
    out, err = capsys.readouterr()
    assert ended == code, out + err
    assert err.startswith("flexslurm: error: ") and "Traceback" not in out + err
    for said in words:
        assert said in err, err


def test_the_doctor_says_all_that_is_wrong_at_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FLEXSLURM_SERVICES")
    assert run(["doctor", "--site", "mode.yaml", "--model", "/nonexistent"]) == 8
    out, err = capsys.readouterr()
    failed = [line.split()[1] for line in out.splitlines() if line.startswith("FAIL")]
    assert set(failed) == {"slurm", "shared", "model"}
    mends = [line for line in out.splitlines() if line.strip().startswith("->")]
    assert len(mends) >= len(failed) and "checks failed" in err


def test_in_a_job_without_a_shared_directory(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "1")
    monkeypatch.delenv("FLEXSLURM_SERVICES")
    assert run(["doctor", "--job", "--site", "mode.yaml"]) == 8
    err = capsys.readouterr().err
    assert "shared directory: cannot make /proc/nope" in err and "paths.shared_dir" in err
