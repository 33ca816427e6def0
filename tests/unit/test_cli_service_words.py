"""Which word names the service and which the pilot, where one of them may be left out."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexslurm.cli.main import run


@pytest.fixture
def service_dir(tmp_path: Path) -> Path:
    (tmp_path / "logs/head").mkdir(parents=True)
    (tmp_path / "logs/a100-1").mkdir()
    (tmp_path / "service.yaml").write_text("name: chat\n")
    (tmp_path / "logs/head/head.log").write_text("the head's line\n")
    (tmp_path / "logs/a100-1/pilot.log").write_text("the pilot's line\n")
    return tmp_path


def test_a_directory_names_the_service_so_a_word_is_the_part(
    service_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["logs", "--service-dir", str(service_dir), "a100-1"]) == 0
    assert capsys.readouterr().out == "the pilot's line\n"
    assert run(["logs", "--service-dir", str(service_dir)]) == 0
    listed = capsys.readouterr().out
    assert "head/head.log" in listed and "a100-1/pilot.log" in listed


@pytest.mark.parametrize("command", ["cordon", "drain", "release"])
def test_the_only_word_is_the_pilot_or_the_node(
    command: str, service_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It gets as far as asking the head, of which there is none."""
    assert run([command, "--service-dir", str(service_dir), "a100-1"]) == 7
    assert "no head has published its address" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "what"), [("cordon", "pilot"), ("drain", "pilot"), ("release", "node")]
)
def test_without_a_word_they_ask_which(
    command: str, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([command]) == 2
    assert f"which {what}?" in capsys.readouterr().err
