"""What runs on this machine, by its command lines; ends nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def command_lines() -> Iterator[tuple[int, str]]:
    """Each process's id and its words, separated by spaces; not of those that have just ended."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                words = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            yield int(entry.name), words.replace(b"\0", b" ").decode()
