"""The GPUs an agent holds: real ones by NVML, virtual ones by the site file; changes nothing."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from flexslurm.config.site import GpuType
from flexslurm.errors import EnvironmentFault
from flexslurm.messages import GpuInfo

VARIABLE = "FLEXSLURM_VIRTUAL_MEMORY"
"""`a100-2=1000000`: virtual GPUs of this pilot have no more bytes, as if others held the rest."""
_DRIVER_SHARE = 0.05
"""Of a card, what the driver itself may hold; what is held beyond is another process's."""
_FREED_WITHIN_S = 10.0
"""What a job before us held may take so long to be free."""


def gpus_of_node(
    name: str,
    gpu_type: GpuType,
    count: int,
    env: Mapping[str, str] = os.environ,
    *,
    fragment: str = "",
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[GpuInfo, ...]:
    """This node's GPUs, `count` of them, with the memory that nobody else holds.

    Waits up to ten seconds where somebody does. Raises EnvironmentFault when the driver shows
    fewer, or when a virtual type has no memory.
    """
    if gpu_type.virtual is not None:
        if gpu_type.memory is None:
            raise EnvironmentFault(
                f"the virtual GPU type '{name}' has no memory in the site file",
                hint=f"give it gpu_types.{name}.memory",
            )
        memory = min(gpu_type.memory, _virtual_memory(env, fragment))
        return tuple(GpuInfo(i, memory, f"virtual-{name}-{i}") for i in range(count))
    found, held = _visible(env)
    for _ in range(int(_FREED_WITHIN_S)):
        if not held or gpu_type.gres is not None:  # of a shared card others hold parts
            break
        sleep(1.0)
        found, held = _visible(env)
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


def _virtual_memory(env: Mapping[str, str], fragment: str) -> int:
    for entry in filter(None, env.get(VARIABLE, "").split(",")):
        name, _, size = entry.strip().partition("=")
        if not size.isdecimal():
            raise EnvironmentFault(f"{VARIABLE}: cannot read '{entry}'", hint="write PILOT=BYTES")
        if name == fragment:
            return int(size)
    return sys.maxsize


def _visible(env: Mapping[str, str]) -> tuple[list[GpuInfo], bool]:
    """The cards, and whether others hold memory of them."""
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
            (str(pynvml.nvmlDeviceGetUUID(h)), pynvml.nvmlDeviceGetMemoryInfo(h))
            for h in _devices()
        ]
    finally:
        pynvml.nvmlShutdown()
    allowed = env.get("CUDA_VISIBLE_DEVICES")
    chosen = range(len(infos)) if not allowed else _chosen(allowed, [uuid for uuid, _ in infos])
    found = [GpuInfo(n, _at_hand(infos[i][1]), infos[i][0]) for n, i in enumerate(chosen)]
    total = sum(int(infos[i][1].total) for i in chosen)
    return found, sum(gpu.memory_bytes for gpu in found) < total


def _at_hand(memory: Any) -> int:
    """Bytes of a card that no other process holds."""
    total, used = int(memory.total), int(getattr(memory, "used", 0))
    return total if used <= total * _DRIVER_SHARE else total - used


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
