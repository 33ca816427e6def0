"""An append-only record of what the head decided, read back after a crash; never rewritten.

One record a line: the CRC-32 of the rest in hexadecimal, a blank, JSON. A crash may tear the last
record; reading drops a torn tail, and opening for append cuts it off. Damage before the tail is an
error, because what followed it was acted on.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any

import msgspec

from flexslurm.errors import ServiceError
from flexslurm.wire.files import sync_directory

Record = dict[str, Any]


def _line(record: Record) -> bytes:
    body = msgspec.json.encode(record)
    return b"%08x %s\n" % (zlib.crc32(body), body)


def _parse(line: bytes) -> Record | None:
    """The record of one line without its newline, or None when it is damaged."""
    if len(line) < 10 or line[8:9] != b" ":
        return None
    body = line[9:]
    try:
        if int(line[:8], 16) != zlib.crc32(body):
            return None
        record = msgspec.json.decode(body)
    except (ValueError, msgspec.MsgspecError):
        return None
    return record if isinstance(record, dict) else None


def read_journal(path: Path) -> tuple[list[Record], int]:
    """All whole records, and the length in bytes of what is whole.

    A missing file has none. Raises ServiceError when damage stands before a whole record.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return [], 0
    records: list[Record] = []
    whole = at = 0
    damaged_line: int | None = None
    for number, raw in enumerate(data.split(b"\n"), start=1):
        end = at + len(raw) + 1
        record = _parse(raw) if end <= len(data) else None  # the last line needs its newline
        if record is not None and damaged_line is not None:
            raise ServiceError(
                f"{path}:{damaged_line}: the journal is damaged before its end",
                hint="move it aside to start the service afresh",
            )
        if record is not None:
            records.append(record)
            whole = end
        elif raw:
            damaged_line = damaged_line or number
        at = end
    return records, whole


class Journal:
    """The journal, open for appending; one writer at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records, whole = read_journal(path)
        """What was there when it was opened."""
        fresh = not path.exists()
        self._file = path.open("ab")
        if self._file.tell() != whole:
            self._file.truncate(whole)
        if fresh:
            sync_directory(path.parent)

    def append(self, record: Record, *, sync: bool = True) -> None:
        """Add a record; with `sync`, return only when it is on disk. Raises OSError."""
        at = self._file.tell()
        try:
            self._file.write(_line(record))
            self._file.flush()
            if sync:
                os.fsync(self._file.fileno())
        except OSError:
            self._forget_from(at)
            raise

    def _forget_from(self, at: int) -> None:
        """Cut a half-written record off, so that the next one does not follow damage."""
        raw = self._file
        self._file = self.path.open("ab")
        self._file.truncate(at)
        try:
            raw.close()
        except OSError:
            self._file.truncate(at)

    def close(self) -> None:
        self._file.close()
