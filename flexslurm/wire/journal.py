"""A record of what the head decided, read back after a crash; never interprets a record.

One record a line: the CRC-32 of the rest in hexadecimal, a blank, JSON. A crash may tear the last
record; reading drops a torn tail, and opening for append cuts it off. Damage before the tail is an
error, because what followed it was acted on. So that it does not grow for ever, a journal is
replaced, at once, by the few records that its `Keep` says still matter: when it is opened, and
whenever it has grown large.
"""

from __future__ import annotations

import errno
import logging
import os
import zlib
from collections.abc import Callable, Iterable
from io import FileIO
from pathlib import Path
from typing import Any, Protocol

import msgspec

from flexslurm.errors import EnvironmentFault, ServiceError
from flexslurm.wire.files import sync_directory, write_atomically

log = logging.getLogger(__name__)

MOST_BYTES = 64 * 2**20
"""A journal that has grown by this much is replaced by what is kept of it."""

Record = dict[str, Any]


class Keep(Protocol):
    """What is to be remembered of the records."""

    def take(self, record: Record) -> None:
        """Every record of the journal, in order: read at the start, or appended."""
        ...

    def records(self) -> Iterable[Record]:
        """Records that give the same memory when they are taken in order."""
        ...


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

    A missing file has none. Raises ServiceError when damage stands before a whole record, OSError.
    """
    records: list[Record] = []
    return records, scan(path, records.append)


def scan(path: Path, take: Callable[[Record], None]) -> int:
    """As `read_journal`, record by record; returns the bytes that are whole."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return 0
    whole = at = 0
    damaged_line: int | None = None
    with file:
        for number, raw in enumerate(file, start=1):
            at += len(raw)
            record = _parse(raw[:-1]) if raw.endswith(b"\n") else None
            if record is not None and damaged_line is not None:
                raise ServiceError(
                    f"{path}:{damaged_line}: the journal is damaged before its end",
                    hint="move it aside to start the service afresh",
                )
            if record is not None:
                take(record)
                whole = at
            elif raw != b"\n":
                damaged_line = damaged_line or number
    return whole


class Journal:
    """The journal, open for appending; one writer at a time."""

    def __init__(
        self, path: Path, keep: Keep | None = None, *, most_bytes: int = MOST_BYTES
    ) -> None:
        """Without `keep`, every record is kept."""
        self.path = path
        self._keep, self._most_bytes = keep, most_bytes
        self._file: FileIO | None = None
        self._limit = most_bytes

    def open(self) -> None:
        """Read what is there into `keep`, leave in the file what is kept, and be ready to append.

        Raises ServiceError where the file is damaged, OSError.
        """
        count = 0

        def take(record: Record) -> None:
            nonlocal count
            count += 1
            if self._keep is not None:
                self._keep.take(record)

        whole = scan(self.path, take)
        fresh = not self.path.exists()
        self._file = _for_appending(self.path)
        if _size(self._file) != whole:
            self._file.truncate(whole)
        if fresh:
            sync_directory(self.path.parent)
        if self._keep is not None and count > len(list(self._keep.records())):
            self._compact()
        self._set_limit()

    def append(self, record: Record, *, sync: bool = True) -> None:
        """Add a record; with `sync`, return only when it is on disk. Raises OSError."""
        file = self._opened()
        at, line = _size(file), _line(record)
        try:
            if file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if sync:
                os.fsync(file.fileno())
        except OSError:
            self._forget_from(at)
            raise
        if self._keep is not None:
            self._keep.take(record)
            if at > self._limit:
                self._shrink()

    def _opened(self) -> FileIO:
        assert self._file is not None, f"{self.path} is not open"
        return self._file

    def _shrink(self) -> None:
        """Records are safe where they are: that they cannot be fewer is no failure."""
        try:
            self._compact()
        except OSError as error:
            log.warning("cannot shorten the journal %s: %s", self.path, error.strerror)
        self._set_limit()

    def _compact(self) -> None:
        assert self._keep is not None
        write_atomically(self.path, b"".join(map(_line, self._keep.records())))
        before, self._file = self._opened(), _for_appending(self.path)
        before.close()

    def _set_limit(self) -> None:
        self._limit = _size(self._opened()) + self._most_bytes

    def _forget_from(self, at: int) -> None:
        """Cut a half-written record off, so that the next one does not follow damage."""
        self._opened().truncate(at)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _for_appending(path: Path) -> FileIO:
    """Without a buffer: what could not be written must not be when the file is closed."""
    return FileIO(path, "ab")


def _size(file: FileIO) -> int:
    return os.fstat(file.fileno()).st_size


def unwritable(path: Path, error: OSError) -> EnvironmentFault:
    """What cannot be recorded must not be done: the head has to end."""
    return EnvironmentFault(
        f"cannot write the journal {path}: {error.strerror}",
        hint="free space on the shared file system and launch again; nothing recorded is lost",
    )
