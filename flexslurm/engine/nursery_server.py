"""The fork server of a node: imports what workers need once, and forks them; never serves itself.

It speaks with its agent over one socket of whole packets. It stays single-threaded and touches
neither CUDA nor gloo, so that what it forks is clean. When the socket closes, for whatever reason,
it kills its workers and ends; when it ends, the kernel kills its workers.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import select
import selectors
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import msgspec

from flexslurm.engine.prctl import die_with_parent, ignore_signals

log = logging.getLogger(__name__)

MAX_PACKET_BYTES = 64 * 1024
_REAP_S = 10.0


class WorkerSpec(msgspec.Struct, frozen=True):
    """What one worker is told at its start."""

    gpu: int
    endpoint: str
    """The head's control socket, `tcp://HOST:PORT`."""
    keys: str
    """Path of the service's keys."""
    agent: str
    """Incarnation of the agent."""
    address: str
    """What other nodes' workers reach this node at; gloo listens there."""
    device: str = "cpu"
    """`cpu` or `cuda`: with CUDA_VISIBLE_DEVICES in `env` the worker sees one card, cuda:0."""
    env: dict[str, str] = {}
    threads: int = 0
    """Threads of torch; 0: FLEXSLURM_WORKER_THREADS, or one."""


class Spawn(msgspec.Struct, frozen=True, tag=True):
    """Agent to server: fork a worker, whose output goes to the file `log`."""

    worker: str
    spec: WorkerSpec
    log: str


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Agent to server: end a worker, by SIGKILL after `grace_s`."""

    worker: str
    grace_s: float


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Server to agent: everything is imported, which took `preload_s`."""

    preload_s: float


class Spawned(msgspec.Struct, frozen=True, tag=True):
    """Server to agent: the worker's process is there."""

    worker: str
    pid: int


class SpawnFailed(msgspec.Struct, frozen=True, tag=True):
    """Server to agent: there is no such process, and why."""

    worker: str
    reason: str


class Exited(msgspec.Struct, frozen=True, tag=True):
    """Server to agent: a worker's process has ended."""

    worker: str
    pid: int
    exit_code: int
    """Negative: the signal."""
    stopped: bool
    """Whether it was asked to end."""


FromAgent = Spawn | Stop
ToAgent = Ready | Spawned | SpawnFailed | Exited

encode = msgspec.json.encode


@dataclass(slots=True)
class _Child:
    pid: int
    lifeline: int
    """Write end of a pipe; the worker ends when it closes. -1 when closed."""
    kill_at: float | None = None


class Orphaned(Exception):
    """The socket is closed: there is nobody left to work for."""


