"""Process groups that belong to an epoch, built alone and ended on demand; never a global world.

Every worker's default world is a singleton. A real group is built standalone over the epoch's store
and then registered with torch.distributed, because DeepSpeed's layers look groups up there. All
private names of torch that this takes are in this module; a test pins them.

Ending a group of gloo. Its `abort` does nothing, and closed connections do not end every wait: an
operation that was just being written when its connection failed is lost, and waits until its
timeout. So three things are done. Each group has a gloo device (a listening port) of its own and
members tell each other its endpoint: `abort` shuts down every connection between these endpoints,
which the peers see too. A caller never waits in gloo for longer than a moment at a time and looks
around in between: is the group aborted, is a connection gone? And a group with a lost operation is
put to rest only when that has timed out, since its destructor waits for it.

NCCL has an abort that does all this; there, waiting orders the stream and does not block.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as torch_distributed
from torch.distributed import distributed_c10d

from flexslurm.engine import sockets
from flexslurm.engine.backend import deepspeed
from flexslurm.engine.rendezvous import HeadStore
from flexslurm.engine.sockets import Endpoint
from flexslurm.errors import EnvironmentFault, StaleEpoch

log = logging.getLogger(__name__)

# torch's stubs leave out half of these names
td: Any = torch_distributed
c10d: Any = distributed_c10d

_LOOK_AROUND = timedelta(milliseconds=200)
_SETTLE_S = 0.3
_CLOSE_POLL_S = 0.003
_device_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Network:
    """Where and how this worker's groups communicate."""

    device: torch.device
    address: str
    """Host name or address that peers reach this node at; gloo listens there and nowhere else."""
    form_timeout_s: float = 20.0
    """To connect, once all members are there."""
    op_timeout_s: float = 60.0
    """Last resort of one operation: a lost peer is noticed long before."""


def start_default_world(device: torch.device) -> None:
    """Make the singleton world that DeepSpeed insists on; idempotent. Not before the fork."""
    if td.is_initialized():
        return
    for name, value in _QUIET_NCCL.items():
        os.environ.setdefault(name, value)
    before = os.environ.get("GLOO_SOCKET_IFNAME")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # nobody else is in this world
    try:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        td.init_process_group(backend, store=td.HashStore(), rank=0, world_size=1)
    finally:
        if before is None:
            del os.environ["GLOO_SOCKET_IFNAME"]
        else:
            os.environ["GLOO_SOCKET_IFNAME"] = before
    deepspeed(device.type).comm.init_distributed(
        "nccl" if device.type == "cuda" else "gloo", auto_mpi_discovery=False, verbose=False
    )


# The watchdog must never end the process: whether a peer is lost is the head's to say.
_QUIET_NCCL = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
}


class _Links(Protocol):
    """The connections under one group."""

    def connect(self, store: HeadStore, name: str, rank: int, size: int) -> Any:
        """Form the backend; blocks until all members are there."""
        ...

    def abort(self) -> None: ...

    def intact(self) -> bool:
        """Whether no peer has gone, as far as can be seen."""
        ...

    def left(self) -> tuple[int, bool]:
        """Connections that are alive, and whether anything else is still there."""
        ...


class _GlooLinks:
    def __init__(self, network: Network) -> None:
        self._network = network
        self._own: Endpoint | None = None
        self._peers: frozenset[Endpoint] = frozenset()
        self._aborted = threading.Event()

    def connect(self, store: HeadStore, name: str, rank: int, size: int) -> Any:
        device = self._listen()
        # Also the place where members wait for each other: gloo's own waits come after it, when
        # all were alive a moment ago, since gloo dials a dead peer until its timeout.
        assert self._own is not None
        store.set(f"{name}/at/{rank}", self._own)
        self._peers = frozenset(
            Endpoint(store.get(f"{name}/at/{other}").decode())
            for other in range(size)
            if other != rank
        )
        options = td.ProcessGroupGloo._Options()
        options._devices = [device]
        # With one thread, an operation that follows another takes milliseconds instead of a tenth
        # of one. Two may run side by side: what belongs together is told by their order.
        options._threads = 2
        options._timeout = timedelta(seconds=self._network.form_timeout_s)
        backend = td.ProcessGroupGloo(td.PrefixStore(name, store), rank, size, options)
        if self._aborted.is_set():
            self.abort()
        backend._set_default_timeout(timedelta(seconds=self._network.op_timeout_s))
        return backend

    def _listen(self) -> Any:
        with _device_lock:
            before = sockets.listening()
            try:
                device = td.ProcessGroupGloo.create_device(
                    hostname=self._network.address, lazy_init=False
                )
            except RuntimeError as error:
                raise EnvironmentFault(
                    f"cannot listen at this node's address {self._network.address}: {error}",
                    hint="set network.interface or network.subnet in the site file",
                ) from error
            new = sockets.listening() - before
        assert len(new) == 1, f"a gloo device listens at {sorted(new)}"
        (self._own,) = new
        return device

    def abort(self) -> None:
        self._aborted.set()
        if self._own is not None:
            sockets.cut(self._own, self._peers)

    def intact(self) -> bool:
        assert self._own is not None
        return sockets.connections(self._own, self._peers) >= len(self._peers)

    def left(self) -> tuple[int, bool]:
        if self._own is None:
            return 0, False
        return sockets.connections(self._own, self._peers), self._own in sockets.listening()


