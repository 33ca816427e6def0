"""Keeps steps and the moving of memory apart; holds no memory itself.

A step passes the gate while it computes; any number may be inside. Whoever moves pages or weights
closes the gate, which waits for the steps inside to end. A step at the gate waits only while it is
really closed, or when nobody is inside and a closer waits, who then has it at once. So a closer is
not starved by one serving thread, and no step ever waits for another step: steps wait for other
workers' steps inside (collectives), and a circle over two workers would never end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from flexslurm.errors import DeadlineExceeded


class StepGate:
    """Many steps, or one closer."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._inside = 0
        self._waiting = 0
        self._closed = False

    def __enter__(self) -> None:
        with self._changed:
            while self._closed or (self._waiting and not self._inside):
                self._changed.wait()
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._inside -= 1
            if not self._inside and self._waiting:
                self._changed.notify_all()

    @contextmanager
    def closed(self, timeout_s: float) -> Iterator[None]:
        """Hold all steps off; never from inside a step, and only for what ends soon.

        Raises DeadlineExceeded when a step inside does not end in time.
        """
        self._close(time.monotonic() + timeout_s, timeout_s)
        try:
            yield
        finally:
            with self._changed:
                self._closed = False
                self._changed.notify_all()

    def _close(self, deadline: float, timeout_s: float) -> None:
        with self._changed:
            self._waiting += 1
            try:
                while self._inside or self._closed:
                    left = deadline - time.monotonic()
                    if left <= 0.0:
                        raise DeadlineExceeded(f"a step did not end within {timeout_s:g} s")
                    self._changed.wait(left)
                self._closed = True
            finally:
                self._waiting -= 1
                if not self._closed:
                    self._changed.notify_all()
