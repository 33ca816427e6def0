"""A site file from what a cluster says of itself; pure, asks and writes nothing.

What Slurm does not know (figures of a card, the shared directory) is left to the defaults or noted
for the admin in the file's head. Promises are taken low: where Slurm's words leave it open whether
a partition is preempted, it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from flexslurm.config.units import TIME
from flexslurm.errors import SlurmError
from flexslurm.slurm.client import NodeInfo, PartitionInfo
from flexslurm.slurm.discover_gpus import FindCard, GpuKinds, gpu_kinds
from flexslurm.slurm.fabric import FabricPort, rails
from flexslurm.slurm.sandbox_config import SandboxConfig
from flexslurm.slurm.sandbox_site import virtual_gpu
from flexslurm.slurm.times import told_duration
from flexslurm.slurm.window import PreemptionWindow, slurm_window

_MOST_CPUS_PER_GPU = 8


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """What was found out about a cluster."""

    nodes: tuple[NodeInfo, ...]
    partitions: tuple[PartitionInfo, ...]
    config: Mapping[str, str]
    qos: tuple[QosInfo, ...] = ()
    fabric: tuple[FabricPort, ...] = ()
    """Of this machine."""
    switches: tuple[str, ...] = ()
    conf: str | None = None
    """SLURM_CONF, where it must be named."""
    commands: Mapping[str, str] = field(default_factory=dict)
    cluster: str | None = None
    sandbox: SandboxConfig | None = None
    """Set: the cluster is a sandbox, whose GPUs are virtual."""


@dataclass(frozen=True, slots=True)
class QosInfo:
    """A QOS as `sacctmgr show qos` tells it."""

    name: str
    grace_s: float
    preempt_mode: str
    preempts: tuple[str, ...]
    exempt_s: float = 0.0


def parse_qos(text: str) -> list[QosInfo]:
    """Rows `name|gracetime|preemptmode|preempt|preemptexempttime`; others are left out."""
    found = []
    for line in text.splitlines():
        cells = line.split("|")
        if len(cells) >= 5 and cells[0]:
            found.append(
                QosInfo(
                    cells[0],
                    told_duration(cells[1]) or 0.0 if ":" in cells[1] else _number(cells[1]),
                    cells[2].upper(),
                    tuple(name for name in cells[3].split(",") if name),
                    told_duration(cells[4]) or 0.0,
                )
            )
    return found


def _number(text: str) -> float:
    return float(text) if text.isascii() and text.isdigit() else 0.0


@dataclass(slots=True)
class _Draft:
    data: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def site_text(facts: ClusterFacts, find_card: FindCard) -> str:
    """The file. Raises SlurmError where there is no GPU to be asked for."""
    draft = _Draft()
    name = facts.config.get("ClusterName", "cluster") or "cluster"
    draft.data["name"] = name
    draft.data["slurm"] = _slurm(facts)
    gpus = gpu_kinds(facts.nodes, find_card, _virtual(facts))
    if not gpus.kinds:
        raise SlurmError(
            f"Slurm shows no GPUs on {len(facts.nodes)} nodes",
            hint="is Gres=gpu:TYPE:N on the NodeName lines of slurm.conf? see scontrol show node",
        )
    draft.data["gpu_types"] = {kind.name: kind.entry for kind in gpus.kinds}
    draft.notes += gpus.notes
    draft.data["partitions"] = _partitions(facts, gpus, draft)
    head = _head(facts, draft.data["partitions"], draft)
    if head is not None:
        draft.data["head"] = head
    network = _network(facts, draft)
    if network:
        draft.data["network"] = network
    if facts.switches:
        draft.notes.append("switches: " + "; ".join(facts.switches))
    lines = [f"# Written by `flexslurm site discover` from the Slurm cluster '{name}'."]
    lines += [f"# - {note}" for note in draft.notes]
    return "\n".join(lines) + "\n" + yaml.safe_dump(draft.data, sort_keys=False, width=100)


# ---------------------------------------------------------------------------------- the parts


def _slurm(facts: ClusterFacts) -> dict[str, Any]:
    kill_wait = re.match(r"\d+", facts.config.get("KillWait", ""))
    data: dict[str, Any] = {"kill_wait": TIME.show(float(kill_wait[0]) if kill_wait else 30.0)}
    if facts.sandbox is not None:
        data["poll_interval"] = "1s"
    if facts.conf is not None:
        data["conf"] = facts.conf
    if facts.cluster is not None:
        data["cluster"] = facts.cluster
    if facts.commands:
        data["commands"] = dict(facts.commands)
    return data


def _virtual(facts: ClusterFacts) -> dict[str, dict[str, Any]]:
    """Entries of a sandbox's GPU types."""
    types = {} if facts.sandbox is None else facts.sandbox.gpu_types
    return {name: virtual_gpu(gpu) for name, gpu in types.items()}


