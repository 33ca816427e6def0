"""The site file that matches a sandbox: its partitions, with virtual GPUs; pure text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from flexslurm.config.units import COMPUTE, RATE, SIZE, TIME
from flexslurm.slurm.sandbox_config import SandboxConfig, SandboxGpu, SandboxPartition
from flexslurm.slurm.sandbox_network import INTERFACE

_HEADER = "# The cluster that `flexslurm sandbox up` brings up, with virtual GPUs.\n"


def site_yaml(config: SandboxConfig, conf: Path | None) -> str:
    """A site file; without `conf` it reaches the Slurm that SLURM_CONF in the environment names."""
    slurm: dict[str, Any] = {"poll_interval": "1s", "kill_wait": TIME.show(config.kill_wait)}
    if conf is not None:
        slurm = {"conf": str(conf), **slurm}
    data: dict[str, Any] = {
        "name": "sandbox",
        "slurm": slurm,
        "gpu_types": {name: virtual_gpu(gpu) for name, gpu in config.gpu_types.items()},
        "partitions": {
            name: _partition(config, partition) for name, partition in config.partitions.items()
        },
        "head": {"cpus": 2, "memory": "1GiB"},
        # without namespaces all nodes are this machine
        "network": {
            "interface": "lo" if config.network == "host" else INTERFACE,
            "node_link": {"bandwidth": "1GB/s", "latency": "50us"},
        },
    }
    if config.head_partition is not None:
        data["head"]["partition"] = config.head_partition
    return _HEADER + yaml.safe_dump(data, sort_keys=False, width=100)


def virtual_gpu(gpu: SandboxGpu) -> dict[str, Any]:
    """A GPU type as it stands in the site file."""
    return {
        "memory": SIZE.show(gpu.memory),
        "memory_bandwidth": RATE.show(gpu.memory_bandwidth),
        "flops": COMPUTE.show(gpu.flops),
        "gpu_link": {"bandwidth": RATE.show(gpu.link_bandwidth), "latency": "10us"},
        "virtual": {"pacing": "as-it-comes", "speed": gpu.speed},
    }


def _partition(config: SandboxConfig, partition: SandboxPartition) -> dict[str, Any]:
    groups = [config.nodes[group] for group in partition.nodes]
    types = [group.gpu_type for group in groups if group.gpu_type is not None]
    data: dict[str, Any] = {"gpu_types": list(dict.fromkeys(types))}
    if types:
        data["gpus_per_node"] = max(group.gpus for group in groups)
    preemptible = _preempted(config, partition)
    data["preemptible"] = preemptible
    qos = config.qos.get(partition.qos or "")
    if qos is not None:
        data["qos"] = partition.qos
    if preemptible:
        taken = partition if qos is None else qos
        data["requeue"] = taken.preempt_mode == "REQUEUE"
        data["grace"] = TIME.show(taken.grace)
    if partition.max_time is not None:
        data["max_walltime"] = TIME.show(partition.max_time)
    return data


def _preempted(config: SandboxConfig, partition: SandboxPartition) -> bool:
    """Whether another QOS, or a higher tier that shares nodes with it, may take its jobs."""
    if config.qos:
        return any(partition.qos in other.preempts for other in config.qos.values())
    return partition.preempt_mode != "OFF" and any(
        other.priority_tier > partition.priority_tier and set(other.nodes) & set(partition.nodes)
        for other in config.partitions.values()
    )
