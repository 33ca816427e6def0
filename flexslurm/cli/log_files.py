"""The log files of a service: which there are, their ends, and following them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from flexslurm.config.schema import nearest_hint
from flexslurm.errors import ServiceError


def log_files(folder: Path, part: str | None) -> list[tuple[str, int]]:
    """Names below `folder` and sizes in bytes; with `part`, those that start with it.

    Raises ServiceError when no log is of that part.
    """
    found = sorted(
        (str(path.relative_to(folder)), path.stat().st_size)
        for path in folder.rglob("*")
        if path.is_file()
    )
    if part is None:
        return found
    chosen = [(name, size) for name, size in found if name == part or name.split("/")[0] == part]
    if not chosen:
        parts = sorted({name.split("/")[0] for name, _ in found})
        raise ServiceError(f"there is no log of '{part}'", hint=nearest_hint(part, parts))
    return chosen


def tail_files(paths: Sequence[Path], lines: int) -> Iterator[str]:
    """The last lines of each file, each under its name where there are several."""
    for path in paths:
        if len(paths) > 1:
            yield f"==> {path.name} <=="
        yield from path.read_text(errors="replace").splitlines()[-lines:]


def follow_files(
    paths: Sequence[Path], say: Callable[[str], object], poll_s: float = 0.3
) -> None:  # fmt: skip
    """Say what is appended, until interrupted."""
    ends = {path: path.stat().st_size for path in paths}
    while True:
        for path, end in ends.items():
            size = path.stat().st_size
            if size > end:
                with path.open(errors="replace") as file:
                    file.seek(end)
                    for line in file.read().splitlines():
                        say(line)
                ends[path] = size
        time.sleep(poll_s)
