"""Process groups that belong to an epoch, built alone and ended on demand; never a global world.

Every worker's default world is a singleton. A real group is built standalone over the epoch's store
and then registered with torch.distributed, because DeepSpeed's layers look groups up there. All
private names of torch that this takes are in this module; a test pins them.

gloo has no abort. What ends an operation of gloo at once, wherever it hangs, is to shut down the
connections under it; so each gloo group gets a device (a listening port) of its own, members tell
each other its endpoint, and `abort` shuts down every connection between these endpoints. The peers
see the connections close and come back too. NCCL has an abort that does the same.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import threading
import time
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

_CLOSE_POLL_S = 0.01
_device_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Network:
    """Where and how this worker's groups communicate."""

    device: torch.device
    address: str
    """Host name or address that peers reach this node at; gloo listens there and nowhere else."""
    form_timeout_s: float = 20.0
    """From the first member that comes to a group to the connected group."""
    op_timeout_s: float = 120.0
    """Last resort of one operation: the head notices a lost peer long before."""


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

    def open(self) -> bool:
        """Whether anything of the group still lives in this process."""
        ...

    def drop(self) -> None: ...


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
        options._threads = 1  # operations of a group run one after another
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

    def open(self) -> bool:
        return self._own is not None and (
            self._own in sockets.listening() or sockets.connections(self._own, self._peers) > 0
        )

    def drop(self) -> None:
        pass


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
        if self._backend is not None:
            self._backend.abort()

    def open(self) -> bool:
        return self._backend is not None

    def drop(self) -> None:
        # aborted: no communicator and no connection is left, whoever still holds the object
        self._backend = None


class Group:
    """One group of an epoch; `abort` may be called at any time from any thread.

    After `abort` every operation, running or to come, raises RuntimeError at all members.
    """

    def __init__(self, name: str, rank: int, size: int, network: Network) -> None:
        assert 0 <= rank < size and size > 1, f"{name}: rank {rank} of {size}"
        self.name, self.rank, self.size = name, rank, size
        self._network = network
        cuda = network.device.type == "cuda"
        self._links: _Links = _NcclLinks(network) if cuda else _GlooLinks(network)
        self._handle: Any = None

    @property
    def handle(self) -> Any:
        """The torch ProcessGroup. Raises StaleEpoch when the group is closed."""
        if self._handle is None:
            raise StaleEpoch(f"the group {self.name} is not open")
        return self._handle

    def form(self, store: HeadStore) -> None:
        """Meet the other members and connect; raises what the store raises, or RuntimeError."""
        backend = self._links.connect(store, self.name, self.rank, self.size)
        cuda = self._network.device.type == "cuda"
        kind = c10d.ProcessGroup.BackendType.NCCL if cuda else c10d.ProcessGroup.BackendType.GLOO
        handle = c10d.ProcessGroup(td.PrefixStore(self.name, store), self.rank, self.size)
        handle._register_backend(torch.device(self._network.device.type), kind, backend)
        handle._set_default_backend(kind)
        handle._set_group_name(self.name)
        _register(handle, self.name, self.rank, self.size, self._network.device.type)
        self._handle = handle

    def isend(self, tensor: torch.Tensor, to: int, tag: int) -> Any:
        """Begin to send; the tensor must live unchanged until the returned work is waited for."""
        return self.handle.send([tensor], to, tag)

    def irecv(self, tensor: torch.Tensor, source: int, tag: int) -> Any:
        return self.handle.recv([tensor], source, tag)

    def abort(self) -> None:
        self._links.abort()

    def close(self, timeout_s: float) -> bool:
        """Abort, forget and verify: whether nothing of the group is left; idempotent.

        Objects that still refer to the group (a stage) must have been dropped before.
        """
        self.abort()
        handle, self._handle = self._handle, None
        if handle is not None:
            _unregister(handle)
        del handle
        self._links.drop()
        end = time.monotonic() + timeout_s
        gc.collect()
        while self._links.open():
            if time.monotonic() > end:
                return False
            time.sleep(_CLOSE_POLL_S)
        return True


class EpochGroups:
    """The groups one worker is in for one epoch: of its stage, and of its whole replica."""

    def __init__(self, epoch: int, replica: int, network: Network) -> None:
        self._prefix = f"{epoch}/r{replica}"
        self._network = network
        self._lock = threading.Lock()
        self._aborted = False
        self._all: list[Group] = []
        self.tp: Group | None = None
        self.pipe: Group | None = None

    def form(
        self, store: HeadStore, *, stage: int, tp_rank: int, tp: int, rank: int, size: int
    ) -> None:
        """Form the stage's group if tp > 1, then the replica's if it has other stages."""
        if tp > 1:
            self.tp = self._new(f"{self._prefix}/s{stage}", tp_rank, tp)
            self.tp.form(store)
        if size > tp:
            self.pipe = self._new(f"{self._prefix}/pipe", rank, size)
            self.pipe.form(store)

    def _new(self, name: str, rank: int, size: int) -> Group:
        group = Group(name, rank, size, self._network)
        with self._lock:
            if self._aborted:
                raise StaleEpoch(f"{name}: aborted")
            self._all.append(group)
        return group

    def abort(self) -> None:
        """Make every operation of these groups fail, here and at the peers; idempotent."""
        with self._lock:
            self._aborted = True
            groups = list(self._all)
        for group in groups:
            group.abort()

    def close(self, timeout_s: float) -> tuple[str, ...]:
        """Close all; returns the names of groups of which something is left."""
        self.abort()
        self.tp = self.pipe = None
        end = time.monotonic() + timeout_s
        return tuple(
            group.name for group in self._all if not group.close(max(0.0, end - time.monotonic()))
        )


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
