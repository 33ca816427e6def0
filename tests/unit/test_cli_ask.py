"""Asking a head that is dead: for a moment only where that can be seen, and what is then said."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest

from flexslurm.cli import ask as asking
from flexslurm.cli.ask import ask_status
from flexslurm.errors import DeadlineExceeded, ServiceUnreachable
from flexslurm.wire.service_dir import HeadAddress, ServiceDir

HERE = os.uname().nodename


class Silent:
    """A link whose other end never answers; keeps the deadlines it was given."""

    deadlines: ClassVar[list[float]] = []

    def __init__(self, *_: Any) -> None:
        self.deadlines.clear()

    def ask(self, _: Any, timeout_s: float) -> None:
        self.deadlines.append(timeout_s)
        raise DeadlineExceeded("silence")

    def close(self) -> None: ...


def dead_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.mark.parametrize(
    ("node", "pid", "within_s", "words"),
    [
        (HERE, None, 1.0, f" on {HERE}) is gone"),
        (HERE, os.getpid(), 5.0, "does not answer"),
        (f"{HERE}x", None, 5.0, "does not answer"),  # its processes cannot be seen from here
        (HERE, 2**70, 5.0, "does not answer"),
    ],
    ids=["its process is gone", "its process is there", "elsewhere", "no process at all"],
)
def test_a_silent_head(
    node: str, pid: int | None, within_s: float, words: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(asking, "HeadLink", Silent)
    directory = ServiceDir(tmp_path)
    directory.create()
    number = dead_process() if pid is None else pid
    head = HeadAddress("h-1", "tcp://127.0.0.1:1", "http://127.0.0.1:2", node, number)
    monkeypatch.setattr(directory, "head", lambda: head)
    with pytest.raises(ServiceUnreachable) as caught:
        ask_status(directory)
    assert Silent.deadlines == [within_s]
    assert words in caught.value.message and "flexslurm logs" in (caught.value.hint or "")