def _partitions(facts: ClusterFacts, gpus: GpuKinds, draft: _Draft) -> dict[str, Any]:
    by_name = {node.name: node for node in facts.nodes}
    found: dict[str, Any] = {}
    for info in facts.partitions:
        if not info.up:
            draft.notes.append(f"partition {info.name}: left out, it is not up")
            continue
        members = [by_name[name] for name in info.nodes if name in by_name]
        window = window_of(info, facts)
        if by_qos(facts.config):
            draft.notes.append(
                f"partition {info.name}: preempted by QOS; set its 'qos', and 'preemptible: false' "
                "if that one is not preempted"
            )
        found[info.name] = _partition(info, members, gpus, window)
    return found


def by_qos(config: Mapping[str, str]) -> bool:
    """Whether a QOS, and not the partition, says who preempts whom."""
    return config.get("PreemptType", "") == "preempt/qos"


def window_of(
    info: PartitionInfo, facts: ClusterFacts, qos_name: str | None = None
) -> PreemptionWindow:
    """A partition's window; with preemption by QOS that QOS's, or the least that any gives."""
    window = slurm_window(info, facts.partitions, facts.config)
    if not by_qos(facts.config):
        return window
    preempted = {name for qos in facts.qos for name in qos.preempts}
    below = [q for q in facts.qos if q.name in preempted and qos_name in (None, q.name)]
    cluster_mode = facts.config.get("PreemptMode", "").upper()
    modes = {
        qos.preempt_mode if qos.preempt_mode not in ("", "CLUSTER") else cluster_mode
        for qos in below
    } or {cluster_mode}
    return PreemptionWindow(
        partition=info.name,
        preemptible=bool(below) or qos_name is None,
        grace_s=min((qos.grace_s for qos in below), default=0.0),
        kill_wait_s=window.kill_wait_s,
        exempt_s=min((qos.exempt_s for qos in below), default=window.exempt_s),
        requeued=all("REQUEUE" in mode for mode in modes),
        user_signal=window.user_signal,
    )


def _partition(
    info: PartitionInfo,
    members: Sequence[NodeInfo],
    gpus: GpuKinds,
    window: PreemptionWindow,
) -> dict[str, Any]:
    there = [gpus.on(node) for node in members]
    types = sorted({name for counts in there for name in counts})
    data: dict[str, Any] = {"gpu_types": types, "preemptible": window.preemptible}
    if types:
        totals = [sum(counts.values()) for counts in there]
        data["gpus_per_node"] = max(totals)
        shares = [node.cpus // n for node, n in zip(members, totals, strict=True) if n]
        data["cpus_per_gpu"] = max(1, min(_MOST_CPUS_PER_GPU, *shares))
    if window.preemptible:
        data["requeue"] = window.requeued
        data["grace"] = TIME.show(window.grace_s)
        if window.exempt_s:
            data["exempt"] = TIME.show(window.exempt_s)
    if info.default_time_s is not None:
        data["default_walltime"] = TIME.show(info.default_time_s)
    if info.max_time_s is not None:
        data["max_walltime"] = TIME.show(info.max_time_s)
    return data


def _head(
    facts: ClusterFacts, partitions: Mapping[str, Mapping[str, Any]], draft: _Draft
) -> dict[str, Any] | None:
    """A partition that is not preempted; one without GPUs first."""
    safe = [name for name, entry in partitions.items() if not entry["preemptible"]]
    safe.sort(key=lambda name: bool(partitions[name]["gpu_types"]))
    if not safe:
        draft.notes.append(
            "head: no partition is safe from preemption; launch with --head here, or name one"
        )
        return None
    data: dict[str, Any] = {"partition": safe[0]}
    if facts.sandbox is not None:
        data |= {"cpus": 2, "memory": "1GiB"}
    return data


def _network(facts: ClusterFacts, draft: _Draft) -> dict[str, Any]:
    addresses = {node.address for node in facts.nodes}
    if addresses and all(address.startswith("127.") for address in addresses):
        return {"interface": "lo", "node_link": {"bandwidth": "1GB/s", "latency": "50us"}}
    found = rails(facts.fabric)
    if not found:
        draft.notes.append("network: no InfiniBand on this machine; see network.interface, suffix")
        return {}
    draft.notes.append("network: as on this machine; nodes with GPUs may have more rails")
    link: dict[str, Any] = {"latency": "3us", "rails": len(found)}
    rate = found[0].gbit_per_s
    link["bandwidth"] = f"{rate or 100:g}Gbit/s"
    data: dict[str, Any] = {"node_link": link}
    data["nccl_env"] = {"NCCL_IB_HCA": "=" + ",".join(f"{p.device}:{p.port}" for p in found)}
    interface = next((port.interface for port in found if port.interface), None)
    if interface is not None:
        data["interface"] = interface
        data["nccl_env"]["NCCL_SOCKET_IFNAME"] = f"={interface}"
    return data
