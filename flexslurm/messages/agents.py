"""The link of agent and head: who is there, which workers run, who must leave; no models."""

from __future__ import annotations

import msgspec

from flexslurm.messages.base import Message


class GpuInfo(msgspec.Struct, frozen=True, array_like=True):
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
    incarnation: str
    number: int


class LeaveNotice(Message, frozen=True, tag="agent.leave"):
    """These GPUs will be taken: by a signal, by walltime, by an operator."""

    incarnation: str
    source: str
    """What told: `SIGTERM`, `SIGUSR1`, `walltime`, `cancel`."""
    grace_s: float
    """Seconds in which the agent still answers; 0 where none is promised."""


class LeaveCancelled(Message, frozen=True, tag="agent.stay"):
    incarnation: str
    reason: str


class WorkerStarted(Message, frozen=True, tag="agent.worker_started"):
    incarnation: str
    gpu: int
    worker: str
    """The worker's own incarnation."""
    pid: int
    start_s: float


class WorkerDied(Message, frozen=True, tag="agent.worker_died"):
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


class AgentBye(Message, frozen=True, tag="agent.bye"):
    incarnation: str
    reason: str


class Welcome(Message, frozen=True, tag="head.welcome"):
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
