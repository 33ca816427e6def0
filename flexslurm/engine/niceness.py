"""How threads of the data plane stand back for the serving one; knows nothing of what they do."""

from __future__ import annotations

import contextlib
import os
import threading

NICENESS = 10
"""A tenth of what a serving thread gets where both want the same processor: never nothing."""


def be_nice() -> None:
    """Let others go first: on Linux a priority may be one thread's."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