class _NcclLinks:
    def __init__(self, network: Network) -> None:
        self._network = network
        self._backend: Any = None
        self._aborted = threading.Event()

    def connect(self, store: HeadStore, name: str, rank: int, size: int) -> Any:
        torch.cuda.set_device(self._network.device)
        # NCCL's bootstrap cannot be broken off: let it begin when all members are there
        store.set(f"{name}/at/{rank}", b"here")
        store.wait([f"{name}/at/{other}" for other in range(size)])
        options = td.ProcessGroupNCCL.Options(is_high_priority_stream=False)
        options._timeout = timedelta(seconds=self._network.op_timeout_s)
        options.group_name = name
        options.global_ranks_in_group = list(range(size))
        self._backend = td.ProcessGroupNCCL(td.PrefixStore(name, store), rank, size, options)
        self._backend.eager_connect_single_device(self._network.device)
        if self._aborted.is_set():
            self.abort()
        return self._backend

    def abort(self) -> None:
        self._aborted.set()
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.abort()

    def intact(self) -> bool:
        return True  # NCCL does not tell; the head does

    def left(self) -> tuple[int, bool]:
        # aborted: no communicator and no connection is left, whoever still holds the object
        return 0, self._backend is not None


class Ticket:
    """An operation under way; what it reads or writes must live until `wait` has returned."""

    __slots__ = ("_alive", "_bounded", "_work")

    def __init__(self, work: Any, alive: Callable[[], None], *, bounded: bool) -> None:
        self._work, self._alive, self._bounded = work, alive, bounded

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when it is done; raises RuntimeError when it failed or its group has."""
        if not self._bounded:
            return bool(self._work.wait())
        while True:
            try:
                return bool(self._work.wait(_LOOK_AROUND))
            except RuntimeError:
                if self._work.is_completed():
                    raise
                self._alive()


class _Watched(c10d.ProcessGroup):  # type: ignore[misc]
    """The group that DeepSpeed's layers are given: its all-reduce can be called back."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.watch: Callable[[Any], Ticket] | None = None
        self.backend: Any = None

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Ticket | None:
        """As the backend's; None where that has put the operation on the current stream."""
        assert self.watch is not None
        work = self.backend.allreduce(tensors, options or c10d.AllreduceOptions())
        return None if work is None else self.watch(work)


