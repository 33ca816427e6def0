"""The GPUs an agent holds: real ones by NVML, virtual ones by the site file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from flexslurm.config.site import GpuType
from flexslurm.errors import EnvironmentFault
from flexslurm.messages import GpuInfo


def gpus_of_node(
    name: str, gpu_type: GpuType, count: int, env: Mapping[str, str] = os.environ
) -> tuple[GpuInfo, ...]:
    """This node's GPUs, `count` of them.

    Raises EnvironmentFault when the driver shows fewer, or when a virtual type has no memory.
    """
    if gpu_type.virtual is not None:
        if gpu_type.memory is None:
            raise EnvironmentFault(f"the virtual GPU type '{name}' has no memory in the site file")
        return tuple(GpuInfo(i, gpu_type.memory, f"virtual-{name}-{i}") for i in range(count))
    found = _visible(env)
    if len(found) < count:
        raise EnvironmentFault(
            f"{count} {name} GPUs are to be used, but the driver shows {len(found)}",
            hint="was the job given them (--gpus, --gres)? see nvidia-smi on the node",
        )
    return tuple(_within(gpu, gpu_type) for gpu in found[:count])


def _within(gpu: GpuInfo, gpu_type: GpuType) -> GpuInfo:
    """Of a shared card no more than the share that the site file gives it."""
    if gpu_type.memory is None or gpu_type.gres is None:
        return gpu
    share = min(gpu.memory_bytes, gpu_type.memory)
    return GpuInfo(gpu.index, share, gpu.uuid)


def _visible(env: Mapping[str, str]) -> list[GpuInfo]:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise EnvironmentFault(
            f"the NVIDIA driver does not answer: {error}",
            hint="a GPU type without a card needs 'virtual:' in the site file",
        ) from None
    try:
        infos = [
            (str(pynvml.nvmlDeviceGetUUID(h)), int(pynvml.nvmlDeviceGetMemoryInfo(h).total))
            for h in _devices()
        ]
    finally:
        pynvml.nvmlShutdown()
    allowed = env.get("CUDA_VISIBLE_DEVICES")
    chosen = range(len(infos)) if not allowed else _chosen(allowed, [uuid for uuid, _ in infos])
    return [GpuInfo(n, infos[i][1], infos[i][0]) for n, i in enumerate(chosen)]


def _devices() -> list[Any]:
    """Handles of what a process can use: cards, or the slices of those that are cut (MIG)."""
    import pynvml

    found: list[Any] = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        card = pynvml.nvmlDeviceGetHandleByIndex(index)
        try:
            cut, _ = pynvml.nvmlDeviceGetMigMode(card)
        except pynvml.NVMLError:  # a card that cannot be cut
            cut = 0
        if not cut:
            found.append(card)
            continue
        for number in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(card)):
            try:
                found.append(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(card, number))
            except pynvml.NVMLError:  # no slice there, or it is not ours
                continue
    return found


def _chosen(allowed: str, uuids: list[str]) -> list[int]:
    """Positions named by CUDA_VISIBLE_DEVICES: indexes or starts of UUIDs, to the first bad."""
    chosen: list[int] = []
    for item in allowed.split(","):
        word = item.strip()
        if word.isdecimal() and int(word) < len(uuids):
            chosen.append(int(word))
            continue
        match = [i for i, uuid in enumerate(uuids) if word and uuid.startswith(word)]
        if not match:
            break
        chosen.append(match[0])
    return chosen
