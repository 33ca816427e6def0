"""A worker: the process of one GPU; holds weights and KV blocks and nothing that must not be lost.

Threads: the main thread proves to the head that it lives and ends the process when there is no
head, or nobody who started it; the link's thread takes messages and never waits; each epoch has a
thread of its own (`tenancy`). The process ends at once and without clean-up: the kernel does it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import select
import sys
import threading
import time
from enum import IntEnum
from pathlib import Path

import torch

from flexslurm.engine.arena import Arena
from flexslurm.engine.groups import Network, start_default_world
from flexslurm.engine.install import Host
from flexslurm.engine.nursery_server import WorkerSpec
from flexslurm.engine.rendezvous import Rendezvous
from flexslurm.engine.tenancy import Order, Tenancy
from flexslurm.engine.transfer_server import REST
from flexslurm.engine.transfer_wire import data_key
from flexslurm.engine.transfers import Transfers
from flexslurm.errors import (
    CapacityError,
    DeadlineExceeded,
    EnvironmentFault,
    FlexslurmError,
    ProtocolError,
    StaleEpoch,
)
from flexslurm.messages import (
    PROTOCOL,
    Assemble,
    FreeBlocks,
    Install,
    Message,
    ParkKv,
    PullKv,
    Refused,
    RendezvousValue,
    Retire,
    Retired,
    Step,
    ToWorker,
    UnparkKv,
    WorkerBeat,
    WorkerExit,
    WorkerHello,
    WorkerWelcome,
)
from flexslurm.wire.keys import load_keys
from flexslurm.wire.transport import HeadLink

log = logging.getLogger(__name__)

SWITCH_S = 0.0005
"""How long an install's thread may keep the interpreter while the serving one waits for it."""
_HELLO_EVERY_S = 0.5
_WELCOME_WITHIN_S = 60.0
_RETIRE_WITHIN_S = 20.0
_LET_GO_WITHIN_S = 1.0
_MOST_AFTER_S = 2.0
_TIDY_CPU_BYTES, _TIDY_CUDA_BYTES = 2 << 20, 64 << 20
"""What moves in a millisecond or two, the time for which steps are held off."""
_TIDY_PAUSE_S = 0.01


class Exit(IntEnum):
    """Why a worker ended, as its exit code."""

    ASKED = 0
    FAILED = 1
    HEAD_LOST = 3
    REFUSED = 4
    STUCK = 5
    """An epoch could not be torn down in time, or left something behind."""


