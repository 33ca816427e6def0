"""What the ports of InfiniBand and RoCE adapters count, read from /sys; bounded, changes nothing.

`counters` are the port's own, by the InfiniBand specification; `hw_counters` the driver's. Data is
counted in words of four bytes (Linux, Documentation/ABI/stable/sysfs-class-infiniband).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from flexslurm.slurm.fabric import SYS, FabricPort, count_in, fabric_ports

MOST_PORTS = 64
MOST_COUNTERS = 64
_WORD_BYTES = 4
_DATA = {"port_xmit_data": "sent_bytes", "port_rcv_data": "received_bytes"}
_PACKETS = {"port_xmit_packets": "sent_packets", "port_rcv_packets": "received_packets"}
_NO_ERRORS = frozenset(
    {
        *_DATA, *_PACKETS, "unicast_rcv_packets", "unicast_xmit_packets", "multicast_rcv_packets",
        "multicast_xmit_packets", "port_xmit_wait",
    }
)  # fmt: skip
_SETTINGS = frozenset({"lifespan"})


@dataclass(frozen=True, slots=True)
class PortCounts:
    """A port, and all that it has counted since its driver was loaded."""

    port: FabricPort
    traffic: dict[str, int] = field(default_factory=dict)
    """sent_bytes, received_bytes, sent_packets, received_packets, where they are counted."""
    waits: int = 0
    """Ticks that data waited for credits: congestion, no error."""
    errors: dict[str, int] = field(default_factory=dict)
    """The port's error counters, zeros too, so that a rate can be taken."""
    hardware: dict[str, int] = field(default_factory=dict)
    """The driver's counters, by the driver's names."""


def fabric_counts(sys: Path = SYS) -> list[PortCounts]:
    """All ports; none where there is no such hardware. A file that cannot be read is left out."""
    return [_counts(sys, port) for port in fabric_ports(sys)[:MOST_PORTS]]


def _counts(sys: Path, port: FabricPort) -> PortCounts:
    place = sys / port.device / "ports" / str(port.port)
    own = _read_all(place / "counters")
    traffic = {ours: own[name] * _WORD_BYTES for name, ours in _DATA.items() if name in own}
    traffic |= {ours: own[name] for name, ours in _PACKETS.items() if name in own}
    return PortCounts(
        port,
        traffic,
        own.get("port_xmit_wait", 0),
        {name: count for name, count in own.items() if name not in _NO_ERRORS},
        _read_all(place / "hw_counters"),
    )


def _read_all(directory: Path) -> dict[str, int]:
    try:
        names = sorted(path.name for path in directory.iterdir())
    except OSError:
        return {}
    found = {}
    for name in [name for name in names if name not in _SETTINGS][:MOST_COUNTERS]:
        count = count_in(directory / name)
        if count is not None:
            found[name] = count
    return found
