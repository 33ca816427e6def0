"""A few threads that do jobs as they come; never holds up whoever has one to be done."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)

_IDLE_S = 5.0


class Crew:
    """At most `most` threads; jobs beyond wait, at most `waiting` of them."""

    def __init__(self, name: str, most: int, waiting: int = 1024) -> None:
        self._name, self._most = name, most
        self._jobs: queue.Queue[Callable[[], None]] = queue.Queue(waiting)
        self._lock = threading.Lock()
        self._threads = 0
        self._idle = 0

    def do(self, job: Callable[[], None]) -> bool:
        """Have a job done; False when too many wait. A job handles its own failures."""
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            return False
        with self._lock:
            if self._idle < self._jobs.qsize() and self._threads < self._most:
                self._threads += 1
                threading.Thread(target=self._work, name=self._name, daemon=True).start()
        return True

    def _work(self) -> None:
        while True:
            with self._lock:
                self._idle += 1
            try:
                job = self._jobs.get(timeout=_IDLE_S)
            except queue.Empty:
                job = None
            with self._lock:
                self._idle -= 1
                if job is None and self._jobs.empty():
                    self._threads -= 1
                    return
            if job is not None:
                try:
                    job()
                except Exception:  # a process's loop: the next job is not at fault
                    log.exception("%s: a job failed", self._name)
