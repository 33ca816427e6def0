"""What a demo needs is looked at before it begins, and it leaves nothing where that is missing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from flexslurm.cli.main import run


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where its directories would be."""
    place = tmp_path / "tmp"
    place.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(place))
    return place


@pytest.mark.parametrize("name", ["missing", "empty", "weightless"])
def test_a_wrong_model_ends_it_at_once(
    name: str, tmp_path: Path, temporary: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "weightless").mkdir()
    shutil.copy(tiny_model / "config.json", tmp_path / "weightless")
    assert run(["demo", "--local", "--model", str(tmp_path / name)]) == 4
    told = capsys.readouterr()
    assert told.out == "" and told.err.count("flexslurm: error: ") == 1
    assert str(tmp_path / name) in told.err
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("name", ["no/such/directory.json", "directory", "file/in.json"])
def test_figures_that_cannot_be_written_end_it_at_once(
    name: str, tmp_path: Path, temporary: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "directory").mkdir()
    (tmp_path / "file").write_text("")
    demo = ["demo", "--local", "--model", str(tiny_model)]
    for words in (demo, ["bench", "shift", "--quick"]):
        assert run([*words, "--json", str(tmp_path / name)]) == 8
        assert f"cannot write the figures to {tmp_path / name}" in capsys.readouterr().err
        assert list(temporary.iterdir()) == []
