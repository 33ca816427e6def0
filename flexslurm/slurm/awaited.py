"""Waits for signals that are blocked; never handles or blocks any.

`signal.sigtimedwait` will not do: where a process was stopped and continued (Slurm suspends jobs
so) and the time is up by then, it tells of a signal that lay in memory by chance.
"""

from __future__ import annotations

import ctypes
import errno
import signal
import time
from collections.abc import Collection

_libc = ctypes.CDLL(None, use_errno=True)
_SET_BYTES = 128
"""Of a `sigset_t`."""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def next_signal(numbers: Collection[signal.Signals], timeout_s: float) -> signal.Signals | None:
    """The next of these signals, which the caller has blocked; None once the time is up."""
    wanted = ctypes.create_string_buffer(_SET_BYTES)
    _libc.sigemptyset(wanted)
    for number in numbers:
        _libc.sigaddset(wanted, int(number))
    deadline = time.monotonic() + timeout_s
    while True:
        left_s = max(0.0, deadline - time.monotonic())
        span = _Timespec(int(left_s), int(left_s % 1.0 * 1e9))
        told = _libc.sigtimedwait(wanted, None, ctypes.byref(span))
        if told > 0:
            return signal.Signals(told)
        if ctypes.get_errno() != errno.EINTR:
            return None
