"""The link of agent and head: who is there, which workers run, who must leave; no models."""

from __future__ import annotations

import msgspec

from flexslurm.messages.base import Message


class GpuInfo(msgspec.Struct, frozen=True, array_like=True):
    """A GPU that an agent holds, with the bytes of it that nobody else does."""

    index: int
    memory_bytes: int
    uuid: str = ""


class AgentHello(Message, frozen=True, tag="agent.hello"):
    """First message of an agent, repeated until `Welcome`."""

    protocol: int
    incarnation: str
    fragment: str
    """The pilot's name, as the launcher gave it; the same after a requeue."""
    node: str
    address: str
    """Address other nodes' workers reach this node at."""
    gpu_type: str
    gpus: tuple[GpuInfo, ...]
    job_id: str | None = None
    restarts: int = 0
    pid: int = 0
    walltime_s: float | None = None
    """Seconds left until Slurm ends the job, where it says so."""


class AgentBeat(Message, frozen=True, tag="agent.beat"):
    """Proof that an agent lives, every `Welcome.beat_s`."""

    incarnation: str
    number: int


class LeaveNotice(Message, frozen=True, tag="agent.leave"):
    """A signal says that these GPUs will be taken."""

    incarnation: str
    source: str
    """What told: the signal, as `SIGTERM`."""
    grace_s: float
    """Seconds in which the agent still answers; 0 where none is promised."""


class WorkerStarted(Message, frozen=True, tag="agent.worker_started"):
    """A worker's process is there; it says hello itself. `start_s`: how long that took."""

    incarnation: str
    gpu: int
    worker: str
    """The worker's own incarnation."""
    pid: int
    start_s: float


class WorkerDied(Message, frozen=True, tag="agent.worker_died"):
    """A worker's process has ended, or could not be started (then `worker` is empty)."""

    incarnation: str
    gpu: int
    worker: str
    exit_code: int | None
    """Negative: the signal, as in `subprocess`."""
    reason: str = ""


class DirectoryProbed(Message, frozen=True, tag="agent.directory_probed"):
    """The answer to `ProbeDirectory`."""

    incarnation: str
    path: str
    reason: str = ""
    """What is wrong with it, as seen from the agent's node; empty: nothing."""


class PortReading(msgspec.Struct, frozen=True, kw_only=True):
    """A port of an InfiniBand or RoCE adapter; counts since its driver was loaded."""

    device: str
    port: int
    active: bool
    gbit_per_s: float
    traffic: dict[str, int] = {}
    """sent_bytes, received_bytes, sent_packets, received_packets, where they are counted."""
    waits: int = 0
    """Ticks in which data waited to be sent."""
    errors: dict[str, int] = {}
    hardware: dict[str, int] = {}
    """The driver's own counters, by the driver's names."""


class GpuReading(msgspec.Struct, frozen=True, kw_only=True):
    """A card as its driver tells it; None: it does not say."""

    index: int
    uuid: str = ""
    utilisation: float | None = None
    """Share of time in which a kernel ran, 0 to 1."""
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    celsius: int | None = None
    watts: float | None = None
    ecc_errors: dict[str, int] = {}
    """corrected and uncorrected, since the driver was loaded."""
    slowed_by: tuple[str, ...] | None = None
    """What holds the clocks down now."""


class NodeReadings(Message, frozen=True, tag="agent.node"):
    """What an agent's node counts and measures; sent beside the beats where there is anything."""

    incarnation: str
    ports: tuple[PortReading, ...] = ()
    gpus: tuple[GpuReading, ...] = ()


class AgentBye(Message, frozen=True, tag="agent.bye"):
    """The agent ends."""

    incarnation: str
    reason: str


class Welcome(Message, frozen=True, tag="head.welcome"):
    """The answer to `AgentHello` and to each `AgentBeat`."""

    head: str
    beat_s: float
    """Send an AgentBeat this often."""
    lost_s: float
    """Silence after which either side takes the other for lost."""


class Refused(Message, frozen=True, tag="head.refused"):
    """The hello is not acceptable: protocol version, unknown GPU type; the agent ends."""

    reason: str


class StartWorkers(Message, frozen=True, tag="head.start_workers"):
    """Have one worker running on each of these GPUs; those that run already stay."""

    gpus: tuple[int, ...]


class StopWorkers(Message, frozen=True, tag="head.stop_workers"):
    """End these GPUs' workers: SIGTERM, then SIGKILL after `grace_s`."""

    gpus: tuple[int, ...]
    grace_s: float = 2.0


class ProbeDirectory(Message, frozen=True, tag="head.probe_directory"):
    """Find out whether a shared directory can be used from the agent's node."""

    path: str
    token: str
    """What the head wrote there."""


class ReleaseAgent(Message, frozen=True, tag="head.release"):
    """Stop the workers and end: the pilot is no longer wanted, or it must leave and is empty."""

    reason: str
    give_back: bool = False
    """The job shall be requeued, so that the pilot comes back when Slurm has room again."""
