"""What is wrong with a model's directory has one exit code, whichever command is asked."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from flexslurm.cli.main import run

SITE = """\
name: here
gpu_types: {card: {memory: 64MiB, virtual: {speed: 1.0}}}
partitions: {main: {gpu_types: [card], gpus_per_node: 2}}
"""
Damage = Callable[[Path], object]
DIRECTORY: dict[str, Damage] = {
    "no directory": lambda model: shutil.rmtree(model),
    "no config.json": lambda model: (model / "config.json").unlink(),
}
CONFIG: dict[str, Damage] = {
    "config.json is cut short": lambda model: (model / "config.json").write_text("{"),
    "config.json is a list": lambda model: (model / "config.json").write_text("[]"),
    "no such family": lambda model: (model / "config.json").write_text('{"model_type": "x"}'),
}
FILES: dict[str, Damage] = {
    "no weights": lambda model: (model / "model.safetensors").unlink(),
    "weights cut short": lambda model: _cut(model / "model.safetensors"),
    "no tokenizer": lambda model: (model / "tokenizer.json").unlink(),
    "tokenizer is no JSON": lambda model: (model / "tokenizer.json").write_text("{"),
    "tokens of no number": lambda model: _settings(
        model, added_tokens_decoder={"x": {"content": "y"}}
    ),
    "tokens that are none": lambda model: _settings(model, added_tokens_decoder={"300": 7}),
    "a list of tokens": lambda model: _settings(model, added_tokens_decoder=[7]),
    "templates without names": lambda model: _settings(model, chat_template=[{"x": "y"}]),
    "a template that ends early": lambda model: (model / "chat_template.jinja").write_text(
        "{% for x"
    ),
    "settings are a list": lambda model: (model / "tokenizer_config.json").write_text("[]"),
    "no such temperature": lambda model: (model / "generation_config.json").write_text(
        '{"temperature": -1}'
    ),
    "a part that is a number": lambda model: (model / "config.json").write_text(
        json.dumps(json.loads((model / "config.json").read_text()) | {"text_config": 7})
    ),
}


def _settings(model: Path, **values: object) -> None:
    (model / "tokenizer_config.json").write_text(json.dumps(values))


def _cut(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size // 2)


@pytest.fixture
def place(tmp_path: Path, tiny_model: Path) -> Path:
    """A model, a service file and a site file that fit each other."""
    shutil.copytree(tiny_model, tmp_path / "model")
    (tmp_path / "site.yaml").write_text(SITE)
    (tmp_path / "service.yaml").write_text(
        "name: t\nmodel: {path: model, dtype: float64}\n"
        "pool: [{partition: main, gpu_type: card, gpus: 2}]\n"
        "serving: {block_tokens: 16, max_context: 64}\n"
    )
    return tmp_path


def commands(place: Path) -> dict[str, list[list[str]]]:
    """All that take a model, by how much of it each of them reads."""
    service, site, model = (str(place / name) for name in ("service.yaml", "site.yaml", "model"))
    launch = ["launch", service, "--site", site, "--cluster", "local", "--dry-run"]
    return {
        "directory": [
            ["config", "check", "--service", service, "--site", site],
            ["script", service, "--site", site],
        ],
        "config": [["plan", "--model", model, "--site", site, "--pool", "card:2"]],
        "files": [["model", "check", model], [*launch, "--service-dir", str(place / "dir")]],
    }


def test_all_take_what_is_whole(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    codes = [run(command) for some in commands(place).values() for command in some]
    assert codes == [0] * 5, capsys.readouterr().err


@pytest.mark.parametrize("damage", [*DIRECTORY, *CONFIG, *FILES])
def test_a_wrong_model_has_the_models_code(
    damage: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (DIRECTORY | CONFIG | FILES)[damage](place / "model")
    known = commands(place)
    chosen = known["files"]
    if damage not in FILES:
        chosen = chosen + known["config"]
    if damage in DIRECTORY:
        chosen = chosen + known["directory"]
    for command in chosen:
        assert run(command) == 4, command
        told = capsys.readouterr().err
        assert told.startswith("flexslurm: error: ") and str(place / "model") in told
    assert not (place / "dir").exists()
