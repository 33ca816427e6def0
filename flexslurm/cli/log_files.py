"""The log files of a service: which there are, their ends, and following them."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from flexslurm.cli.log_choice import LogFile

_CHUNK_BYTES = 64 * 2**10
_MOST_BYTES = 16 * 2**20


def log_files(folder: Path) -> list[LogFile]:
    """All files below `folder`."""
    found = []
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # removed since
            if path.is_file():
                facts = path.stat()
                name = str(path.relative_to(folder))
                found.append(LogFile(name, facts.st_size, facts.st_mtime))
    return sorted(found, key=lambda file: file.name)


def tail_files(paths: Sequence[Path], lines: int, headings: Sequence[str] = ()) -> Iterator[str]:
    """The last lines of each file, each under its heading (its name) where there are several."""
    for number, path in enumerate(paths):
        if len(paths) > 1:
            yield f"==> {headings[number] if headings else path.name} <=="
        yield from _last_lines(path, lines)


def _last_lines(path: Path, lines: int) -> list[str]:
    """Read from the end, so that a log of gigabytes costs no more than a short one."""
    data = b""
    with path.open("rb") as file:
        start = file.seek(0, os.SEEK_END)
        while start > 0 and data.count(b"\n") <= lines and len(data) < _MOST_BYTES:
            size = min(start, _CHUNK_BYTES)
            start = file.seek(start - size)
            data = file.read(size) + data
    found = data.decode("utf-8", "replace").splitlines()
    return found[max(len(found) - lines, 0) :]


def follow_files(
    paths: Sequence[Path], say: Callable[[str], object], poll_s: float = 0.3
) -> None:  # fmt: skip
    """Say what is appended, whole lines only, until interrupted; a file cut short starts anew."""
    ends = {path: _size(path) for path in paths}
    while True:
        for path, end in ends.items():
            size = _size(path)
            lines, ends[path] = _whole_lines(path, end if size >= end else 0)
            for line in lines:
                say(line)
        time.sleep(poll_s)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _whole_lines(path: Path, start: int) -> tuple[list[str], int]:
    """The lines that end after `start`, and where the last of them does."""
    try:
        with path.open("rb") as file:
            file.seek(start)
            data = file.read(_MOST_BYTES)
    except FileNotFoundError:
        return [], 0
    cut = data.rfind(b"\n") + 1
    if cut == 0 and len(data) == _MOST_BYTES:
        cut = len(data)  # one endless line
    return data[:cut].decode("utf-8", "replace").splitlines(), start + cut
