"""The link of worker and head: a worker's life and the stages it is to hold; not the steps."""

from __future__ import annotations

import msgspec

from flexslurm.gear import Replica, Slot
from flexslurm.messages.base import Message


class WorkerHello(Message, frozen=True, tag="worker.hello"):
    """First message of a worker, repeated until `WorkerWelcome`."""

    protocol: int
    worker: str
    agent: str
    """Incarnation of the agent that started it."""
    gpu: int
    pid: int
    device: str
    data_port: int = 0
    """Where its data server listens, on the node's address; 0: it has none."""


class WorkerBeat(Message, frozen=True, tag="worker.beat"):
    """Proof that the control thread runs, with the arena's figures."""

    worker: str
    arena_used_bytes: int = 0


class InstallProgress(Message, frozen=True, tag="worker.progress"):
    """How far an install is: its phase, and what is done of the phase's bytes."""

    worker: str
    epoch: int
    phase: str
    done_bytes: int = 0
    total_bytes: int = 0


class Assembled(Message, frozen=True, tag="worker.assembled"):
    """The answer to Assemble: groups are up, and the stage lacks nothing but memory."""

    worker: str
    epoch: int
    staged: bool = False
    """All weights that come from other workers wait in this host's memory."""


class Installed(Message, frozen=True, tag="worker.installed"):
    """The stage is built, filled and its groups are up; steps of this epoch may come."""

    worker: str
    epoch: int
    weights_bytes: int
    kv_blocks: int
    load_s: float
    groups_s: float
    moved_bytes: int = 0
    """Weights that came from other workers."""
    kept_bytes: int = 0
    """Weights that were on this GPU already."""
    read_bytes: int = 0
    """Weights that came from files."""
    move_s: float = 0.0
    """How long those from other workers and from files took."""


class InstallFailed(Message, frozen=True, tag="worker.install_failed"):
    """The stage cannot be built here, and nothing of it is kept."""

    worker: str
    epoch: int
    reason: str
    fatal: bool = False
    """The same install would fail anywhere: the model's files are at fault, not this GPU."""


class Retired(Message, frozen=True, tag="worker.retired"):
    """The epoch's groups are closed and its memory is free.

    Where its weights were to be kept, its pages are free, and the rest is told of when it is
    retired for good.
    """

    worker: str
    epoch: int


class Peer(msgspec.Struct, frozen=True, array_like=True):
    """Who fills a slot of the replica, and where."""

    slot: Slot
    worker: str
    address: str


class WeightHolder(msgspec.Struct, frozen=True, array_like=True):
    """A worker that holds the weights of a slot now, and where it gives them out."""

    worker: str
    node: str
    address: str
    data_port: int
    epoch: int
    lo: int
    hi: int
    tp: int
    tp_rank: int


class Pacing(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a virtual GPU spends time; see `config.site.VirtualGpu`."""

    speed: float = 1.0
    """As it comes: a step takes its CPU time divided by this; 1 adds nothing."""
    acted: dict[str, float] | None = None
    """Acted: coefficients of a step's seconds for this stage, see `engine.pacing`."""


class WorkerWelcome(Message, frozen=True, tag="head.worker_welcome"):
    """The answer to `WorkerHello` and to each `WorkerBeat`; as `Welcome`."""

    head: str
    beat_s: float
    lost_s: float


class Install(Message, frozen=True, tag="head.install"):
    """Build one stage of an epoch beside what is installed; answered by Installed or Failed."""

    epoch: int
    model: str
    """Checkpoint directory, as seen from the node."""
    dtype: str
    block_tokens: int
    slot: Slot
    replica: Replica
    peers: tuple[Peer, ...]
    """All slots of this replica, in slot order; the rank in the replica's group is the index."""
    arena_bytes: int
    """The GPU's whole budget; weights and KV pages must fit in it."""
    timeout_s: float
    pacing: Pacing | None = None
    holders: tuple[WeightHolder, ...] = ()
    """Who may be asked for weights before the checkpoint is read."""
    rate_bytes_per_s: float = 0.0
    """Bound on what one source sends to this worker; 0: none."""
    hand_over: int = 0
    """So many workers meet after each turn, when kept weights of its layers are free; 0: none.

    1: each goes on alone, as all have what they take from others.
    """
    turn_layers: int = 1
    """Layers of a turn."""
    host_workers: int = 1
    """Workers of the new gear that share this one's host, with it: so many share its memory."""
    probe: tuple[int, ...] = ()
    """Tokens that are sent through all stages before the replica counts as installed; may be none.

    More than one block and one micro-batch hold are left out.
    """


class Assemble(Message, frozen=True, tag="head.assemble"):
    """Make what needs no memory of the GPU, and wait: the Install follows once there is room.

    Weights that peers have are fetched to host memory meanwhile, at the rate of this install.
    Answered by Assembled or InstallFailed.
    """

    install: Install
    room_s: float
    """The Install follows within this time, or the epoch is retired."""


class Retire(Message, frozen=True, tag="head.retire"):
    """Close the epoch's groups and free its memory; steps of it that wait are dropped."""

    epoch: int
    keep_weights: bool = False
    """Its weights stay, for others to take, until it is retired once more."""
    after_s: float = 0.0
    """Not before so many seconds have passed: what serves instead is just beginning."""


class WorkerExit(Message, frozen=True, tag="head.worker_exit"):
    """End the process."""

    reason: str
