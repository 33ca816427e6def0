"""The ends of logs, however large, and what is appended to them, each line once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from flexslurm.cli import log_files
from flexslurm.cli.log_files import follow_files, tail_files


class Enough(Exception):
    """Ends the following."""


@pytest.mark.parametrize("lines", [0, 1, 2, 3, 50])
@pytest.mark.parametrize("text", ["", "a", "a\n", "a\nb\nc\n", "a\n\nlong line é\nb"])
def test_the_last_lines_are_those_of_the_whole_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, lines: int
) -> None:
    monkeypatch.setattr(log_files, "_CHUNK_BYTES", 3)
    log = tmp_path / "x.log"
    log.write_text(text)
    whole = text.splitlines()
    assert list(tail_files([log], lines)) == whole[len(whole) - min(lines, len(whole)) :]


def test_a_huge_log_is_not_read_whole(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    with log.open("wb") as file:
        file.truncate(2**40)  # sparse: it takes no space, and reading it would take hours
        file.seek(0, 2)
        file.write(b"\nlast\n")
    assert list(tail_files([log], 1)) == ["last"]


def test_every_line_is_said_once_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, gone = tmp_path / "x.log", tmp_path / "gone.log"
    log.write_text("before\n")
    gone.write_text("")

    def append(text: str) -> None:
        with log.open("a") as file:
            file.write(text)

    steps: list[Callable[[], object]] = [
        lambda: append("one\ntw"),
        lambda: append("o\n"),
        gone.unlink,
        lambda: log.write_text("new\n"),  # cut short, as by a rotation
    ]

    def sleep(_: float) -> None:
        if not steps:
            raise Enough
        steps.pop(0)()

    monkeypatch.setattr(log_files.time, "sleep", sleep)
    said: list[str] = []
    with pytest.raises(Enough):
        follow_files([log, gone], said.append)
    assert said == ["one", "two", "new"]
