"""Whether a directory is the head's own as seen from here, and can be written to.

Blocks for as long as the file system does: call it from a thread.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

TOKEN_NAME = "head.token"  # noqa: S105 - a file's name
"""What the head wrote, so that another directory of the same name is told from it."""


def probe_directory(path: Path, token: str) -> str:
    """Read the head's token, then write, read back and delete a file; what is wrong, or ""."""
    try:
        found = (path / TOKEN_NAME).read_text()
        if found != token:
            return f"{path} holds another head's token: it is not the same directory on every node"
        return write_and_read_back(path)
    except OSError as error:
        return f"{path}: {error.strerror or error}"


def write_and_read_back(path: Path) -> str:
    """What is wrong, or ""; leaves nothing behind. Raises OSError."""
    name = path / f".probe-{os.uname().nodename}-{os.getpid()}-{secrets.token_hex(4)}"
    data = secrets.token_bytes(4096)
    try:
        with name.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        return "" if name.read_bytes() == data else f"{path}: what is written is not what is read"
    finally:
        with contextlib.suppress(OSError):
            name.unlink()
