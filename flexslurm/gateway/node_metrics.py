"""Metrics of the nodes behind a service: ports of the fast network, and cards; measures nothing.

Whoever has the agents' readings gives them by node; a node that has left is in no scrape. With a
hundred nodes the page takes half a second: it is one of its own, to be written beside the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from flexslurm.messages import GpuReading, NodeReadings, PortReading

Readings = Mapping[str, NodeReadings]
_PORT = ("node", "device", "port")
_GPU = ("node", "gpu", "uuid")
_TRAFFIC = {
    "sent_bytes": ("transmitted_bytes", "Bytes sent (the port's words of four bytes, times four)."),
    "received_bytes": ("received_bytes", "Bytes received."),
    "sent_packets": ("transmitted_packets", "Packets sent."),
    "received_packets": ("received_packets", "Packets received."),
}
_Value = Callable[[GpuReading], float | None]
_GPU_GAUGES: dict[str, tuple[str, _Value]] = {
    "utilization_ratio": ("Share of time in which a kernel ran.", lambda g: g.utilisation),
    "memory_used_bytes": ("Device memory in use, by anybody.", lambda g: g.memory_used_bytes),
    "memory_total_bytes": ("Device memory.", lambda g: g.memory_total_bytes),
    "temperature_celsius": ("Of the card.", lambda g: g.celsius),
    "power_watts": ("Drawn now.", lambda g: g.watts),
}


def node_page(readings: Readings, accept: str) -> bytes:
    """The families of all nodes, in the form an Accept header asks for; empty without readings."""
    if not any(told.ports or told.gpus for told in readings.values()):
        return b""
    registry = CollectorRegistry()
    registry.register(_NodeCollector(readings))
    return choose_encoder(accept)[0](registry)


def joined(service: bytes, nodes: bytes) -> bytes:
    """Two pages as one; OpenMetrics ends with a mark."""
    return service.removesuffix(b"# EOF\n") + nodes if nodes else service


class _NodeCollector(Collector):
    def __init__(self, readings: Readings) -> None:
        self._readings = readings

    def collect(self) -> Iterable[Metric]:
        told = sorted(self._readings.items())
        ports = [((n, p.device, str(p.port)), p) for n, node in told for p in node.ports]
        cards = [((n, str(card.index), card.uuid), card) for n, node in told for card in node.gpus]
        if ports:
            yield from _port_families(ports)
        if cards:
            yield from _gpu_families(cards)

    def describe(self) -> Iterable[Metric]:
        """Nothing, so that registering writes nothing."""
        return ()


def _port_families(ports: Sequence[tuple[tuple[str, ...], PortReading]]) -> Iterator[Metric]:
    up = GaugeMetricFamily("flexslurm_ib_port_up", "1 while the port is active.", labels=_PORT)
    rate = GaugeMetricFamily(
        "flexslurm_ib_port_rate_bits_per_second", "Rate the port has agreed on.", labels=_PORT
    )
    waits = CounterMetricFamily(
        "flexslurm_ib_port_wait_ticks", "Ticks in which data waited to be sent.", labels=_PORT
    )
    errors = CounterMetricFamily(
        "flexslurm_ib_port_errors", "The port's own error counters.", labels=(*_PORT, "error")
    )
    hardware = CounterMetricFamily(
        "flexslurm_ib_port_hardware", "The driver's counters.", labels=(*_PORT, "counter")
    )
    traffic = {
        key: CounterMetricFamily(f"flexslurm_ib_port_{stem}", words, labels=_PORT)
        for key, (stem, words) in _TRAFFIC.items()
    }
    for labels, port in ports:
        up.add_metric(labels, float(port.active))
        rate.add_metric(labels, port.gbit_per_s * 1e9)
        waits.add_metric(labels, port.waits)
        for key, family in traffic.items():
            if key in port.traffic:
                family.add_metric(labels, port.traffic[key])
        for error, count in port.errors.items():
            errors.add_metric((*labels, error), count)
        for counter, count in port.hardware.items():
            hardware.add_metric((*labels, counter), count)
    yield from (up, rate, waits, errors, hardware, *traffic.values())


def _gpu_families(cards: Sequence[tuple[tuple[str, ...], GpuReading]]) -> Iterator[Metric]:
    for stem, (words, value_of) in _GPU_GAUGES.items():
        gauge = GaugeMetricFamily(f"flexslurm_gpu_{stem}", words, labels=_GPU)
        for labels, card in cards:
            value = value_of(card)
            if value is not None:
                gauge.add_metric(labels, value)
        yield gauge
    ecc = CounterMetricFamily(
        "flexslurm_gpu_ecc_errors",
        "Memory errors since the driver was loaded.",
        labels=(*_GPU, "kind"),
    )
    slowed = GaugeMetricFamily(
        "flexslurm_gpu_slowed", "1 for what holds the clocks down now.", labels=(*_GPU, "reason")
    )
    for labels, card in cards:
        for kind, count in card.ecc_errors.items():
            ecc.add_metric((*labels, kind), count)
        for reason in card.slowed_by or ():
            slowed.add_metric((*labels, reason), 1.0)
    yield from (ecc, slowed)
