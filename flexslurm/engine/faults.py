"""Faults on purpose, by name: what tests break, and where; off unless FLEXSLURM_FAULTS is set.

`FLEXSLURM_FAULTS="transfer.chunk:3:raise, install.weights:1:exit"`: at the third chunk raise, at
the first install's weights end the process. `3+`: from the third on. Nothing else reads this.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from enum import StrEnum

from flexslurm.errors import EnvironmentFault

VARIABLE = "FLEXSLURM_FAULTS"
EXIT_CODE = 66


class Point(StrEnum):
    """Where something can be made to go wrong."""

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


class Deed(StrEnum):
    RAISE = "raise"
    EXIT = "exit"
    HANG = "hang"
    """Sleep for an hour."""
    SPOIL = "spoil"
    """What it means is up to the point."""


class InjectedFault(RuntimeError):
    """Raised at a point by name."""


@dataclass(slots=True)
class _Fault:
    point: Point
    first: int
    lasting: bool
    deed: Deed
    seen: int = 0


_lock = threading.Lock()
_faults: list[_Fault] | None = None


def arm(text: str) -> None:
    """Set the faults of this process, counting from now; "" for none.

    Raises EnvironmentFault for what cannot be read.
    """
    global _faults  # noqa: PLW0603 - of a process, as its environment
    found = [_parse(item.strip()) for item in text.split(",") if item.strip()]
    with _lock:
        _faults = found


def _parse(item: str) -> _Fault:
    try:
        point, number, deed = item.split(":")
        first = int(number.removesuffix("+"))
        return _Fault(Point(point), first, number.endswith("+"), Deed(deed))
    except ValueError:
        raise EnvironmentFault(
            f"{VARIABLE}: cannot read '{item}'",
            hint=f"write POINT:NUMBER:DEED; points: {', '.join(Point)}; deeds: {', '.join(Deed)}",
        ) from None


def reach(point: Point) -> bool:
    """Say that the point is reached; whether what is done here is to be spoilt.

    Raises InjectedFault, ends the process or hangs where a fault says so.
    """
    if _faults is None:
        arm(os.environ.get(VARIABLE, ""))
    deed = _due(point) if _faults else None
    if deed is Deed.RAISE:
        raise InjectedFault(f"injected at {point}")
    if deed is Deed.EXIT:
        os._exit(EXIT_CODE)
    if deed is Deed.HANG:
        time.sleep(3600.0)
    return deed is Deed.SPOIL


def _due(point: Point) -> Deed | None:
    with _lock:
        for fault in _faults or ():
            if fault.point is point:
                fault.seen += 1
                if fault.seen == fault.first or (fault.lasting and fault.seen > fault.first):
                    return fault.deed
    return None
