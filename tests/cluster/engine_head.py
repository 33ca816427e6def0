"""A head small enough to read, for tests of workers: a board, an answering machine, a record."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from flexslurm.errors import ProtocolError
from flexslurm.messages import (
    Message,
    RendezvousAdd,
    RendezvousGet,
    RendezvousSet,
    WorkerBeat,
    WorkerHello,
    WorkerWelcome,
)
from flexslurm.wire.keys import create_keys
from flexslurm.wire.rendezvous_board import RendezvousBoard
from flexslurm.wire.transport import HeadSocket

M = TypeVar("M", bound=Message)


class EngineHead:
    """Runs in a thread of its own; everything but rendezvous and beats is kept in `heard`."""

    def __init__(self, folder: Path, *, beat_s: float = 0.2, lost_s: float = 60.0) -> None:
        self.keys_path = folder / "keys.json"
        self._keys = create_keys(self.keys_path)
        self.welcome = WorkerWelcome(head="head-1", beat_s=beat_s, lost_s=lost_s)
        self.heard: list[tuple[float, str, Message]] = []
        self.beats: dict[str, float] = {}
        self.used: dict[str, int] = {}
        """The arena's figure by each worker's last beat."""
        self.stale = 0
        self.answering = True
        self._board = RendezvousBoard()
        self._news = threading.Condition()
        self._up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()))
        self._thread.start()
        assert self._up.wait(200)

    @property
    def endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self._socket.port}"

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._socket = HeadSocket(self._keys, self._receive, host="127.0.0.1")
        self._up.set()
        await self._stop.wait()
        self._socket.close()

    def _receive(self, sender: str, message: Message) -> None:
        if isinstance(message, RendezvousSet | RendezvousGet | RendezvousAdd):
            try:
                for member, value in self._board.handle(sender, message):
                    self._socket.send(member, value)
            except ProtocolError:
                self.stale += 1
            return
        if isinstance(message, WorkerHello | WorkerBeat) and self.answering:
            self._socket.send(sender, self.welcome)
        with self._news:
            if isinstance(message, WorkerBeat):
                self.beats[sender] = time.monotonic()
                self.used[sender] = message.arena_used_bytes
            else:
                self.heard.append((time.monotonic(), sender, message))
            self._news.notify_all()

    def _call(self, function: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(function)

    def open(self, epoch: int) -> None:
        self._call(lambda: self._board.open(epoch))

    def end(self, epoch: int) -> None:
        self._call(lambda: self._board.close(epoch))

    def send(self, workers: str | Iterable[str], message: Message) -> None:
        names = [workers] if isinstance(workers, str) else list(workers)

        def put() -> None:
            self._socket.send_many(names, message)

        self._call(put)

    def count(self, kind: type[M]) -> int:
        return sum(isinstance(message, kind) for _, _, message in self.heard)

    def wait(
        self,
        kind: type[M],
        accept: Callable[[str, M], bool] = lambda _sender, _message: True,
        timeout_s: float = 200.0,
        since: int = 0,
    ) -> tuple[str, M]:
        """The first message of a kind, heard or to come; fails the test after `timeout_s`."""
        end = time.monotonic() + timeout_s
        with self._news:
            while True:
                for _, sender, message in self.heard[since:]:
                    if isinstance(message, kind) and accept(sender, message):
                        return sender, message
                left = end - time.monotonic()
                if left <= 0:
                    tail = "\n  ".join(str(item)[:300] for item in self.heard[-12:])
                    raise AssertionError(f"no {kind.__name__} in {timeout_s} s; heard\n  {tail}")
                self._news.wait(left)

    def close(self) -> None:
        self._call(self._stop.set)
        self._thread.join(200)
        assert not self._thread.is_alive()
