"""Reads files that people name, up to a size: a device or a pipe may never end; writes nothing."""

from __future__ import annotations

import errno
from pathlib import Path

MOST_BYTES = 64 * 2**20
"""Of a model's configuration or a file of measurements; they have kilobytes as a rule."""


def read_bytes(path: Path, most: int = MOST_BYTES) -> bytes:
    """All of it. Raises OSError, also where there is more than `most` bytes."""
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", str(path))
    return data


def read_text(path: Path, most: int = MOST_BYTES) -> str:
    """As UTF-8, with line ends as in text files, and without the mark that some editors put first.

    Raises OSError, UnicodeDecodeError.
    """
    text = read_bytes(path, most).decode("utf-8-sig")
    return text.replace("\r\n", "\n").replace("\r", "\n")
