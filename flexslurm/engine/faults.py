"""Faults on purpose, by name: what tests break, and where; off unless FLEXSLURM_FAULTS is set.

`FLEXSLURM_FAULTS="transfer.chunk:3:raise, install.weights:1:exit"`: at the third chunk raise, at
the first install's weights end the process. `3+`: from the third on. `step@1234:1:hang`: only in
the process 1234. `shift.cutover:1:kill=1234`: when the head begins a cut-over, end process 1234.

`FLEXSLURM_FAULTS=@/a/file`: the faults are in that file, which may change while the service runs;
each process counts anew after a change, and writes a line to `/a/file.done` for what it did.
Nothing else reads any of this.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import threading
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from flexslurm.errors import EnvironmentFault

VARIABLE = "FLEXSLURM_FAULTS"
EXIT_CODE = 66
_HANG_S = 3600.0
_SLOW_S = 0.2


class Point(StrEnum):
    """Where something can be made to go wrong. Those of a shift are reached by the head."""

    LISTEN = "transfer.listen"
    """A worker starts its data server; without one nothing is moved from it."""
    CONNECT = "transfer.connect"
    """A receiver connects to a source."""
    CHUNK = "transfer.chunk"
    """A source is about to send a chunk."""
    CORRUPT = "transfer.corrupt"
    """As CHUNK; with `spoil` its checksum is wrong."""
    PARK = "transfer.park"
    """A block is about to be parked."""
    WEIGHTS = "install.weights"
    GROUPS = "install.groups"
    PULL = "cutover.pull"
    """A pull of KV begins."""
    STEP = "step"
    RETIRE = "retire"
    """A worker was told to close an epoch."""
    PREPARE = "shift.prepare"
    """Workers are up, and the moves are about to be planned."""
    PARKING = "shift.park"
    INSTALL = "shift.install"
    TRANSFER = "shift.transfer"
    CUTOVER = "shift.cutover"
    """The old drivers are about to be paused: the last blocks are not moved yet."""
    COMMIT = "shift.commit"
    """The last blocks are there, and the new drivers are about to be opened."""
    CLOSE = "shift.close"
    """The new drivers serve, and the old epoch is about to be closed."""
    CHECKPOINT = "checkpoint.write"
    """The head is about to write what lives where after a shift."""


class Deed(StrEnum):
    """What is done where a fault is reached."""

    RAISE = "raise"
    EXIT = "exit"
    HANG = "hang"
    """Sleep for an hour."""
    SLOW = "slow"
    """Sleep for a fifth of a second."""
    FULL = "full"
    """Raise OSError: no space left on device."""
    SPOIL = "spoil"
    """What it means is up to the point."""
    KILL = "kill"
    """End the process whose number follows: `kill=1234`."""
    STOP = "stop"
    """Stop that process: it hangs with all its threads, and its connections stay open."""


_OF_ANOTHER = {Deed.KILL: signal.SIGKILL, Deed.STOP: signal.SIGSTOP}


class InjectedFault(RuntimeError):
    """Raised at a point by name."""


@dataclass(slots=True)
class _Fault:
    text: str
    point: Point
    only: int
    """The process it is for; 0: any."""
    first: int
    lasting: bool
    deed: Deed
    target: int
    """The process that KILL and STOP are done to."""
    seen: int = 0


_lock = threading.Lock()
_faults: list[_Fault] | None = None
_file: Path | None = None
_version: tuple[int, int] | None = None
"""Of the file that was read last."""


def arm(text: str) -> None:
    """Set the faults of this process, counting from now; "" for none, "@FILE" for a file's.

    Raises EnvironmentFault for what cannot be read.
    """
    global _faults, _file, _version  # noqa: PLW0603 - of a process, as its environment
    found = [] if text.startswith("@") else _parse_all(text)
    with _lock:
        _faults, _version = found, None
        _file = Path(text[1:]) if text.startswith("@") else None


def _parse_all(text: str) -> list[_Fault]:
    return [_parse(item.strip()) for item in text.replace("\n", ",").split(",") if item.strip()]


def _parse(item: str) -> _Fault:
    try:
        where, number, what = item.split(":")
        point, _, only = where.partition("@")
        name, _, target = what.partition("=")
        deed = Deed(name)
        if (deed in _OF_ANOTHER) != bool(target) or (target and int(target) <= 1):
            raise ValueError
        return _Fault(
            text=item,
            point=Point(point),
            only=int(only or 0),
            first=int(number.removesuffix("+")),
            lasting=number.endswith("+"),
            deed=deed,
            target=int(target or 0),
        )
    except ValueError:
        raise EnvironmentFault(
            f"{VARIABLE}: cannot read '{item}'",
            hint=f"write POINT:NUMBER:DEED; points: {', '.join(Point)}; deeds: {', '.join(Deed)}",
        ) from None


def reach(point: Point) -> bool:
    """Say that the point is reached; whether what is done here is to be spoilt.

    Raises InjectedFault or OSError, ends a process or hangs where a fault says so.
    """
    if _faults is None:
        arm(os.environ.get(VARIABLE, ""))
    if _file is not None:
        _read_again(_file)
    fault = _due(point) if _faults else None
    return fault is not None and _do(fault)


def _read_again(file: Path) -> None:
    """Take the file's faults if it has changed."""
    global _faults, _version
    try:
        state = file.stat()
        version = state.st_mtime_ns, state.st_size
        if version == _version:
            return
        found = _parse_all(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        version, found = (0, 0), []
    with _lock:
        _faults, _version = found, version


def _due(point: Point) -> _Fault | None:
    with _lock:
        for fault in _faults or ():
            if fault.point is point and fault.only in (0, os.getpid()):
                fault.seen += 1
                if fault.seen == fault.first or (fault.lasting and fault.seen > fault.first):
                    return fault
    return None


def _do(fault: _Fault) -> bool:
    if _file is not None:
        with _file.with_name(f"{_file.name}.done").open("a", encoding="utf-8") as done:
            done.write(f"{os.getpid()} {fault.text}\n")
    match fault.deed:
        case Deed.RAISE:
            raise InjectedFault(f"injected at {fault.point}")
        case Deed.FULL:
            raise OSError(errno.ENOSPC, f"injected at {fault.point}")
        case Deed.EXIT:
            os._exit(EXIT_CODE)
        case Deed.HANG:
            time.sleep(_HANG_S)
        case Deed.SLOW:
            time.sleep(_SLOW_S)
        case Deed.KILL | Deed.STOP:
            with contextlib.suppress(ProcessLookupError):
                os.kill(fault.target, _OF_ANOTHER[fault.deed])
    return fault.deed is Deed.SPOIL
