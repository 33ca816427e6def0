"""The site file: what a cluster is made of. An admin writes it once; see site-configs/README.md."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from flexslurm.config.schema import Name, Section, misfit, nearest_hint
from flexslurm.config.units import Bytes, BytesPerS, FlopsPerS, Seconds


def _variable(word: str) -> str:
    if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", word) is None:
        raise ValueError(f"'{word}' is no name of a variable")
    return word


def _env_text(text: str) -> str:
    if "\0" in text:
        raise ValueError("a variable cannot hold the character U+0000")
    return text


def _option(text: str) -> str:
    if not text.startswith("-") or any(char in text for char in "\n\0"):
        raise ValueError(f"{text!r} is no option of sbatch: write --name or --name=value")
    return text


def _gres(text: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9][\w.-]{0,63}(:[A-Za-z0-9][\w.-]{0,63})?", text, re.ASCII) is None:
        raise ValueError(
            f"'{text}' cannot be asked for with --gres: write what stands before the count, as "
            "gpu:a100_1g.10gb, gpu or shard"
        )
    return text


def _gres_type(text: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9][\w.-]{0,63}", text, re.ASCII) is None:
        raise ValueError(f"'{text}' cannot be a type of a GRES: see sinfo -o '%N %G'")
    return text


def _subnet(text: str) -> str:
    try:
        ipaddress.ip_network(text, strict=False)
    except ValueError:
        raise ValueError(f"'{text}' is no subnet: write 10.1.0.0/16") from None
    return text


Variable = Annotated[str, AfterValidator(_variable)]
EnvText = Annotated[str, AfterValidator(_env_text)]
SbatchOption = Annotated[str, AfterValidator(_option)]
GresName = Annotated[str, AfterValidator(_gres)]
GresType = Annotated[str, AfterValidator(_gres_type)]
Subnet = Annotated[str, AfterValidator(_subnet)]
COMMANDS = (
    "sbatch", "srun", "squeue", "scancel", "scontrol", "sacctmgr", "strigger", "salloc", "sinfo",
    "sacct",
)  # fmt: skip
"""Of Slurm, that a site may have under other names; not all are used."""


class LinkFigures(Section):
    """A link between GPUs or nodes."""

    bandwidth: BytesPerS = Field(description="Bytes per second in one direction.")
    latency: Seconds = Field(5e-6, description="Time of an empty message.")
    rails: int = Field(1, ge=1, description="Equal links side by side, as InfiniBand rails.")


class VirtualGpu(Section):
    """A GPU played by a CPU process: real messages, groups and moves, no card."""

    pacing: Literal["as-it-comes", "acted"] = Field(
        "as-it-comes",
        description=(
            "as-it-comes: a step takes its CPU time divided by `speed`. acted: a step takes the "
            "time that this type's figures give for `acts_model`."
        ),
    )
    speed: float = Field(1.0, gt=0, le=1, description="1 adds nothing; 0.5 takes twice as long.")
    acts_model: str | None = Field(
        None,
        description=(
            "acted: the larger model whose timing is acted out: a checkpoint directory, a "
            "config.json or the name of a built-in published configuration."
        ),
    )

    @model_validator(mode="after")
    def _acted_names_a_model(self) -> VirtualGpu:
        if self.pacing == "acted" and self.acts_model is None:
            raise misfit(
                "pacing 'acted' needs acts_model: the model whose timing is acted", "pacing"
            )
        return self


class GpuType(Section):
    """One type of GPU. Figures that are left out come from the built-in catalogue by `model`."""

    model: str | None = Field(None, description="Name in the built-in catalogue, such as a100-80.")
    slurm_type: GresType | None = Field(
        None, description="The type in Slurm's GRES (gpu:TYPE:N); default: this entry's name."
    )
    gres: GresName | None = Field(
        None,
        description=(
            "What stands before the count in --gres, where it is not gpu:TYPE: shard, or gpu for "
            "GPUs without a type. slurm_type then says nothing."
        ),
    )
    gres_per_gpu: int = Field(
        1, ge=1, description="How many of it one GPU is: for shards, those of a card's share."
    )
    memory: Bytes | None = Field(None, description="Bytes of device memory.")
    memory_bandwidth: BytesPerS | None = Field(None, description="Bytes per second.")
    flops: FlopsPerS | None = Field(None, description="Dense FLOP/s in the serving dtype.")
    gpu_link: LinkFigures | None = Field(None, description="Between GPUs of one node.")
    virtual: VirtualGpu | None = Field(None, description="Set: no card, a CPU process plays it.")


class Partition(Section):
    """A Slurm partition flexslurm may submit to."""

    gpu_types: list[str] = Field(default_factory=list, description="Types found in it.")
    gpus_per_node: int | None = Field(None, ge=1, description="Most GPUs of one node.")
    preemptible: bool = Field(True, description="Whether Slurm may take jobs here.")
    requeue: bool = Field(True, description="Whether a preempted job is requeued (else cancelled).")
    grace: Seconds = Field(0.0, description="GraceTime: warning before a preempted job ends.")
    kill_wait: Seconds | None = Field(None, description="Overrides the site's kill_wait.")
    exempt: Seconds = Field(0.0, description="PreemptExemptTime: the run that is guaranteed.")
    default_walltime: Seconds | None = Field(None, description="Asked for when a pool says none.")
    max_walltime: Seconds | None = Field(None, description="None: unlimited.")
    account: str | None = Field(None, description="Passed as --account.")
    qos: str | None = Field(None, description="Passed as --qos.")
    constraint: str | None = Field(None, description="Passed as --constraint.")
    cpus_per_gpu: int = Field(1, ge=1, description="CPUs asked for with each GPU.")
    sbatch_args: list[SbatchOption] = Field(
        default_factory=list, description="Further options for sbatch, such as --comment=preempt."
    )


class RestSettings(Section):
    """slurmrestd, asked for the states of jobs in place of squeue."""

    url: str = Field(
        pattern=r"^https?://[^/]+/slurm/v[0-9.]+$",
        description="With the version to speak, as http://ctl:6820/slurm/v0.0.40.",
    )
    user: str | None = Field(None, description="X-SLURM-USER-NAME; default: who runs the head.")
    token_file: str | None = Field(
        None, description="File with a token (scontrol token), read again for every question."
    )


class SlurmSettings(Section):
    """How to talk to this cluster's Slurm."""

    commands: dict[str, str] = Field(
        default_factory=dict, description="Other names of commands, such as sbatch: sbatch.tinygpu."
    )
    cluster: str | None = Field(None, description="Passed as --clusters.")
    conf: str | None = Field(None, description="SLURM_CONF, where it is not the default.")
    poll_interval: Seconds = Field(
        5.0, gt=0.05, description="Between looks at all jobs in one call."
    )
    command_timeout: Seconds = Field(30.0, gt=0, description="Deadline of one Slurm command.")
    kill_wait: Seconds = Field(30.0, description="KillWait: from SIGTERM to SIGKILL.")
    rest: RestSettings | None = Field(None, description="slurmrestd; without it squeue is asked.")

    @model_validator(mode="after")
    def _commands_are_slurm_s(self) -> SlurmSettings:
        for name in self.commands:
            if name not in COMMANDS:
                hint = nearest_hint(name, COMMANDS)
                raise misfit(f"Slurm has no command '{name}'", "commands", name, hint=hint)
        return self

    topology: str | None = Field(
        None,
        description="A topology.conf, for its leaf switches; default: scontrol show topology.",
    )


