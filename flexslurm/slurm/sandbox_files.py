"""Rendering the files of a sandbox from its configuration; pure, writes nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flexslurm.slurm.sandbox_config import SandboxConfig
from flexslurm.slurm.sandbox_network import SandboxNetwork

# sun_path holds 108 bytes with its end; slurmstepd's sockets have the longest names.
_SOCKET_LIMIT = 107
_LONGEST_STEP = "_4294967294.4294967294.4294967294"

PLAIN_ACCOUNTING = (
    "AccountingStorageType=accounting_storage/none",
    "PreemptType=preempt/partition_prio",
)
"""What slurm.conf says where there are no QOS."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a sandbox keeps its things; `run` holds the sockets and needs a short path."""

    home: Path
    run: Path

    @property
    def conf(self) -> Path:
        return self.home / "slurm.conf"

    @property
    def gres(self) -> Path:
        return self.home / "gres.conf"

    @property
    def topology(self) -> Path:
        return self.home / "topology.conf"

    @property
    def plugstack(self) -> Path:
        return self.home / "plugstack.conf"

    @property
    def state_file(self) -> Path:
        return self.home / "sandbox.json"

    @property
    def log(self) -> Path:
        return self.home / "log"

    @property
    def save(self) -> Path:
        return self.home / "state"

    @property
    def site(self) -> Path:
        return self.home / "site.yaml"

    @property
    def munge_key(self) -> Path:
        return self.home / "munge.key"

    @property
    def munge_seed(self) -> Path:
        return self.home / "munge.seed"

    @property
    def munge_socket(self) -> Path:
        return self.run / "munge"

    def spool(self, node: str) -> Path:
        return self.run / node

    def device(self, node: str, index: int) -> Path:
        return self.home / "dev" / node / f"gpu{index}"


def sockets_fit(run: Path, nodes: Sequence[str]) -> bool:
    """Whether the longest socket name below `run` is one that the system takes."""
    longest = max((len(node) for node in nodes), default=0)
    step = len(os.fsencode(run)) + 1 + longest + 1 + longest + len(_LONGEST_STEP)
    return step <= _SOCKET_LIMIT


def slurm_conf(
    config: SandboxConfig,
    layout: Layout,
    ports: Mapping[str, int],
    host: str,
    user: str,
    network: SandboxNetwork | None = None,
    accounting: Sequence[str] = PLAIN_ACCOUNTING,
) -> str:
    """slurm.conf; `ports` maps `slurmctld` and each node's name to its port."""
    controller = "127.0.0.1" if network is None else network.controller
    lines = [
        "ClusterName=sandbox",
        f"SlurmctldHost={host}({controller})",
        f"SlurmctldPort={ports['slurmctld']}",
        f"SlurmUser={user}",
        f"SlurmdUser={user}",
        "AuthType=auth/munge",
        "CredType=cred/munge",
        # A requeued job waits for its old credential to expire: two minutes by default.
        f"AuthInfo=socket={layout.munge_socket},cred_expire={round(config.requeue_delay)}",
        f"StateSaveLocation={layout.save}",
        f"SlurmdSpoolDir={layout.run}/%n",
        f"SlurmctldPidFile={layout.run}/slurmctld.pid",
        f"SlurmdPidFile={layout.run}/slurmd.%n.pid",
        f"SlurmctldLogFile={layout.log}/slurmctld.log",
        f"SlurmdLogFile={layout.log}/slurmd.%n.log",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "JobAcctGatherType=jobacct_gather/none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_CPU",
        "SwitchType=switch/none",
        "MpiDefault=none",
        "MailProg=/bin/true",
        "ReturnToService=2",
        "SlurmdParameters=config_overrides",
        "SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0",
        "PriorityType=priority/basic",
        "PreemptMode=REQUEUE",
        "JobRequeue=1",
        f"KillWait={round(config.kill_wait)}",
        f"MinJobAge={round(config.min_job_age)}",
        f"SlurmdTimeout={round(config.slurmd_timeout)}",
        "MessageTimeout=10",
        "EpilogMsgTime=0",
        "GresTypes=gpu",
    ]
    lines += [*accounting, *_plugin_lines(config, layout), *config.slurm_conf]
    lines += [_node_line(config, group, ports, host, network) for group in config.nodes]
    lines += [_partition_line(config, name) for name in config.partitions]
    return "\n".join(lines) + "\n"


def _plugin_lines(config: SandboxConfig, layout: Layout) -> list[str]:
    asked = {
        f"PlugStackConfig={layout.plugstack}": bool(config.plugstack),
        "JobSubmitPlugins=lua": config.job_submit_lua is not None,
        "CliFilterPlugins=cli_filter/lua": config.cli_filter_lua is not None,
        "TopologyPlugin=topology/tree": bool(config.switches),
    }
    return [line for line, wanted in asked.items() if wanted]


def _node_line(
    config: SandboxConfig,
    group: str,
    ports: Mapping[str, int],
    host: str,
    network: SandboxNetwork | None,
) -> str:
    nodes = config.nodes[group]
    gres = f" Gres=gpu:{nodes.gpu_type}:{nodes.gpus}" if nodes.gpus else ""
    rest = f"CPUs={nodes.cpus} RealMemory={nodes.memory // 2**20}{gres} State=UNKNOWN"

    def where(name: str) -> str:
        if network is None:
            return f"NodeHostname={host} NodeAddr=127.0.0.1"
        return f"NodeHostname={name} NodeAddr={network.address(name)}"

    return "\n".join(
        f"NodeName={name} {where(name)} Port={ports[name]} {rest}"
        for name in config.node_names(group)
    )


def _partition_line(config: SandboxConfig, name: str) -> str:
    partition = config.partitions[name]
    nodes = ",".join(node for group in partition.nodes for node in config.node_names(group))
    limit = (
        "INFINITE" if partition.max_time is None else str(max(1, round(partition.max_time / 60)))
    )
    return (
        f"PartitionName={name} Nodes={nodes} Default={'YES' if partition.default else 'NO'} "
        f"MaxTime={limit} State=UP PriorityTier={partition.priority_tier} "
        f"PreemptMode={partition.preempt_mode} GraceTime={round(partition.grace)}"
    )


def topology_conf(config: SandboxConfig) -> str:
    """topology.conf: the leaf switches, all of them below one."""
    leaves = [f"SwitchName={name} Nodes={','.join(on)}" for name, on in config.switches.items()]
    return "\n".join([*leaves, f"SwitchName=spine Switches={','.join(config.switches)}"]) + "\n"


def gres_conf(config: SandboxConfig, layout: Layout) -> str:
    """gres.conf; links to the null device stand for GPUs: making device nodes needs rights."""
    lines = [
        f"NodeName={node} Name=gpu Type={nodes.gpu_type} "
        f"File={layout.device(node, 0).parent}/gpu[0-{nodes.gpus - 1}]"
        for group, nodes in config.nodes.items()
        if nodes.gpus
        for node in config.node_names(group)
    ]
    return "\n".join(lines) + "\n"