class Worker:
    """One worker; `run` returns why it ended."""

    def __init__(self, incarnation: str, spec: WorkerSpec, device: torch.device) -> None:
        self._incarnation, self._spec, self._device = incarnation, spec, device
        self._lock = threading.Lock()
        self._tenancies: dict[int, Tenancy] = {}
        self._arena: Arena | None = None
        self._arena_bytes = 0
        self._welcome: WorkerWelcome | None = None
        self._exit: Exit | None = None
        self._wake_r, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._rendezvous = Rendezvous(self._send)
        keys = load_keys(Path(spec.keys))
        self._transfers = Transfers(
            incarnation, spec.address, data_key(keys), self._send, parked_bytes=_parked_bytes(),
            rest=REST if device.type == "cpu" else 0.0,
        )  # fmt: skip
        self._host = Host(
            worker=incarnation,
            network=Network(self._device, spec.address),
            rendezvous=self._rendezvous,
            arena=self._arena_of,
            send=self._send,
            transfers=self._transfers,
            ended=self._ended,
        )
        self._link: HeadLink[Message] = HeadLink(
            spec.endpoint, keys, incarnation, ToWorker, self._take
        )

    def run(self, lifeline: int) -> Exit:
        """Serve until told to end, or `lifeline` closes, or the head is silent for too long."""
        began = time.monotonic()
        while self._exit is None:
            welcome = self._welcome
            if welcome is None:
                self._send(self._hello())
                patience_s, limit_s = _HELLO_EVERY_S, _WELCOME_WITHIN_S
            else:
                self._send(WorkerBeat(worker=self._incarnation, arena_used_bytes=self._used()))
                patience_s, limit_s = welcome.beat_s, welcome.lost_s
            ready, _, _ = select.select([lifeline, self._wake_r], [], [], patience_s)
            if lifeline in ready:
                log.info("asked to end, or the agent is gone")
                self._end(Exit.ASKED)
            if self._wake_r in ready:
                os.read(self._wake_r, 4096)
            silent_s = min(self._link.silent_s, time.monotonic() - began)
            if silent_s > limit_s:
                log.warning("the head has been silent for %.1f s", silent_s)
                self._end(Exit.HEAD_LOST)
        self._link.close()
        return self._exit

    def _hello(self) -> WorkerHello:
        return WorkerHello(
            protocol=PROTOCOL,
            worker=self._incarnation,
            agent=self._spec.agent,
            gpu=self._spec.gpu,
            pid=os.getpid(),
            device=self._device_name(),
            data_port=self._transfers.port,
        )

    def _device_name(self) -> str:
        if self._device.type == "cuda":
            return torch.cuda.get_device_name(self._device)
        return "cpu"

    def _used(self) -> int:
        return 0 if self._arena is None else self._arena.used_bytes

    def _end(self, why: Exit) -> None:
        if self._exit is None:
            self._exit = why
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it is awake already
            os.write(self._wake_w, b"x")

    def _send(self, message: Message) -> None:
        try:
            self._link.send(message)
        except ProtocolError:
            log.debug("not sent, as the process is ending: %s", type(message).__name__)

    # ------------------------------------------------------------------ on the link's thread

    def _take(self, message: Message) -> None:
        match message:
            case Step() | FreeBlocks():
                self._order(message)
            case RendezvousValue():
                self._rendezvous.deliver(message)
            case WorkerWelcome():
                self._welcomed(message)
            case Install() | Assemble():
                self._install(message)
            case PullKv():
                self._transfers.pull(message)
            case ParkKv():
                self._transfers.park(message)
            case UnparkKv():
                self._transfers.unpark(message)
            case Retire():
                self._retire(message)
            case Refused(reason=reason):
                log.error("the head refused this worker: %s", reason)
                self._end(Exit.REFUSED)
            case WorkerExit(reason=reason):
                log.info("the head ends this worker: %s", reason)
                self._end(Exit.ASKED)
            case _:
                log.warning("the head sent a %s, which is not for workers", type(message).__name__)

    def _welcomed(self, welcome: WorkerWelcome) -> None:
        known = self._welcome
        if known is not None and known.head != welcome.head:
            # what is installed here is another head's; the agent starts a fresh worker at once
            log.warning("the head %s was replaced by %s", known.head, welcome.head)
            self._end(Exit.HEAD_LOST)
        self._welcome = welcome
        if known is None:
            self._wake()

    def _order(self, order: Order) -> None:
        try:
            self._tenancy(order.epoch).put(order)
        except StaleEpoch as error:
            log.info("dropped a %s: %s", type(order).__name__, error)

    def _tenancy(self, epoch: int) -> Tenancy:
        """Raises StaleEpoch for an epoch that is not installed."""
        with self._lock:
            found = self._tenancies.get(epoch)
        if found is None:
            raise StaleEpoch(f"epoch {epoch} is not installed here")
        return found

    def _install(self, order: Install | Assemble) -> None:
        early = isinstance(order, Assemble)
        install = order.install if isinstance(order, Assemble) else order
        room_s = order.room_s if isinstance(order, Assemble) else None
        with self._lock:
            tenancy = self._tenancies.get(install.epoch)
            known = tenancy is not None
            if tenancy is None:
                tenancy = Tenancy(install, self._host, room_s=room_s)
                self._tenancies[install.epoch] = tenancy
        if not known:
            log.info("epoch %d: installing %s", install.epoch, install.slot)
            tenancy.start()
        elif not early:
            tenancy.go_on(install)  # or it is said twice

    def _retire(self, order: Retire) -> None:
        epoch = order.epoch
        try:
            tenancy = self._tenancy(epoch)
        except StaleEpoch:
            # At once, as what is pulled next may need the room; nobody takes from them now.
            if self._transfers.let_go(epoch, _LET_GO_WITHIN_S):
                threading.Thread(target=self._tidy, name="tidy", daemon=True).start()
            self._send(Retired(worker=self._incarnation, epoch=epoch))
            return
        # an abort of NCCL may take a while, and this thread must not
        threading.Thread(
            target=self._bury, args=(tenancy, order), name=f"retire-{epoch}", daemon=True
        ).start()

    def _bury(self, tenancy: Tenancy, order: Retire) -> None:
        """Close an epoch; a process that cannot say that it is closed ends."""
        time.sleep(min(max(order.after_s, 0.0), _MOST_AFTER_S))
        keep_weights = order.keep_weights
        log.info("epoch %d: retiring (%s)", tenancy.epoch, tenancy.phase)
        try:
            ended = tenancy.retire(_RETIRE_WITHIN_S, keep_weights=keep_weights)
        except Exception:  # whatever it is, its memory would never be free again
            log.exception("epoch %d cannot be closed: ending the process", tenancy.epoch)
            self._end(Exit.STUCK)
            return
        if ended:
            if not keep_weights:  # it may have been told to keep them before, and changed its mind
                self._transfers.let_go(tenancy.epoch, _LET_GO_WITHIN_S)
            self._send(Retired(worker=self._incarnation, epoch=tenancy.epoch))
            if not keep_weights:  # else streams wait
                self._tidy()
        else:
            log.error("epoch %d does not end: ending the process", tenancy.epoch)
            faulthandler.dump_traceback(sys.stderr)
            self._end(Exit.STUCK)

    def _tidy(self) -> None:
        """Slide weights together, a little at a time: steps go on in between."""
        arena = self._arena
        most = _TIDY_CPU_BYTES if self._device.type == "cpu" else _TIDY_CUDA_BYTES
        try:
            while arena is not None and self._exit is None and arena.tidy(most):
                time.sleep(_TIDY_PAUSE_S)
        except DeadlineExceeded as error:
            log.info("the arena is not tidied: %s", error.message)

    # ------------------------------------------------------------------ on an epoch's thread

    def _ended(self, epoch: int, clean: bool) -> None:
        if not clean:  # what it held is used yet, and must not be counted as free
            self._end(Exit.STUCK)
        with self._lock:
            self._tenancies.pop(epoch, None)

    def _arena_of(self, size_bytes: int) -> Arena:
        with self._lock:
            if self._arena is not None and self._arena_bytes != size_bytes:
                if self._arena.used_bytes:
                    raise CapacityError(
                        f"this GPU's arena has {self._arena.total_bytes} bytes and is in use; an "
                        f"install asks for {size_bytes}"
                    )
                self._arena.close()
                self._arena = None
            if self._arena is None:
                self._arena, self._arena_bytes = Arena(size_bytes, self._device), size_bytes
            return self._arena


