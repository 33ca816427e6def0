"""What a sandbox is made of: nodes, partitions, times; only values, no processes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from flexslurm.config.schema import Section, load_section
from flexslurm.config.units import Bytes, BytesPerS, FlopsPerS, Seconds

_NAME = r"^[a-z][a-z0-9-]{0,30}$"


class SandboxNodes(Section):
    """A run of equal nodes, NAME1 … NAMEn."""

    count: int = Field(1, ge=1, le=64, description="Nodes of this kind.")
    prefix: str | None = Field(None, pattern=_NAME, description="Default: the group's name.")
    gpu_type: str | None = Field(None, description="A key of gpu_types.")
    gpus: int = Field(0, ge=0, le=64, description="GPUs of one node.")
    cpus: int = Field(16, ge=1, description="CPUs that Slurm may hand out, however many exist.")
    memory: Bytes = Field(64 * 2**30, description="Memory that Slurm counts, not reserved.")

    @model_validator(mode="after")
    def _typed_gpus(self) -> SandboxNodes:
        if (self.gpu_type is None) != (self.gpus == 0):
            raise ValueError("gpu_type and gpus belong together: give both or neither")
        return self


class SandboxPartition(Section):
    """A partition over some of the node groups."""

    nodes: list[str] = Field(min_length=1, description="Names of node groups.")
    default: bool = Field(False, description="Where jobs go that name no partition.")
    priority_tier: int = Field(1, ge=1, le=65533, description="A higher tier preempts a lower.")
    preempt_mode: Literal["REQUEUE", "CANCEL", "OFF"] = Field(
        "OFF", description="What happens to this partition's jobs when a higher tier wants nodes."
    )
    grace: Seconds = Field(0.0, description="Warning before a preempted job ends.")
    max_time: Seconds | None = Field(None, description="None: unlimited.")
    qos: str | None = Field(
        None, description="A key of qos: what the site file says our jobs there ask for."
    )


class SandboxQos(Section):
    """A quality of service; with any, Slurm preempts by QOS and no longer by partition."""

    preempts: list[str] = Field(default_factory=list, description="Keys of qos.")
    preempt_mode: Literal["REQUEUE", "CANCEL"] = Field(
        "REQUEUE", description="What happens to its jobs when another QOS preempts them."
    )
    grace: Seconds = Field(0.0, description="Warning before a preempted job ends.")
    priority: int = Field(0, ge=0, le=10**6, description="A higher one is scheduled first.")


class SandboxGpu(Section):
    """A virtual GPU type, as written to the site file."""

    memory: Bytes = Field(2**30, description="What weights and KV cache must fit in.")
    speed: float = Field(1.0, gt=0, le=1, description="1 adds nothing; 0.5 takes twice as long.")
    memory_bandwidth: BytesPerS = Field(20e9, description="For the planner.")
    flops: FlopsPerS = Field(1e11, description="FLOP/s, for the planner.")
    link_bandwidth: BytesPerS = Field(5e9, description="Between GPUs of one node.")


class SandboxConfig(Section):
    """A private Slurm on one machine."""

    nodes: dict[str, SandboxNodes] = Field(min_length=1)
    partitions: dict[str, SandboxPartition] = Field(min_length=1)
    gpu_types: dict[str, SandboxGpu] = Field(default_factory=dict)
    qos: dict[str, SandboxQos] = Field(
        default_factory=dict,
        description="Needs Debian's slurmdbd and mariadb-server-core: a database of its own.",
    )
    head_partition: str | None = Field(None, description="Where the head runs; never preempted.")
    switches: dict[Annotated[str, Field(pattern=_NAME)], list[str]] = Field(
        default_factory=dict,
        description="Leaf switches and their nodes, as leaf1: [a100n1, l40n1]; all or no nodes.",
    )
    kill_wait: Seconds = Field(5.0, ge=1, description="From SIGTERM to SIGKILL.")
    requeue_delay: Seconds = Field(
        5.0, ge=5, description="A requeued job waits at least this; Slurm takes no less than 5 s."
    )
    min_job_age: Seconds = Field(600.0, ge=2, description="Ended jobs stay visible this long.")
    slurmd_timeout: Seconds = Field(60.0, ge=10, description="Silence that makes a node DOWN.")
    network: Literal["host", "namespaces"] = Field(
        "host",
        description=(
            "host: all nodes share this machine's network. namespaces: each node is a host of its "
            "own, with a name, an address and a link that can be cut; needs root."
        ),
    )
    slurm_conf: list[str] = Field(default_factory=list, description="Further slurm.conf lines.")
    plugstack: list[str] = Field(default_factory=list, description="Lines of plugstack.conf.")
    job_submit_lua: str | None = Field(
        None, description="A job_submit.lua for slurmctld; a path, relative to where `up` runs."
    )
    cli_filter_lua: str | None = Field(
        None, description="A cli_filter.lua for sbatch, salloc and srun; a path, as above."
    )

    @model_validator(mode="after")
    def _names_fit(self) -> SandboxConfig:
        for name, partition in self.partitions.items():
            _all_known(f"partition '{name}'", partition.nodes, list(self.nodes), "node group")
        for name, group in self.nodes.items():
            if group.gpu_type is not None:
                _all_known(
                    f"node group '{name}'", [group.gpu_type], list(self.gpu_types), "GPU type"
                )
        for name, qos in self.qos.items():
            _all_known(f"qos '{name}'", qos.preempts, list(self.qos), "QOS")
        for name, partition in self.partitions.items():
            if partition.qos is not None:
                _all_known(f"partition '{name}'", [partition.qos], list(self.qos), "QOS")
        if self.head_partition is not None:
            _all_known("head_partition", [self.head_partition], list(self.partitions), "partition")
        names = [node for group in self.nodes for node in self.node_names(group)]
        if len(names) != len(set(names)):
            raise ValueError("two node groups give the same node names")
        self._check_switches(names)
        if sum(partition.default for partition in self.partitions.values()) > 1:
            raise ValueError("more than one partition is the default")
        return self

    def _check_switches(self, nodes: list[str]) -> None:
        """Slurm reaches no node that is on no switch, and a node has one place in the tree."""
        on = [node for leaf in self.switches.values() for node in leaf]
        for leaf, named in self.switches.items():
            _all_known(f"switch '{leaf}'", named, nodes, "node")
        if len(on) != len(set(on)):
            raise ValueError("a node is on two switches")
        if on and set(on) != set(nodes):
            raise ValueError(f"on no switch: {', '.join(n for n in nodes if n not in set(on))}")

    def prefix(self, group: str) -> str:
        return self.nodes[group].prefix or group

    def node_names(self, group: str) -> list[str]:
        return [f"{self.prefix(group)}{i}" for i in range(1, self.nodes[group].count + 1)]

    def all_nodes(self) -> list[str]:
        return [node for group in self.nodes for node in self.node_names(group)]


def _all_known(where: str, names: list[str], known: list[str], kind: str) -> None:
    for name in names:
        if name not in known:
            raise ValueError(f"{where} names the {kind} '{name}'; defined: {', '.join(known)}")


def default_config() -> SandboxConfig:
    """Two GPU types on four nodes, `scavenge` preempted by `prio`, and a CPU node for the head."""
    return SandboxConfig(
        nodes={
            "a100n": SandboxNodes(count=2, gpu_type="a100", gpus=4),
            "l40n": SandboxNodes(count=2, gpu_type="l40s", gpus=2),
            "cpun": SandboxNodes(count=1),
        },
        partitions={
            "scavenge": SandboxPartition(
                nodes=["a100n", "l40n"], default=True, preempt_mode="REQUEUE", grace=15.0
            ),
            "prio": SandboxPartition(nodes=["a100n", "l40n"], priority_tier=10),
            "cpu": SandboxPartition(nodes=["cpun"]),
        },
        gpu_types={
            "a100": SandboxGpu(memory=2**30, speed=1.0),
            "l40s": SandboxGpu(
                memory=2**29, speed=0.5, memory_bandwidth=10e9, flops=5e10, link_bandwidth=2.5e9
            ),
        },
        head_partition="cpu",
    )


def load_sandbox(path: Path | None) -> SandboxConfig:
    """The file's configuration, or the default; raises ConfigError."""
    return default_config() if path is None else load_section(SandboxConfig, path)
