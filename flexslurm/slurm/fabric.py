"""InfiniBand and RoCE ports as the kernel shows them below /sys; changes nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

SYS = Path("/sys/class/infiniband")
_RATE = re.compile(r"^([\d.]+)\s*Gb/sec", re.ASCII)
# Counters whose growth means a bad cable or port, not congestion.
_ERRORS = (
    "symbol_error", "link_downed", "link_error_recovery", "port_rcv_errors",
    "local_link_integrity_errors",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class FabricPort:
    """One port of a host channel adapter."""

    device: str
    port: int
    active: bool
    gbit_per_s: float
    """0 where the kernel does not say."""
    infiniband: bool
    """False: Ethernet (RoCE)."""
    interface: str | None = None
    errors: dict[str, int] = field(default_factory=dict)
    """Error counters that are not 0."""


def fabric_ports(sys: Path = SYS) -> list[FabricPort]:
    """All ports, by device and number; none where there is no such hardware."""
    if not sys.is_dir():
        return []
    return [
        _port(device, port)
        for device in sorted(sys.iterdir())
        for port in sorted(_numbered(device / "ports"), key=lambda path: int(path.name))
    ]


def _numbered(directory: Path) -> list[Path]:
    return [path for path in directory.glob("*") if path.name.isdecimal() and path.name.isascii()]


def _port(device: Path, port: Path) -> FabricPort:
    rate = _RATE.match(_text(port / "rate"))
    nets = sorted(path.name for path in (device / "device" / "net").glob("*"))
    counters = {name: count_in(port / "counters" / name) or 0 for name in _ERRORS}
    return FabricPort(
        device=device.name,
        port=int(port.name),
        active="ACTIVE" in _text(port / "state"),
        gbit_per_s=float(rate[1]) if rate else 0.0,
        infiniband=_text(port / "link_layer") != "Ethernet",
        interface=nets[0] if nets else None,
        errors={name: count for name, count in counters.items() if count},
    )


def rails(ports: Sequence[FabricPort]) -> list[FabricPort]:
    """The ports that carry data between nodes: active, InfiniBand where any is, the fastest."""
    up = [port for port in ports if port.active]
    chosen = [port for port in up if port.infiniband] or up
    fastest = max((port.gbit_per_s for port in chosen), default=0.0)
    return [port for port in chosen if port.gbit_per_s == fastest]


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(256).decode("ascii", "replace").strip()
    except OSError:
        return ""


def count_in(path: Path) -> int | None:
    """A counter's file; None where there is no number in it, or it cannot be read."""
    text = _text(path)
    return int(text) if len(text) <= 20 and text.isascii() and text.isdigit() else None