class HeadSettings(Section):
    """Where the head (controller and API server) runs when launched as a job."""

    partition: str | None = Field(None, description="A partition that is not preempted.")
    cpus: int = Field(2, ge=1, description="CPUs of the head's job.")
    memory: Bytes = Field(4 * 2**30, description="Memory of the head's job.")
    walltime: Seconds | None = Field(None, description="Default: the partition's.")
    sbatch_args: list[SbatchOption] = Field(
        default_factory=list,
        description="Further options for sbatch; account, qos and constraint are the partition's.",
    )


class NetworkSettings(Section):
    """Which address other nodes reach a node at, and how fast it is."""

    interface: str | None = Field(None, description="Interface whose address is used, as ib0.")
    suffix: str | None = Field(None, description="Host-name suffix of the fast network, as -hsn0.")
    subnet: Subnet | None = Field(None, description="Use the address in this subnet, 10.1.0.0/16.")
    node_link: LinkFigures = Field(
        default_factory=lambda: LinkFigures(bandwidth=12.5e9, latency=5e-6),
        description="Between two nodes.",
    )
    nccl_env: dict[Variable, EnvText] = Field(
        default_factory=dict, description="NCCL_* for the workers."
    )


class MeasuredSettings(Section):
    """What was measured here; it takes the place of figures and formulas when gears are planned."""

    profiles: str | None = Field(
        None, description="A CSV of `flexslurm profile`, or a directory of them, as profiles/."
    )
    links: str | None = Field(
        None, description="The CSV of `flexslurm probe`, as links.csv; it wins over node_link."
    )


class PathSettings(Section):
    """Directories."""

    shared_dir: str | None = Field(None, description="Shared directory for service state.")


class Site(Section):
    """A cluster."""

    name: str = Field(description="A word for the cluster, for messages.")
    gpu_types: dict[Name, GpuType] = Field(min_length=1)
    partitions: dict[Name, Partition] = Field(default_factory=dict)
    slurm: SlurmSettings = Field(default_factory=SlurmSettings)
    head: HeadSettings = Field(default_factory=HeadSettings)
    network: NetworkSettings = Field(default_factory=NetworkSettings)
    measured: MeasuredSettings = Field(default_factory=MeasuredSettings)
    paths: PathSettings = Field(default_factory=PathSettings)
    setup: list[str] = Field(
        default_factory=list, description="Shell lines before our process, as module load cuda."
    )
    env: dict[Variable, EnvText] = Field(
        default_factory=dict, description="Environment of our processes."
    )

    @model_validator(mode="after")
    def _partitions_name_known_types(self) -> Site:
        for name, partition in self.partitions.items():
            for index, gpu_type in enumerate(partition.gpu_types):
                if gpu_type not in self.gpu_types:
                    raise misfit(
                        f"gpu_types above does not define '{gpu_type}'",
                        "partitions", name, "gpu_types", index,
                        hint=nearest_hint(gpu_type, list(self.gpu_types)),
                    )  # fmt: skip
        return self

    def kill_wait_s(self, partition: str) -> float:
        entry = self.partitions.get(partition)
        own = entry.kill_wait if entry is not None else None
        return self.slurm.kill_wait if own is None else own
