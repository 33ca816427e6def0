"""From a node's counters and cards to the metrics page; hardware is laid out by the test."""

from __future__ import annotations

import sys as python
import threading
import time
from pathlib import Path

import msgspec
import pytest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from flexslurm.config.site import GpuType
from flexslurm.control.gpu_readings import GpuReader
from flexslurm.control.inventory import gpus_of_node
from flexslurm.control.members import AgentRecord, Members
from flexslurm.control.node_watch import NodeWatch, _port
from flexslurm.errors import EnvironmentFault
from flexslurm.gateway.metrics import Metrics
from flexslurm.gateway.node_metrics import joined, node_page
from flexslurm.head.node_book import NodeBook
from flexslurm.messages import PROTOCOL, AgentBeat, AgentHello, FromAgent, GpuInfo, NodeReadings
from flexslurm.slurm.fabric_counters import MOST_COUNTERS, MOST_PORTS, fabric_counts
from tests.fake_node import FakeNvml, fake_port

COUNTERS = {
    "port_xmit_data": 1000, "port_rcv_data": 2000, "port_xmit_packets": 30, "port_rcv_packets": 40,
    "port_xmit_wait": 5, "symbol_error": 7, "link_downed": 0, "unicast_rcv_packets": 40,
}  # fmt: skip


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    sys = tmp_path / "infiniband"
    fake_port(
        sys, "mlx5_0", counters=COUNTERS,
        hardware={"out_of_sequence": 3, "lifespan": 10, "np_cnp_sent": "N/A"},
    )  # fmt: skip
    fake_port(sys, "mlx5_1", state="1: DOWN", rate="10 Gb/sec (4X SDR)", layer="Ethernet")
    return sys


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    driver = FakeNvml(
        {"uuid": "GPU-a", "memory": 80 * 2**30, "used": 2**30, "utilisation": 50, "celsius": 61,
         "milliwatts": 312500, "corrected": 4, "uncorrected": 1, "slowed": 0x1 | 0x4 | 0x40},
        {"uuid": "GPU-b", "memory": 2**35, "slices": [
            {"uuid": "MIG-1", "memory": 2**33}, {"uuid": "MIG-2", "memory": 2**34}]},
    )  # fmt: skip
    monkeypatch.setitem(python.modules, "pynvml", driver)  # type: ignore[arg-type]
    return driver


def test_data_is_counted_in_words_of_four_bytes(tree: Path) -> None:
    first, second = fabric_counts(tree)
    assert first.traffic == {
        "sent_bytes": 4000, "received_bytes": 8000, "sent_packets": 30, "received_packets": 40
    }  # fmt: skip
    assert first.errors == {"symbol_error": 7, "link_downed": 0} and first.waits == 5
    assert first.hardware == {"out_of_sequence": 3}
    assert not second.port.active and (second.traffic, second.errors) == ({}, {})


def test_a_strange_tree_is_read_within_bounds(tmp_path: Path) -> None:
    many = {f"counter_{n:04}": n for n in range(3 * MOST_COUNTERS)}
    place = fake_port(tmp_path, "mlx5_0", counters=many)
    (place.parent / "gid").mkdir()  # no port
    (place / "counters" / "counter_0000").unlink()
    (place / "counters" / "counter_0000").mkdir()  # no file
    (place / "counters" / "counter_0001").write_bytes(b"\xff\xfe" * 5000)
    for n in range(2, 2 * MOST_PORTS):
        fake_port(tmp_path, f"rxe{n}")
    began = time.thread_time()
    counts = fabric_counts(tmp_path)
    assert len(counts) == MOST_PORTS and len(counts[0].errors) == MOST_COUNTERS - 2
    assert time.thread_time() - began < 1.0


def test_a_card_tells_what_it_can(nvml: FakeNvml) -> None:
    cards = [GpuInfo(0, 0, "GPU-a"), GpuInfo(1, 0, "MIG-1"), GpuInfo(2, 0, "GPU-gone")]
    reader = GpuReader(cards)
    assert reader.open()
    card, piece = reader.read()
    assert (card.utilisation, card.memory_used_bytes, card.celsius, card.watts) == (
        0.5, 2**30, 61, 312.5
    )  # fmt: skip
    assert card.ecc_errors == {"corrected": 4, "uncorrected": 1}
    assert card.slowed_by == ("power_cap", "hw_thermal")
    assert piece.memory_total_bytes == 2**33
    assert (piece.utilisation, piece.slowed_by, piece.ecc_errors) == (None, None, {})


def test_no_driver_no_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(python.modules, "pynvml", FakeNvml(broken=True))  # type: ignore[arg-type]
    assert not GpuReader([GpuInfo(0, 0, "GPU-a")]).open()
    monkeypatch.setitem(python.modules, "pynvml", None)  # type: ignore[arg-type]
    assert not GpuReader([GpuInfo(0, 0, "GPU-a")]).open()


def taken(watch: NodeWatch) -> NodeReadings:
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline:
        found = watch.take()
        if found is not None:
            return found
        time.sleep(0.01)
    raise AssertionError("nothing was read")


