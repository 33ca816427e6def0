"""Fetches runs of bytes from other workers' data servers; never decides what or from whom.

What has come and is right stays: when a connection breaks, or a chunk's checksum is wrong, only
what is missing is asked for again, a bounded number of times and until a deadline. Connections that
are in order are kept for a while, since a shift comes back to its sources in rounds.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from flexslurm.engine import faults
from flexslurm.engine.byte_runs import Sink
from flexslurm.engine.faults import InjectedFault, Point
from flexslurm.engine.niceness import be_nice
from flexslurm.engine.spans import Spans
from flexslurm.engine.transfer_wire import (
    AskPages,
    AskWeights,
    Channel,
    Ranges,
    Refusal,
    crc_of,
)
from flexslurm.errors import DeadlineExceeded, ProtocolError

log = logging.getLogger(__name__)

_TRIES = 5
"""In a row without a byte that could be used."""
_BACK_OFF_S = 0.02
_CONNECT_S = 5.0
_MOST_CORRUPT = 16
_KEPT = 16
_KEPT_S = 20.0

Address = tuple[str, int]


class Cancel:
    """Calls transfers back; `cut` may come at any time from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._channels: set[Channel] = set()
        self._event = threading.Event()

    @property
    def is_set(self) -> bool:
        return self._event.is_set()

    def wait(self, seconds: float) -> bool:
        return self._event.wait(seconds)

    def cut(self) -> None:
        with self._lock:
            self._event.set()
            for channel in self._channels:
                channel.cut()

    def add(self, channel: Channel) -> None:
        """Raises ConnectionAbortedError when it was cut."""
        with self._lock:
            if self._event.is_set():
                raise ConnectionAbortedError("the transfer was called off")
            self._channels.add(channel)

    def remove(self, channel: Channel) -> None:
        with self._lock:
            self._channels.discard(channel)


@dataclass(slots=True)
class Fetched:
    """What a fetch has come to; `left` is empty when everything is there."""

    left: Spans
    missing: set[int] = field(default_factory=set)
    """Items that the source does not have; they are in `left` no more."""
    moved_bytes: int = 0
    reason: str = ""
    """Why something is left."""


@dataclass(frozen=True, slots=True)
class Job:
    """One fetch from one source."""

    address: Address
    ask: Callable[[Ranges], AskPages | AskWeights]
    """The ask for some spans of the run."""
    sink: Sink
    deadline: float
    """Of time.monotonic()."""
    cancel: Cancel
    progress: Callable[[int], None] = lambda _: None
    """Told bytes that are right."""
    paced: bool = False
    """It is in no hurry: at both ends the threads that move it stand back for whoever serves.

    For good: what is in haste is fetched on other threads.
    """


class _Refused(Exception):
    """The source says no: asking again would not help. Never leaves this module."""


class Fetcher:
    """Fetches for one worker; several threads at a time."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._lock = threading.Lock()
        self._kept: dict[tuple[Address, bool], list[tuple[float, Channel]]] = {}
        """By address, those that are paced apart from those that are not."""

    def fetch(self, job: Job) -> Fetched:
        """Fill the job's sink until nothing is left or nothing more can be done.

        What the job's `progress` raises ends the fetch and is passed on.
        """
        found = Fetched(Spans([(0, job.sink.total)]))
        tries = corrupt = 0
        while found.left and tries < _TRIES and corrupt < _MOST_CORRUPT:
            if job.cancel.is_set or time.monotonic() >= job.deadline:
                found.reason = "it was called off" if job.cancel.is_set else "the time was up"
                break
            before = found.left.total
            try:
                corrupt += self._round(job, found)
            except (_Refused, DeadlineExceeded) as error:
                found.reason = str(error)
                break
            except (OSError, ProtocolError, InjectedFault) as error:
                found.reason = str(error) or type(error).__name__
                log.info("data from %s:%d: %s", *job.address, found.reason)
                if isinstance(error, TimeoutError):
                    tries += _TRIES // 2  # one that is silent takes longest to be silent again
            tries = 0 if found.left.total < before else tries + 1
            if found.left and 0 < tries < _TRIES:
                pause_s = min(_BACK_OFF_S * 2**tries, job.deadline - time.monotonic())
                job.cancel.wait(max(pause_s, 0.0))
        if found.left and not found.reason:
            found.reason = f"{corrupt} chunks came with a wrong checksum"
        return found

    def _round(self, job: Job, found: Fetched) -> int:
        """Ask once for what is left and take what comes; how many chunks were wrong."""
        channel = self._channel(job)
        sound = False
        try:
            job.cancel.add(channel)
            channel.send(job.ask(tuple(found.left)))
            answer = channel.answer()
            if isinstance(answer, Refusal):
                sound = True
                raise _Refused(answer.reason)
            if answer.total != job.sink.total:
                raise ProtocolError(f"the source has {answer.total} bytes, not {job.sink.total}")
            if not all(0 <= number < job.sink.items for number in answer.missing):
                raise ProtocolError("the source lacks what was not asked for")
            for number in answer.missing:
                found.missing.add(number)
                found.left.remove(*job.sink.item(number))
            if job.paced:
                be_nice()  # not before: on busy processors, meeting would take longer than moving
            wrong = _take(channel, job, found)
            sound = True
            return wrong
        finally:
            job.cancel.remove(channel)
            if sound and not job.cancel.is_set:
                self._keep((job.address, job.paced), channel)
            else:
                channel.close()

    # ------------------------------------------------------------------------ connections

    def _channel(self, job: Job) -> Channel:
        faults.reach(Point.CONNECT)
        with self._lock:
            kept = self._kept.get((job.address, job.paced), [])
            while kept:
                since, channel = kept.pop()
                if time.monotonic() - since < _KEPT_S:
                    return channel
                channel.close()
        patience_s = max(min(_CONNECT_S, job.deadline - time.monotonic()), 0.01)
        sock = socket.create_connection(job.address, timeout=patience_s)
        try:
            return Channel.connect(sock, self._key)
        except BaseException:
            sock.close()
            raise

    def _keep(self, where: tuple[Address, bool], channel: Channel) -> None:
        with self._lock:
            if sum(map(len, self._kept.values())) < _KEPT:
                self._kept.setdefault(where, []).append((time.monotonic(), channel))
                return
        channel.close()

    def close(self) -> None:
        """Close the connections that are kept; idempotent."""
        with self._lock:
            for kept in self._kept.values():
                for _, channel in kept:
                    with contextlib.suppress(OSError):
                        channel.close()
            self._kept.clear()


def _take(channel: Channel, job: Job, found: Fetched) -> int:
    """Receive chunks to the end; how many of them were wrong."""
    wrong = 0
    while (chunk := channel.chunk()) is not None:
        lo, hi = chunk.offset, chunk.offset + chunk.nbytes
        if found.left.meet(lo, hi) != [(lo, hi)]:
            raise ProtocolError(f"a chunk [{lo},{hi}) that was not asked for")
        with job.sink.into(lo, hi) as landing:
            channel.take(landing.views)
            right = crc_of(landing.views) == chunk.crc
            if right:
                landing.keep()
        if right:
            found.left.remove(lo, hi)
            found.moved_bytes += hi - lo
            job.progress(hi - lo)
        else:
            wrong += 1
            log.warning("a chunk of %d bytes came with a wrong checksum", chunk.nbytes)
        if time.monotonic() >= job.deadline:
            raise DeadlineExceeded("the time was up")
    return wrong
