"""`flexslurm profile` on this machine: real stages, one process a rank, and a file to plan with."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from flexslurm.cli.main import run
from flexslurm.planner.profiles import Profile, read_profile

pytestmark = pytest.mark.slow

SITE = """
name: here
gpu_types:
  plain: {memory: 64MiB, virtual: {}}
  slow: {memory: 64MiB, virtual: {speed: 0.2}}
  acting: {model: a100-80, memory: 64MiB, virtual: {pacing: acted, acts_model: llama-2-70b}}
  quick: {model: a100-80, memory: 64MiB, virtual: {pacing: acted, acts_model: mistral-7b}}
"""
SMALL = (
    "--max-batch", "4", "--max-tokens", "16", "--max-context", "48", "--block-tokens", "16",
    "--minutes", "1", "--no-serve",
)  # fmt: skip


@pytest.fixture
def site(tmp_path: Path) -> Path:
    path = tmp_path / "site.yaml"
    path.write_text(SITE)
    return path


def profiled(model: Path, site: Path, gpu_type: str, tp: int, *more: str) -> Profile:
    out = site.parent / "profiles"
    code = run([
        "profile", str(model), "--local", "--site", str(site), "--gpu-type", gpu_type,
        "--tp", str(tp), "--dtype", "float64", "--out", str(out), *SMALL, *more,
    ])  # fmt: skip
    assert code == 0
    file = file_of(site)
    return read_profile(file.read_text(), str(file))


def file_of(site: Path) -> Path:
    """The only file that was written."""
    (file,) = (site.parent / "profiles").iterdir()
    return file


def test_a_group_of_two_ranks(tiny_model: Path, site: Path, capsys) -> None:
    """What a layer or a head takes is a difference, which a busy machine may make nothing."""
    profile = profiled(tiny_model, site, "plain", 2)
    assert (profile.model, profile.kind, profile.dtype) == ("llama", ("plain", 2), "float64")
    rows = [line.split(",") for line in file_of(site).read_text().splitlines()]
    assert {row[2] for row in rows if row[0] == "decode"} >= {"1", "4"}
    assert {row[2] for row in rows if row[0] == "last"} == {"1", "4"}
    assert {"load", "first", "step", "prefill"} < {row[0] for row in rows}
    assert 0 <= profile.layer_s(4, 100, 100, 4) < math.inf and 0 <= profile.last(4) < math.inf
    assert profile.load_layer_s > 0
    said = capsys.readouterr()
    assert said.out.strip().endswith("llama-plain-tp2-float64.csv")
    assert "decode, 4 x 1 tokens of 48" in said.err


def test_an_acting_gpu_takes_the_time_of_the_model_it_acts(tiny_model: Path, site: Path) -> None:
    """Six layers stand for 80 of 6.8 GB in float64, read at three quarters of 2.039 TB/s.

    A layer is the difference of two stages, each late on a busy machine. Really it computes for
    1 ms; how exact it is says a unit test that plays the times.
    """
    profile = profiled(tiny_model, site, "acting", 1, "-q")
    layer_s = 80 / 6 * (8 * 855.7e6 / (0.75 * 2.039e12) + 120e-6)
    assert layer_s / 4 < profile.layer_s(1, 32, 32, 1) < 4 * layer_s


def test_what_a_cycle_takes_besides_the_stage(tiny_model: Path, site: Path, capsys) -> None:
    """Served by a group of two that acts a step of 20 ms: head and messages come on top.

    How much that is says nothing here, where other tests run: a unit test plays the times.
    """
    profile = profiled(tiny_model, site, "quick", 2, "--serve")
    said = capsys.readouterr().err
    assert "serving quick tp2 [0,6) to 6 streams" in said
    (row,) = [line for line in file_of(site).read_text().splitlines() if line.startswith("head")]
    assert row.startswith("head,6,4,0,")
    assert profile.head is not None and 0 <= profile.head(4) < math.inf


def test_a_service_that_cannot_be_leaves_the_rest(tiny_model: Path, site: Path, capsys) -> None:
    """The small memory holds three layers for a trial, but no whole model to serve."""
    site.write_text(SITE.replace("plain: {memory: 64MiB", "plain: {memory: 1500kB"))
    profile = profiled(tiny_model, site, "plain", 1, "--serve")
    assert "do not hold the whole model" in capsys.readouterr().err
    assert profile.head is None and 0 <= profile.layer_s(4, 100, 100, 4) < math.inf


def test_errors_are_those_of_the_trial(tiny_model: Path, site: Path, capsys) -> None:
    base = ["profile", str(tiny_model), "--local", "--site", str(site), *SMALL]
    out = ["--out", str(site.parent / "p")]
    assert run([*base, *out, "--gpu-type", "plain", "--tp", "4", "--dtype", "float64"]) == 4
    assert "too few for 4" in capsys.readouterr().err
    assert run([*base, *out, "--gpu-type", "plian", "--dtype", "float64"]) == 3
    assert "did you mean 'plain'" in capsys.readouterr().err
    weights = next(tiny_model.glob("*.safetensors"))
    broken = site.parent / "broken"
    broken.mkdir()
    for file in tiny_model.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    (broken / weights.name).write_bytes(weights.read_bytes()[:-1000])
    base[1] = str(broken)
    assert run([*base, *out, "--gpu-type", "plain", "--dtype", "float64"]) == 4
    assert weights.name in capsys.readouterr().err
    assert not list(site.parent.glob("p/.trial-*"))