def test_the_watch_reads_beside_the_agent(tree: Path, nvml: FakeNvml) -> None:
    watch = NodeWatch("a-1", [GpuInfo(0, 0, "GPU-a")], sys=tree)
    watch.start()
    try:
        found = taken(watch)
        assert watch.take() is None or found.ports  # taken once
        assert [p.device for p in found.ports] == ["mlx5_0", "mlx5_1"] and len(found.gpus) == 1
        wire = msgspec.msgpack.encode(found)
        assert msgspec.msgpack.decode(wire, type=FromAgent) == found
    finally:
        watch.close()


def test_where_there_is_nothing_to_read_the_watch_ends(tmp_path: Path) -> None:
    watch = NodeWatch("a-1", [], sys=tmp_path / "none")
    watch.start()
    deadline = time.monotonic() + 200
    while any(thread.name == "node-watch" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert watch.take() is None


def agent(who: str, node: str) -> AgentRecord:
    hello = AgentHello(
        protocol=PROTOCOL, incarnation=who, fragment=who, node=node, address="x", gpu_type="a100",
        gpus=(),
    )  # fmt: skip
    return AgentRecord(hello, 0.0)


def test_the_page_has_every_port_and_card_by_node(tree: Path, nvml: FakeNvml) -> None:
    reader = GpuReader([GpuInfo(0, 0, "GPU-a")])
    reader.open()
    watch = NodeWatch("a-1", [], sys=tree)
    watch.start()
    ports = taken(watch).ports
    watch.close()
    members, metrics = Members(), Metrics("m")
    agents = {"a-1": agent("a-1", "n1"), "a-2": agent("a-2", "n1")}
    members.agents = agents
    book = NodeBook(members)
    metrics.watch_nodes(book.by_node)
    assert book.take("a-1", NodeReadings(incarnation="a-1", ports=ports, gpus=reader.read()))
    assert book.take("a-2", NodeReadings(incarnation="a-2", ports=ports))
    assert book.take("a-3", NodeReadings(incarnation="a-3", ports=ports))  # no member
    assert book.take("a-2", NodeReadings(incarnation="a-1"))  # not its own
    assert not book.take("a-1", AgentBeat(incarnation="a-1", number=1))
    page = node_page(metrics.node_readings(), "text/plain").decode()
    samples = {
        (s.name, *(s.labels.get(k) for k in ("node", "device", "error", "counter", "gpu", "kind"))):
        s.value
        for family in text_string_to_metric_families(page)
        for s in family.samples
    }  # fmt: skip
    at = ("n1", "mlx5_0", None, None, None, None)
    assert samples["flexslurm_ib_port_transmitted_bytes_total", *at] == 4000
    assert samples["flexslurm_ib_port_rate_bits_per_second", *at] == 200e9
    assert samples["flexslurm_ib_port_up", "n1", "mlx5_1", None, None, None, None] == 0
    wrong = ("n1", "mlx5_0", "symbol_error", None, None, None)
    assert samples["flexslurm_ib_port_errors_total", *wrong] == 7
    theirs = ("n1", "mlx5_0", None, "out_of_sequence", None, None)
    assert samples["flexslurm_ib_port_hardware_total", *theirs] == 3
    card = ("n1", None, None, None, "0", None)
    assert samples["flexslurm_gpu_utilization_ratio", *card] == 0.5
    ecc = ("n1", None, None, None, "0", "uncorrected")
    assert samples["flexslurm_gpu_ecc_errors_total", *ecc] == 1
    assert "flexslurm_gpu_slowed{" in page and 'reason="power_cap"' in page
    agents.clear()
    assert node_page(metrics.node_readings(), "text/plain") == b""


@pytest.mark.parametrize("accept", ["text/plain", "application/openmetrics-text; version=1.0.0"])
def test_two_pages_are_one(accept: str, tree: Path) -> None:
    ports = tuple(map(_port, fabric_counts(tree)))
    metrics = Metrics("m")
    metrics.watch_nodes(lambda: {"n1": NodeReadings(incarnation="a", ports=ports)})
    service = metrics.exposition(accept)[0]
    page = joined(service, node_page(metrics.node_readings(), accept)).decode()
    parse = openmetrics.text_string_to_metric_families if "open" in accept else (
        text_string_to_metric_families
    )  # fmt: skip
    names = {family.name for family in parse(page)}
    assert {"flexslurm_ib_port_up", "flexslurm_prompt_tokens"} <= names
    assert joined(service, b"") == service


def test_slices_of_a_cut_card_are_the_node_s_gpus(nvml: FakeNvml) -> None:
    env = {"CUDA_VISIBLE_DEVICES": "MIG-2"}
    (found,) = gpus_of_node("slice", GpuType(), 1, env)
    assert (found.uuid, found.memory_bytes) == ("MIG-2", 2**34)
    everything = gpus_of_node("slice", GpuType(), 3, {})
    assert [gpu.uuid for gpu in everything] == ["GPU-a", "MIG-1", "MIG-2"]
    with pytest.raises(EnvironmentFault, match="shows 3"):
        gpus_of_node("slice", GpuType(), 4, {})


def test_a_share_of_a_card_keeps_to_its_memory(nvml: FakeNvml) -> None:
    share = GpuType(gres="shard", memory=10 * 2**30)
    (found,) = gpus_of_node("share", share, 1, {"CUDA_VISIBLE_DEVICES": "0"})
    assert (found.uuid, found.memory_bytes) == ("GPU-a", 10 * 2**30)
