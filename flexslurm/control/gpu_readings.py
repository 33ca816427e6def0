"""What the driver says of a node's cards: load, memory, heat, errors, and what slows them down.

Reads by NVML and changes nothing. What a card does not tell is left out: a MIG slice has no load.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from flexslurm.messages import GpuInfo, GpuReading

# Bits of nvmlDeviceGetCurrentClocksEventReasons (NVML API reference): idle and set clocks slow
# nothing down.
_SLOWED = {
    0x4: "power_cap",
    0x8: "hw_slowdown",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "power_brake",
}


class GpuReader:
    """The cards of one agent; `open` once, `read` again and again, in one thread."""

    def __init__(self, cards: Sequence[GpuInfo]) -> None:
        self._cards = tuple(cards)
        self._handles: list[tuple[GpuInfo, Any]] = []

    def open(self) -> bool:
        """Whether there is a card to read; False without a driver."""
        try:
            import pynvml
        except ImportError:
            return False
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            return False
        for card in self._cards:
            handle = _told(pynvml.nvmlDeviceGetHandleByUUID, card.uuid)
            if handle is not None:
                self._handles.append((card, handle))
        return bool(self._handles)

    def read(self) -> tuple[GpuReading, ...]:
        return tuple(_reading(card, handle) for card, handle in self._handles)


def _reading(card: GpuInfo, handle: Any) -> GpuReading:
    import pynvml

    rates = _told(pynvml.nvmlDeviceGetUtilizationRates, handle)
    memory = _told(pynvml.nvmlDeviceGetMemoryInfo, handle)
    sensor, volatile = pynvml.NVML_TEMPERATURE_GPU, pynvml.NVML_VOLATILE_ECC
    milliwatts = _told(pynvml.nvmlDeviceGetPowerUsage, handle)
    kinds = {
        "corrected": pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED,
        "uncorrected": pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
    }
    errors = {
        name: _told(pynvml.nvmlDeviceGetTotalEccErrors, handle, kind, volatile)
        for name, kind in kinds.items()
    }
    reasons = _told(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
    return GpuReading(
        index=card.index,
        uuid=card.uuid,
        utilisation=None if rates is None else rates.gpu / 100,
        memory_used_bytes=None if memory is None else int(memory.used),
        memory_total_bytes=None if memory is None else int(memory.total),
        celsius=_told(pynvml.nvmlDeviceGetTemperature, handle, sensor),
        watts=None if milliwatts is None else milliwatts / 1000,
        ecc_errors={name: int(count) for name, count in errors.items() if count is not None},
        slowed_by=None
        if reasons is None
        else tuple(name for bit, name in _SLOWED.items() if reasons & bit),
    )


def _told(ask: Callable[..., Any], *about: Any) -> Any:
    """The driver's answer; None where it has none."""
    import pynvml

    try:
        return ask(*about)
    except pynvml.NVMLError:
        return None