class Group:
    """One group of an epoch; `abort` may be called at any time from any thread.

    After `abort` every operation, running or to come, raises RuntimeError at all members.
    """

    def __init__(self, name: str, rank: int, size: int, network: Network) -> None:
        assert 0 <= rank < size and size > 1, f"{name}: rank {rank} of {size}"
        self.name, self.rank, self.size = name, rank, size
        self._device = network.device
        cuda = network.device.type == "cuda"
        self._links: _Links = _NcclLinks(network) if cuda else _GlooLinks(network)
        self._handle: _Watched | None = None
        self._aborted = threading.Event()
        self._works: collections.deque[Any] = collections.deque()

    @property
    def handle(self) -> Any:
        """The torch ProcessGroup. Raises StaleEpoch when the group is closed."""
        if self._handle is None:
            raise StaleEpoch(f"the group {self.name} is not open")
        return self._handle

    def form(self, store: HeadStore) -> None:
        """Meet the other members and connect; raises what the store raises, or RuntimeError."""
        kind = c10d.ProcessGroup.BackendType
        handle = _Watched(self.rank, self.size)
        handle.backend = self._links.connect(store, self.name, self.rank, self.size)
        handle.watch = self._watch
        backend_type = kind.NCCL if self._device.type == "cuda" else kind.GLOO
        handle._register_backend(torch.device(self._device.type), backend_type, handle.backend)
        handle._set_default_backend(backend_type)
        handle._set_group_name(self.name)
        _register(handle, self.name, self.rank, self.size, self._device.type)
        self._handle = handle

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> Ticket:
        """Begin to give the root's tensor to all; operations keep their order at all members."""
        options = c10d.BroadcastOptions()
        options.rootRank, options.rootTensor, options.asyncOp = root, 0, True
        return self._watch(self.handle.backend.broadcast([tensor], options))

    def _watch(self, work: Any) -> Ticket:
        while self._works and self._works[0].is_completed():
            self._works.popleft()
        self._works.append(work)
        return Ticket(work, self._alive, bounded=self._device.type != "cuda")

    def _alive(self) -> None:
        """Raises RuntimeError when nothing can come of an operation any more."""
        if self._aborted.is_set():
            raise RuntimeError(f"the group {self.name} was closed")
        if not self._links.intact():
            raise RuntimeError(f"a peer in the group {self.name} is gone")

    def abort(self) -> None:
        self._aborted.set()
        self._links.abort()

    def close(self, timeout_s: float) -> bool:
        """Abort, forget and verify: whether nothing of the group is left; idempotent.

        Objects that still refer to the group (a stage) must have been dropped before.
        """
        self.abort()
        handle, self._handle = self._handle, None
        lost: list[Any] = []
        if handle is not None:
            _unregister(handle)
            handle.watch = None  # it refers back to this object
            lost = self._lost_works()
            if lost:
                _rest_later(self.name, handle, lost)
            handle.backend = None
        del handle
        self._works.clear()
        gc.collect()
        end = time.monotonic() + timeout_s
        while True:
            connections, more = self._links.left()
            if not connections and (lost or not more):
                return True
            if time.monotonic() > end:
                return False
            time.sleep(_CLOSE_POLL_S)

    def _lost_works(self) -> list[Any]:
        """Operations that do not come back from the abort."""
        if self._device.type == "cuda":
            return []
        end = time.monotonic() + _SETTLE_S
        while time.monotonic() < end and not all(work.is_completed() for work in self._works):
            time.sleep(_CLOSE_POLL_S)
        return [work for work in self._works if not work.is_completed()]


def _rest_later(name: str, handle: _Watched, lost: list[Any]) -> None:
    """Hold the last reference to a group until its lost operations have timed out."""
    kept = [handle, handle.backend]

    def rest() -> None:
        while not all(work.is_completed() for work in lost):
            time.sleep(0.5)  # bounded by the timeout of operations
        lost.clear()
        kept.clear()

    log.info("%s: %d operations are lost in gloo until their timeout", name, len(lost))
    threading.Thread(target=rest, name=f"rest-{name}", daemon=True).start()


def _register(handle: Any, name: str, rank: int, size: int, device: str) -> None:
    """Tell torch.distributed of a group that it has not made itself."""
    backend = "nccl" if device == "cuda" else "gloo"
    world = c10d._world
    world.pg_map[handle] = (backend, None)
    world.pg_names[handle] = name
    # DeepSpeed asks for the group rank of this process's global rank, 0 in a singleton world;
    # the others get numbers that no process has.
    world.pg_group_ranks[handle] = {
        (0 if other == rank else 1_000_000 + other): other for other in range(size)
    }
    world.pg_backend_config[handle] = f"{device}:{backend}"
    tag = f"user:{name}"
    world.pg_to_tag[handle] = tag
    world.tags_to_pg.setdefault(tag, []).append(handle)
    c10d._register_process_group(name, handle)


def _unregister(handle: Any) -> None:
    world = c10d._world
    name = world.pg_names.pop(handle, None)
    world.pg_map.pop(handle, None)
    world.pg_group_ranks.pop(handle, None)
    world.pg_backend_config.pop(handle, None)
    world.pg_coalesce_state.pop(handle, None)
    tag = world.pg_to_tag.pop(handle, None)
    if tag is not None:
        with contextlib.suppress(ValueError):
            world.tags_to_pg[tag].remove(handle)
        if not world.tags_to_pg[tag]:
            del world.tags_to_pg[tag]
    if name is not None:
        c10d._unregister_process_group(name)