class Server:
    """Forks, watches and ends workers; `run` returns when the agent is gone and all are ended."""

    def __init__(self, agent: socket.socket) -> None:
        self._agent = agent
        self._pid = os.getpid()
        self._children: dict[str, _Child] = {}
        self._decoder = msgspec.json.Decoder(FromAgent)
        self._wake_r, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def run(self, preload_s: float) -> None:
        signal.signal(signal.SIGCHLD, _nothing)
        signal.set_wakeup_fd(self._wake_w, warn_on_full_buffer=False)
        try:
            self._send(Ready(preload_s))
            with selectors.DefaultSelector() as selector:
                selector.register(self._agent, selectors.EVENT_READ)
                selector.register(self._wake_r, selectors.EVENT_READ)
                while True:
                    for key, _ in selector.select(self._patience_s()):
                        if key.fd == self._wake_r:
                            os.read(self._wake_r, 4096)
                        else:
                            self._take(self._receive())
                    self._reap()
                    self._kill_overdue()
        except Orphaned:
            self._end()

    def _receive(self) -> FromAgent:
        try:
            data = self._agent.recv(MAX_PACKET_BYTES)
        except OSError as error:
            raise Orphaned from error
        if not data:
            raise Orphaned
        message: FromAgent = self._decoder.decode(data)
        return message

    def _send(self, message: ToAgent) -> None:
        try:
            self._agent.send(encode(message))
        except OSError as error:
            raise Orphaned from error

    def _take(self, message: FromAgent) -> None:
        if isinstance(message, Spawn):
            try:
                self._spawn(message)
            except OSError as error:
                self._send(SpawnFailed(message.worker, f"cannot fork: {error}"))
        elif (child := self._children.get(message.worker)) is not None:
            if child.lifeline >= 0:
                os.close(child.lifeline)
                child.lifeline = -1
            due = time.monotonic() + message.grace_s
            child.kill_at = due if child.kill_at is None else min(child.kill_at, due)

    def _spawn(self, order: Spawn) -> None:
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        try:
            pid = os.fork()
        except OSError:
            os.close(read_end)
            os.close(write_end)
            raise
        if pid == 0:
            os.close(write_end)
            self._become_worker(order, read_end)
        os.close(read_end)
        self._children[order.worker] = _Child(pid, write_end)
        self._send(Spawned(order.worker, pid))

    def _become_worker(self, order: Spawn, lifeline: int) -> None:
        """In the child: leave everything of the server behind, work, and never return."""
        code = 70
        try:
            die_with_parent(self._pid)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._agent.close()
            for fd in (self._wake_r, self._wake_w, *(c.lifeline for c in self._children.values())):
                if fd >= 0:
                    os.close(fd)
            _log_to(order.log)
            os.environ.update(order.spec.env)
            from flexslurm.engine.worker import run

            code = run(order.worker, order.spec, lifeline)
        except BaseException:  # noqa: BLE001 - the last frame of a process: its log is all that is left
            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _patience_s(self) -> float | None:
        due = [child.kill_at for child in self._children.values() if child.kill_at is not None]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _kill_overdue(self) -> None:
        now = time.monotonic()
        for child in self._children.values():
            if child.kill_at is not None and child.kill_at <= now:
                # not reaped yet, so the number is still this child's
                os.kill(child.pid, signal.SIGKILL)
                child.kill_at = now + 1.0

    def _reap(self) -> None:
        for worker, child in list(self._children.items()):
            pid, status = os.waitpid(child.pid, os.WNOHANG)
            if pid == 0:
                continue
            del self._children[worker]
            if child.lifeline >= 0:
                os.close(child.lifeline)
            code = os.waitstatus_to_exitcode(status)
            self._send(Exited(worker, pid, code, stopped=child.kill_at is not None))

    def _end(self) -> None:
        for child in self._children.values():
            os.kill(child.pid, signal.SIGKILL)
        end = time.monotonic() + _REAP_S
        for child in self._children.values():
            while os.waitpid(child.pid, os.WNOHANG)[0] == 0 and time.monotonic() < end:
                time.sleep(0.005)


def preload(device: str, agent: socket.socket) -> float:
    """Import and warm up everything a worker uses; returns the seconds it took."""
    began = time.monotonic()
    import torch  # noqa: F401

    _leave_if_alone(agent)
    import transformers  # noqa: F401

    _leave_if_alone(agent)
    from flexslurm.engine.backend import warm_up

    warm_up(device)
    import flexslurm.engine.worker  # noqa: F401

    gc.collect()
    gc.freeze()  # the children's collector leaves these pages alone, so they stay shared
    threads = sum(1 for _ in Path("/proc/self/task").iterdir())
    if threads > 1:
        log.warning("the fork server has %d threads: workers may hang at their start", threads)
    return time.monotonic() - began


def _leave_if_alone(agent: socket.socket) -> None:
    # nothing is sent before Ready, so whatever can be read now is the end of the socket
    if select.select([agent], [], [], 0)[0]:
        raise Orphaned


def _log_to(path: str) -> None:
    number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    os.dup2(number, 1)
    os.dup2(number, 2)
    os.close(number)


def _nothing(_number: int, _frame: FrameType | None) -> None:
    """Wakes the loop through the descriptor that is set for signals."""


def main() -> None:
    """Run as a process: arguments are the socket's descriptor and the device."""
    fd, device = int(sys.argv[1]), sys.argv[2]
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    ignore_signals()
    agent = socket.socket(fileno=fd)
    agent.set_inheritable(False)
    with contextlib.suppress(Orphaned):
        Server(agent).run(preload(device, agent))
    # no clean-up of torch's many statics: there is nothing to save
    sys.stderr.flush()
    os._exit(0)
