"""Reads a node's fabric ports and cards beside the agent; decides nothing, and holds nobody up.

In a thread of its own, which the process does not wait for: a driver that hangs must not keep the
agent from its beats, nor from its end.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from flexslurm.control.gpu_readings import GpuReader
from flexslurm.messages import GpuInfo, NodeReadings, PortReading
from flexslurm.slurm.fabric import SYS
from flexslurm.slurm.fabric_counters import PortCounts, fabric_counts

PAUSE_S = 1.0
"""Some adapters ask their firmware for a counter: more often than this helps nobody."""


class NodeWatch:
    """What is read last is kept until it is taken; older readings are dropped."""

    def __init__(self, incarnation: str, cards: Sequence[GpuInfo], *, sys: Path = SYS) -> None:
        self._incarnation = incarnation
        self._sys = sys
        self._gpus = GpuReader(cards)
        self._latest: NodeReadings | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="node-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def take(self) -> NodeReadings | None:
        """What was read since it was last taken."""
        latest, self._latest = self._latest, None
        return latest

    def close(self) -> None:
        """Read no more; does not wait for a reading that is under way."""
        self._ended.set()

    def _run(self) -> None:
        has_gpus = self._gpus.open()
        if not has_gpus and not fabric_counts(self._sys):
            return  # nothing to read here, and adapters do not come later
        while True:
            self._latest = NodeReadings(
                incarnation=self._incarnation,
                ports=tuple(map(_port, fabric_counts(self._sys))),
                gpus=self._gpus.read() if has_gpus else (),
            )
            if self._ended.wait(PAUSE_S):
                return


def _port(counts: PortCounts) -> PortReading:
    port = counts.port
    return PortReading(
        device=port.device,
        port=port.port,
        active=port.active,
        gbit_per_s=port.gbit_per_s,
        traffic=counts.traffic,
        waits=counts.waits,
        errors=counts.errors,
        # dozens on every port, of which hardly any ever counts
        hardware={name: count for name, count in counts.hardware.items() if count},
    )
