"""Ties a process's life to its parent's; Linux only, never imports anything heavy."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1

IGNORED_SIGNALS = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
"""Slurm may send these to every process of a step when the grace time begins, and a terminal to
all of its foreground. Only the agent decides what they mean; workers are the sources of a shift."""


def ignore_signals() -> None:
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def die_with_parent(parent: int) -> None:
    """Have the kernel SIGKILL this process when the thread that made it ends.

    `parent` is its expected parent: if that one is gone already, the process ends here.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    if os.getppid() != parent:
        os._exit(1)