def run(incarnation: str, spec: WorkerSpec, lifeline: int) -> int:
    """The body of a worker process, after the fork; returns its exit code."""
    logging.basicConfig(
        level=os.environ.get("FLEXSLURM_LOG", "INFO").upper(),
        format=f"%(asctime)s {incarnation} %(levelname)s %(message)s",
        stream=sys.stderr,
        force=True,
    )
    sys.setswitchinterval(SWITCH_S)
    try:
        torch.set_num_threads(spec.threads or _default_threads())
        device = torch.device("cuda:0" if spec.device == "cuda" else "cpu")
        start_default_world(device)
        return int(Worker(incarnation, spec, device).run(lifeline))
    except FlexslurmError as error:
        log.error("%s", error)
        return int(Exit.FAILED)


def _default_threads() -> int:
    return _number("FLEXSLURM_WORKER_THREADS", "threads", 1) or 1


def _parked_bytes() -> int | None:
    """The bound on KV parked in host memory; None: what the machine has."""
    return _number("FLEXSLURM_PARKED_BYTES", "bytes", 0)


def _number(variable: str, what: str, least: int) -> int | None:
    text = os.environ.get(variable)
    if text is not None and (not text.isdecimal() or int(text) < least):
        raise EnvironmentFault(f"{variable} is '{text}', not a number of {what}")
    return None if text is None else int(text)
