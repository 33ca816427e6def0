"""How threads of the data plane stand back for the serving one; knows nothing of what they do."""

from __future__ import annotations

import contextlib
import os
import threading

NICENESS = 15
"""A thirtieth of what a serving thread gets where both want the same processor: never nothing."""


def be_nice() -> None:
    """Let others go first: on Linux a priority may be one thread's."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
