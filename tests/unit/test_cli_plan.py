"""`flexslurm plan` as a user meets it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from flexslurm.cli.plan_commands import plan
from flexslurm.errors import CapacityError, ConfigError, ModelError
from flexslurm.planner.files import open_table
from flexslurm.planner.profiles import Row, write_profile

_MAIN = "import sys; from flexslurm.cli.main import main; sys.exit(main())"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(plan, [str(a) for a in arguments], catch_exceptions=True)


BASE = ("--model", "llama-3.1-8b", "--pool", "l4:2x2,a10:1x1")


def test_a_table_and_pictures() -> None:
    result = run(*BASE)
    assert result.exception is None, result.exception
    lines = result.output.splitlines()
    assert lines[0].startswith("llama-3.1-8b: 8.03B parameters, 32 layers")
    assert any("default: no --site is given" in line for line in lines)
    assert any("NVIDIA L4 datasheet" in line for line in lines)
    for allocation in ("a10:1 ", "l4:2 ", "l4:2x2 ", "a10:1,l4:2x2 "):
        assert any(line.startswith(allocation) for line in lines), allocation
    assert any("┌" in line for line in lines)
    assert lines[-1].startswith("planned in ")


def test_json_is_json_and_nothing_else() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _MAIN, "plan", *BASE, "--json"],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["plan_seconds"] > 0
    assert answer["parameters"] == 8_030_261_248
    gears = {gear["signature"]: gear for gear in answer["gears"]}
    assert len(gears) == 6
    whole = gears["a10:1,l4:2x2"]
    assert whole["estimates"]["tokens_per_s"] > 0
    assert whole["gap"] == 0.0
    assert sum(len(r["stages"]) for r in whole["gear"]["replicas"]) >= 1
    assert gears[""]["gear"] is None and gears[""]["short_bytes"] > 0


def test_a_table_is_written_and_read(tmp_path: Path) -> None:
    out = tmp_path / "gears.bin"
    result = run(*BASE, "--out", out)
    assert result.exception is None, result.exception
    assert len(open_table(out)) == 6
    again = tmp_path / "again.bin"
    run(*BASE, "--out", again)
    assert again.read_bytes() == out.read_bytes()


def test_explain_and_what_if() -> None:
    result = run(*BASE, "--explain", "l4:2", "--what-if", "+h100:4x1")
    assert result.exception is None, result.exception
    assert "why l4:2:" in result.output
    assert "runner-up" in result.output
    assert "with 4 GPUs more:" in result.output


def test_capacity_with_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "curve.svg"
    load = "rate=2/s,in=1000,out=256"
    result = run(*BASE, "--capacity", load, "--picture", picture, "--slo", "tpot=200ms")
    assert result.exception is None, result.exception
    assert "512.0 tokens/s are wanted" in result.output
    assert "cheapest in GPUs:" in result.output
    assert picture.read_text().lstrip().startswith("<?xml")
    found = json.loads(run(*BASE, "--capacity", load, "--json").output)["capacity"]
    assert found["cheapest"]["tokens_per_s"] >= found["wanted_tokens_per_s"] == 512.0


def test_a_site_file_gives_the_figures(tmp_path: Path) -> None:
    site = tmp_path / "site.yaml"
    site.write_text("name: t\ngpu_types:\n  tiny:\n    memory: 30GiB\n    virtual: {}\n")
    result = run("--model", "llama-3.1-8b", "--site", site, "--pool", "tiny:1x2")
    assert result.exception is None, result.exception
    assert "tiny: 30 GiB" in result.output
    with pytest.raises(ConfigError, match="the site defines no GPU type 'l4'"):
        raise_from(run("--model", "llama-3.1-8b", "--site", site, "--pool", "l4:1"))


def test_what_the_site_names_as_measured_is_used(tmp_path: Path) -> None:
    site = tmp_path / "site.yaml"
    site.write_text(
        "name: t\ngpu_types:\n  tiny:\n    memory: 30GiB\n    virtual: {}\n"
        "measured: {profiles: p, links: links.csv}\n"
    )
    (tmp_path / "p").mkdir()
    about = {"model": "llama-3.1-8b", "gpu_type": "tiny", "tp": 1, "dtype": "bfloat16"}
    rows = [Row("decode", 1, batch, 64, 0.25 * batch) for batch in (1, 8)]
    (tmp_path / "p" / "a.csv").write_text(write_profile(about, rows))
    (tmp_path / "links.csv").write_text(
        "source,target,bytes,seconds\na,b,1,0.001\na,b,2000001,0.003\n"
    )
    base = ("--model", "llama-3.1-8b", "--site", site, "--pool", "tiny:1x2", "--max-batch", 1,
            "--workload", "in=1,out=100")  # fmt: skip
    result = run(*base)
    assert result.exception is None, result.exception
    assert "step times measured: tiny tp1" in result.output
    assert "between nodes: 1 GB/s, 1 ms" in result.output
    gears = json.loads(run(*base, "--json").output)["gears"]
    whole = next(gear for gear in gears if gear["signature"] == "tiny:1x2")
    assert whole["estimates"]["tpot_s"] == pytest.approx(32 * 0.25, rel=0.05)
    # the option is for trying another
    rows = [Row("decode", 1, batch, 64, 0.5 * batch) for batch in (1, 8)]
    (tmp_path / "b.csv").write_text(write_profile(about, rows))
    gears = json.loads(run(*base, "--json", "--profile", tmp_path / "b.csv").output)["gears"]
    whole = next(gear for gear in gears if gear["signature"] == "tiny:1x2")
    assert whole["estimates"]["tpot_s"] == pytest.approx(32 * 0.5, rel=0.05)
    (tmp_path / "p" / "a.csv").write_text(write_profile(about, rows) + "decode,1,1,soon,1\n")
    with pytest.raises(ConfigError, match="context must be a whole number") as caught:
        raise_from(run(*base))
    assert (caught.value.file, caught.value.line) == (str(tmp_path / "p" / "a.csv"), 5)


def test_profiles_of_other_types_do_not_disturb(tmp_path: Path) -> None:
    rows = [Row("decode", 1, batch, 64, 0.25 * batch) for batch in (1, 8)]
    for gpu_type in ("l4", "h200"):
        about = {"model": "llama-3.1-8b", "gpu_type": gpu_type, "tp": 1, "dtype": "bfloat16"}
        (tmp_path / f"{gpu_type}.csv").write_text(write_profile(about, rows))
    result = run("--model", "llama-3.1-8b", "--pool", "l4:1x2", "--profile", tmp_path)
    assert result.exception is None, result.exception
    assert "step times measured: l4 tp1" in result.output
    (tmp_path / "x.csv").write_text(write_profile({**about, "gpu_type": "h999"}, rows))
    with pytest.raises(ConfigError, match="no GPU type 'h999'"):
        raise_from(run("--model", "llama-3.1-8b", "--pool", "l4:1x2", "--profile", tmp_path))


def raise_from(result: Result) -> None:
    assert result.exception is not None
    raise result.exception


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (("--model", "llama-9", "--pool", "l4:1"), ModelError, "no published configuration"),
        (("--model", "./no/such", "--pool", "l4:1"), ModelError, "no such file or directory"),
        (("--model", "llama-3.1-8b", "--pool", "l4"), ConfigError, "cannot read the pool item"),
        (("--model", "llama-3.1-8b", "--pool", "l5:1"), ConfigError, "catalogue has no 'l5'"),
        (("--model", "llama-3.1-8b", "--pool", "l4:257"), ConfigError, "is too large"),
        (("--model", "llama-3.1-8b", "--pool", "l4:1x65536,l4:1"), ConfigError, "is too large"),
        ((*BASE, "--capacity", "rate=1/s", "--price", "l5=2"), ConfigError, "has no 'l5'"),
        ((*BASE, "--capacity", "rate=1/s", "--price", "l4=inf"), ConfigError, "finite"),
        ((*BASE, "--slo", "tpot=fast"), ConfigError, "--slo tpot: cannot read 'fast'"),
        ((*BASE, "--slo", "speed=1"), ConfigError, "--slo: cannot read 'speed=1'"),
        ((*BASE, "--workload", "in=-3"), ConfigError, "'in' must be a whole number"),
        ((*BASE, "--workload", "rate=often"), ConfigError, "cannot read the rate"),
        ((*BASE, "--capacity", "in=5"), ConfigError, "--capacity needs a rate"),
        ((*BASE, "--explain", "h100:1"), ConfigError, "is not a part of"),
        (("--model", "llama-3.1-405b", "--pool", "l4:1"), CapacityError, "bytes short"),
        ((*BASE, "--capacity", "rate=9999/s"), CapacityError, "the pool gives at most"),
    ],
)
def test_wrong_questions_get_one_clear_answer(
    arguments: tuple[str, ...], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        raise_from(run(*arguments))


def test_a_checkpoint_directory_is_a_model(tmp_path: Path) -> None:
    from flexslurm.planner.published import config_of

    model = tmp_path / "my-model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(config_of("smollm2-135m")))
    for name in (model, model / "config.json"):
        result = run("--model", name, "--pool", "l4:1")
        assert result.exception is None, result.exception
        assert result.output.startswith("my-model: 0.135B parameters")
    (model / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not JSON"):
        raise_from(run("--model", model, "--pool", "l4:1"))
