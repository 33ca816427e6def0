"""The agent's end of the fork server: starts, ends and watches workers; never imports torch."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec

from flexslurm.engine import nursery_server as server
from flexslurm.engine.nursery_server import WorkerSpec
from flexslurm.errors import DeadlineExceeded, EnvironmentFault

__all__ = ["Ended", "Nursery", "Started", "WorkerSpec"]

log = logging.getLogger(__name__)

_START_TRIES = 3
_PROGRAM = "from flexslurm.engine.nursery_server import main; main()"


@dataclass(frozen=True, slots=True)
class Started:
    """A worker that runs."""

    worker: str
    """Its incarnation."""
    gpu: int
    pid: int
    start_s: float
    log: Path


@dataclass(frozen=True, slots=True)
class Ended:
    """A worker that runs no more."""

    worker: str
    gpu: int
    pid: int
    exit_code: int | None
    """Negative: the signal. None: unknown, it went down with the fork server."""
    reason: str


class Nursery:
    """One fork server and its workers; `on_exit` is called once for each worker, on the loop."""

    def __init__(
        self,
        device: str,
        log_dir: Path,
        on_exit: Callable[[Ended], None],
        *,
        env: Mapping[str, str] | None = None,
        threads: int = 0,
    ) -> None:
        assert device in ("cpu", "cuda"), device
        self._device = device
        self._log_dir = log_dir
        self._on_exit = on_exit
        self._env = dict(env or {})
        self._threads = threads
        self._decoder = msgspec.json.Decoder(server.ToAgent)
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._ready: asyncio.Future[float] | None = None
        self._starting = asyncio.Lock()
        self._failed_starts = 0
        self._asks: dict[str, asyncio.Future[int]] = {}
        self._early: dict[str, str] = {}
        """Why workers ended before their `spawn` had returned."""
        self._running: dict[str, Started] = {}
        self._changed = asyncio.Event()
        self._closed = False

    @property
    def running(self) -> Mapping[str, Started]:
        return dict(self._running)

    @property
    def server_pid(self) -> int | None:
        """The fork server's process id; None when there is none."""
        return None if self._process is None else self._process.pid

    async def start(self, timeout_s: float = 180.0) -> float:
        """Start the fork server unless it runs; returns the seconds its imports took.

        Raises EnvironmentFault when it does not come up, after three failures in a row at once.
        """
        async with self._starting:
            if self._ready is None:
                self._launch()
            assert self._ready is not None
            try:
                seconds = await asyncio.wait_for(asyncio.shield(self._ready), timeout_s)
            except (TimeoutError, DeadlineExceeded, EnvironmentFault) as error:
                self._failed_starts += 1
                self._lose("the fork server did not start")
                raise EnvironmentFault(
                    f"the fork server of the workers did not start: {error or 'too slow'}",
                    hint=self._log_tail(),
                ) from error
            self._failed_starts = 0
            return seconds

    async def spawn(self, spec: WorkerSpec, timeout_s: float = 30.0) -> Started:
        """Start one worker; brings the fork server up again where it has died.

        Raises EnvironmentFault when it cannot or the worker ends at once (`on_exit` is not called
        for it then), DeadlineExceeded after `timeout_s`.
        """
        began = time.monotonic()
        await self.start(timeout_s if self._ready is not None else 180.0)
        assert self._socket is not None
        worker = f"w-{uuid.uuid4().hex[:12]}"
        path = self._log_dir / f"worker-{spec.gpu}-{worker}.log"
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._asks[worker] = answer
        try:
            self._send(server.Spawn(worker, spec, str(path)))
            pid = await asyncio.wait_for(answer, timeout_s)
        except TimeoutError:
            self._send(server.Stop(worker, 0.0))
            raise DeadlineExceeded(f"no worker on GPU {spec.gpu} within {timeout_s:g} s") from None
        finally:
            del self._asks[worker]
        early = self._early.pop(worker, None)
        if early is not None:
            raise EnvironmentFault(f"the worker on GPU {spec.gpu} {early}", hint=f"see {path}")
        started = Started(worker, spec.gpu, pid, time.monotonic() - began, path)
        self._running[worker] = started
        return started

    def stop(self, worker: str, grace_s: float = 2.0) -> None:
        """Ask a worker to end, and kill it after `grace_s`; unknown ones are gone already."""
        if worker in self._running and self._socket is not None:
            self._send(server.Stop(worker, grace_s))

    async def close(self, grace_s: float = 2.0) -> None:
        """End all workers and the fork server; when it returns, no process is left."""
        if self._closed:
            return
        self._closed = True
        for worker in list(self._running):
            self.stop(worker, grace_s)
        end = time.monotonic() + grace_s + 2.0
        while self._running and (left := end - time.monotonic()) > 0:
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), left)
        self._hang_up()
        process, self._process = self._process, None
        if process is not None:
            await _wait(process, 5.0)
        self._report_all("the nursery was closed")

    # ------------------------------------------------------------------ the fork server

    def _launch(self) -> None:
        if self._closed:
            raise EnvironmentFault("the nursery is closed")
        if self._failed_starts >= _START_TRIES:
            raise EnvironmentFault(
                f"the fork server failed to start {self._failed_starts} times in a row",
                hint=self._log_tail(),
            )
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            ours.setblocking(False)
            try:
                with self._open_log() as output:
                    self._process = subprocess.Popen(
                        [sys.executable, "-P", "-c", _PROGRAM, str(theirs.fileno()), self._device],
                        pass_fds=(theirs.fileno(),),
                        env=self._environment(),
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                    )
            except OSError as error:
                ours.close()
                raise EnvironmentFault(f"cannot start the fork server: {error}") from error
        self._socket = ours
        loop = asyncio.get_running_loop()
        self._ready = loop.create_future()
        loop.add_reader(ours, self._readable)

    def _open_log(self) -> IO[bytes]:
        self._log_dir.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        return os.fdopen(os.open(self._log_path, flags, 0o600), "ab")

    @property
    def _log_path(self) -> Path:
        return self._log_dir / "nursery.log"

    def _log_tail(self) -> str:
        try:
            lines = self._log_path.read_text(errors="replace").splitlines()
        except OSError:
            lines = []
        return "\n  ".join([f"see {self._log_path}:", *lines[-8:]])

    def _environment(self) -> dict[str, str]:
        threads = self._threads or os.environ.get("FLEXSLURM_WORKER_THREADS", "1")
        quiet = {
            "OMP_NUM_THREADS": str(threads),
            "OPENBLAS_NUM_THREADS": "1",  # its pool would be threads before the fork
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # looks at cards without touching CUDA
        }
        return {**os.environ, **quiet, **self._env}

    def _send(self, message: server.FromAgent) -> None:
        try:
            if self._socket is not None:
                self._socket.send(server.encode(message))
        except OSError as error:
            self._lose(f"the fork server does not listen: {error}")

    def _readable(self) -> None:
        while self._socket is not None:
            try:
                data = self._socket.recv(server.MAX_PACKET_BYTES)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self._lose(f"the fork server is gone: {error}")
                return
            if not data:
                self._lose("the fork server is gone")
                return
            self._take(self._decoder.decode(data))

    def _take(self, message: server.ToAgent) -> None:
        match message:
            case server.Ready(preload_s):
                if self._ready is not None and not self._ready.done():
                    self._ready.set_result(preload_s)
            case server.Spawned(worker, pid):
                ask = self._asks.get(worker)
                if ask is None or ask.done():
                    self._send(server.Stop(worker, 0.0))  # nobody waits for it any more
                else:
                    ask.set_result(pid)
            case server.SpawnFailed(worker, reason):
                ask = self._asks.get(worker)
                if ask is not None and not ask.done():
                    ask.set_exception(EnvironmentFault(reason))
            case server.Exited(worker, _, exit_code, stopped):
                reason = "was stopped" if stopped else _why(exit_code)
                if worker in self._asks:
                    self._early[worker] = reason
                else:
                    self._report(worker, exit_code, reason)

    def _report(self, worker: str, exit_code: int | None, reason: str) -> None:
        started = self._running.pop(worker, None)
        self._changed.set()
        if started is not None:
            self._on_exit(Ended(worker, started.gpu, started.pid, exit_code, reason))

    def _report_all(self, reason: str) -> None:
        for worker in list(self._running):
            self._report(worker, None, reason)

    def _hang_up(self) -> None:
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
            self._socket = None
        self._ready = None

    def _lose(self, reason: str) -> None:
        """The fork server is gone or useless: so are its workers."""
        ready = self._ready
        self._hang_up()
        if ready is not None and not ready.done():
            ready.set_exception(EnvironmentFault(reason))
            ready.exception()  # read, in case nobody waits
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=5.0)
        for ask in self._asks.values():
            if not ask.done():
                ask.set_exception(EnvironmentFault(reason))
        self._report_all(reason)


async def _wait(process: subprocess.Popen[bytes], timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while process.poll() is None and time.monotonic() < end:
        await asyncio.sleep(0.005)
    if process.poll() is None:
        log.warning("the fork server %d did not end by itself", process.pid)
        process.kill()
        process.wait(timeout=timeout_s)


def _why(exit_code: int) -> str:
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-exit_code).name}"
    return f"was killed by signal {-exit_code}"
