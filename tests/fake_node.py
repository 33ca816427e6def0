"""A node's hardware as tests lay it out: a tree like /sys/class/infiniband, and a driver's NVML."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def fake_port(
    sys: Path,
    device: str,
    *,
    port: int = 1,
    state: str = "4: ACTIVE",
    rate: str = "200 Gb/sec (4X HDR)",
    layer: str = "InfiniBand",
    interface: str | None = None,
    counters: Mapping[str, object] | None = None,
    hardware: Mapping[str, object] | None = None,
) -> Path:
    """Lay out one port; returns its directory."""
    place = sys / device / "ports" / str(port)
    for folder, told in (("counters", counters), ("hw_counters", hardware)):
        if told is not None:
            (place / folder).mkdir(parents=True, exist_ok=True)
            for name, value in told.items():
                (place / folder / name).write_text(f"{value}\n")
    place.mkdir(parents=True, exist_ok=True)
    for name, text in (("state", state), ("rate", rate), ("link_layer", layer)):
        (place / name).write_text(text + "\n")
    if interface is not None:
        (sys / device / "device" / "net" / interface).mkdir(parents=True)
    return place


class FakeNvml:
    """A driver with some cards; what a card's entry lacks, it does not support.

    A card: uuid, memory, and optionally slices (a list of cards), utilisation, used, celsius,
    milliwatts, corrected, uncorrected, slowed (bits).
    """

    class NVMLError(Exception):
        pass

    NVML_TEMPERATURE_GPU = 0
    NVML_VOLATILE_ECC = 0
    NVML_MEMORY_ERROR_TYPE_CORRECTED = "corrected"
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = "uncorrected"

    def __init__(self, *cards: dict[str, Any], broken: bool = False) -> None:
        self._cards, self._broken = cards, broken
        self.opened = 0

    def nvmlInit(self) -> None:
        if self._broken:
            raise self.NVMLError("Driver/library version mismatch")
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.opened -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return "550.54"

    def nvmlDeviceGetCount(self) -> int:
        return len(self._cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> dict[str, Any]:
        return self._cards[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> dict[str, Any]:
        for card in self._cards:
            for found in (card, *card.get("slices", ())):
                if found["uuid"] == uuid:
                    return dict(found)
        raise self.NVMLError("Not Found")

    def nvmlDeviceGetMigMode(self, card: dict[str, Any]) -> tuple[int, int]:
        if "slices" not in card:
            raise self.NVMLError("Not Supported")
        return (1, 1)

    def nvmlDeviceGetMaxMigDeviceCount(self, card: dict[str, Any]) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(
        self, card: dict[str, Any], index: int
    ) -> dict[str, Any]:
        if index >= len(card["slices"]):
            raise self.NVMLError("Not Found")
        return dict(card["slices"][index])

    def nvmlDeviceGetUUID(self, card: dict[str, Any]) -> str:
        return str(card["uuid"])

    def nvmlDeviceGetName(self, card: dict[str, Any]) -> str:
        return str(card.get("name", "NVIDIA A100"))

    def nvmlDeviceGetMemoryInfo(self, card: dict[str, Any]) -> SimpleNamespace:
        used = card.get("used", 0)
        return SimpleNamespace(total=card["memory"], used=used, free=card["memory"] - used)

    def nvmlDeviceGetUtilizationRates(self, card: dict[str, Any]) -> SimpleNamespace:
        return SimpleNamespace(gpu=self._has(card, "utilisation"), memory=0)

    def nvmlDeviceGetTemperature(self, card: dict[str, Any], sensor: int) -> int:
        return int(self._has(card, "celsius"))

    def nvmlDeviceGetPowerUsage(self, card: dict[str, Any]) -> int:
        return int(self._has(card, "milliwatts"))

    def nvmlDeviceGetTotalEccErrors(self, card: dict[str, Any], kind: str, counter: int) -> int:
        return int(self._has(card, kind))

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, card: dict[str, Any]) -> int:
        return int(self._has(card, "slowed"))

    def _has(self, card: dict[str, Any], key: str) -> Any:
        if key not in card:
            raise self.NVMLError("Not Supported")
        return card[key]
