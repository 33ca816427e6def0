"""The bandwidth of the workers' data plane on this machine: one connection of two processes."""

from __future__ import annotations

import mmap
import multiprocessing
import secrets
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from flexslurm.errors import DeadlineExceeded, ServiceError

if TYPE_CHECKING:
    from flexslurm.engine.byte_runs import Landing, Source
    from flexslurm.engine.transfer_wire import AskPages, AskWeights, Views

_BYTES = 32 << 20
_TRIES = 5
_PACED_TRIES = 3
_NO_BOUND = 1e12
_START_S = 60.0
_FETCH_S = 60.0


class _Memory:
    """A run of bytes that is sent or filled."""

    total = _BYTES
    items = 1

    def __init__(self) -> None:
        self._memory = memoryview(mmap.mmap(-1, _BYTES))
        self._memory[:] = bytes(_BYTES)  # the system's pages are there

    def missing(self) -> tuple[int, ...]:
        return ()

    def item(self, number: int) -> tuple[int, int]:
        return 0, _BYTES

    def upto(self, lo: int, hi: int) -> int:
        return hi

    @contextmanager
    def lend(self, lo: int, hi: int) -> Iterator[Views | None]:
        yield [self._memory[lo:hi]]

    @contextmanager
    def into(self, lo: int, hi: int) -> Iterator[Landing]:
        from flexslurm.engine.byte_runs import Landing

        yield Landing([self._memory[lo:hi]])

    def pages(self, ask: AskPages) -> Source:
        return self

    def weights(self, ask: AskWeights) -> Source:
        return self


class LinkProbe:
    """A data server in a process of its own, which is fetched from; from its making to `close`."""

    def __init__(self) -> None:
        """Raises DeadlineExceeded or ServiceError where the server does not come up."""
        self._key = secrets.token_bytes(32)
        self._here, there = multiprocessing.Pipe()
        self._server = multiprocessing.get_context("spawn").Process(
            target=_serve, args=(self._key, there), daemon=True
        )
        self._server.start()
        there.close()
        if not self._here.poll(_START_S):
            self.close()
            raise DeadlineExceeded(f"no data server within {_START_S:g} s")
        try:
            self._port = int(self._here.recv())
        except EOFError:
            self.close()
            raise ServiceError("the data server that is measured ended at its start") from None

    def measure(self, *, paced: bool = False) -> float:
        """Bytes per second from one process to another: the median of a few fetches.

        `paced`: as beside a gear that serves, which both ends stand back for. No rate bounds it.
        Raises ServiceError where nothing comes.
        """
        rates: list[float] = []

        def work() -> None:
            rates.extend(_fetched(self._key, self._port, paced=paced))

        # In a thread of its own, since a priority that was lowered cannot be raised again.
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        if not rates:
            raise ServiceError("the data plane could not be measured")
        return statistics.median(rates)

    def close(self) -> None:
        """End the server; idempotent."""
        self._here.close()
        self._server.join(5.0)
        if self._server.is_alive():
            self._server.kill()

    def __enter__(self) -> LinkProbe:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _fetched(key: bytes, port: int, *, paced: bool) -> Iterator[float]:
    from flexslurm.engine.niceness import be_nice
    from flexslurm.engine.transfer_client import Cancel, Fetcher, Job
    from flexslurm.engine.transfer_wire import AskPages, Ranges

    def ask(spans: Ranges) -> AskPages:
        return AskPages(
            epoch=1, layers=(0, 1), heads=(0, 1), blocks=(0,), page_bytes=_BYTES, spans=spans,
            rate_bytes_per_s=_NO_BOUND if paced else 0.0,
        )  # fmt: skip

    if paced:
        be_nice()
    fetcher, sink, cancel = Fetcher(key), _Memory(), Cancel()
    for _ in range(_PACED_TRIES if paced else _TRIES):
        began = time.monotonic()
        job = Job(("127.0.0.1", port), ask, sink, began + _FETCH_S, cancel, paced=paced)
        if fetcher.fetch(job).left:
            break
        yield _BYTES / (time.monotonic() - began)
    fetcher.close()


def _serve(key: bytes, pipe: Connection) -> None:
    """A data server, in a process of its own, until the other end of the pipe is closed."""
    from flexslurm.engine.transfer_server import TransferServer

    server = TransferServer("127.0.0.1", key, _Memory())
    pipe.send(server.port)
    with suppress(EOFError):
        pipe.recv()
    server.close()
