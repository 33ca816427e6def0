"""Site files from a cluster's words, and what checks say of files that do not fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexslurm.cli.site_commands import card_of, catalogue_name
from flexslurm.config.schema import load_section, parse_section
from flexslurm.config.site import Site
from flexslurm.errors import ConfigError, SlurmError
from flexslurm.slurm.client import NodeInfo, PartitionInfo
from flexslurm.slurm.discover import ClusterFacts, parse_qos, site_text
from flexslurm.slurm.fabric import FabricPort, fabric_ports, rails
from flexslurm.slurm.gpu_request import gpu_request, gres_option
from flexslurm.slurm.gres import parse_gres
from flexslurm.slurm.mig import mig_slice
from flexslurm.slurm.records import parse_records
from flexslurm.slurm.site_check import check_against, check_alone
from flexslurm.slurm.states import node_state


def node(name: str, gres: str, address: str = "10.0.0.1", cpus: int = 64) -> NodeInfo:
    entries = tuple(parse_gres(gres))
    return NodeInfo(name, node_state("IDLE"), entries, cpus, 2**38, (), None, address)


def part(name: str, nodes: tuple[str, ...], tier: int = 1, **changes: object) -> PartitionInfo:
    info = PartitionInfo(name, nodes, True, "REQUEUE", tier, 20.0, 86400.0, 3600.0, False)
    return replace(info, **changes)  # type: ignore[arg-type]


FACTS = ClusterFacts(
    nodes=(node("g1", "gpu:nvidia_a100-sxm4-80gb:8(S:0-1)"), node("g2", "gpu:1g.10gb:28"),
           node("u1", "gpu:4"), node("c1", "(null)")),
    partitions=(
        part("low", ("g1", "g2", "u1")),
        part("high", ("g1",), tier=9, preempt_mode="OFF"),
        part("cpu", ("c1",), preempt_mode="OFF", max_time_s=None, default_time_s=None),
        part("shut", ("c1",), up=False),
    ),
    config={"ClusterName": "hpc", "KillWait": "45 sec", "PreemptMode": "REQUEUE",
            "PreemptType": "preempt/partition_prio", "PreemptExemptTime": "00:10:00"},
)  # fmt: skip


def discovered(facts: ClusterFacts) -> tuple[Site, str]:
    text = site_text(facts, card_of)
    return parse_section(Site, text, "site.yaml"), text


def test_what_slurm_says_stands_in_the_file() -> None:
    site, text = discovered(FACTS)
    assert site.name == "hpc" and site.slurm.kill_wait == 45
    kind = site.gpu_types["a100-sxm4-80gb"]
    assert (kind.model, kind.slurm_type) == ("a100-80", "nvidia_a100-sxm4-80gb")
    low, high = site.partitions["low"], site.partitions["high"]
    assert (low.preemptible, low.requeue, low.grace, low.exempt) == (True, True, 20, 600)
    assert (low.gpus_per_node, low.cpus_per_gpu) == (28, 2)
    assert (low.default_walltime, low.max_walltime) == (3600, 86400)
    assert not high.preemptible and site.head.partition == "cpu"
    assert set(site.partitions) == {"low", "high", "cpu"}
    for note in ("shut: left out", "mig-1g-10gb: figures", "without a type in Slurm (u1)"):
        assert note in text


def test_the_file_fits_its_own_cluster() -> None:
    site, _ = discovered(FACTS)
    assert check_alone(site).problems == []
    assert check_against(site, FACTS).problems == []


def test_an_unknown_card_is_noted() -> None:
    facts = replace(FACTS, nodes=(node("g1", "gpu:gtx1080:2"), node("c1", "")))
    site, text = discovered(facts)
    assert site.gpu_types["gtx1080"].model is None
    assert "the catalogue has no 'gtx1080'" in text


PARTS = replace(
    FACTS,
    nodes=(
        node("g1", "gpu:h100:4(S:0-1)"),
        node("g2", "gpu:a100_1g.10gb:7,gpu:h100_3g.40gb:2,gpu:nvidia_h100_80gb_hbm3:1"),
        node("g3", "gpu:l40s:2,shard:8", cpus=16),
        node("g4", "gpu:tesla_t4:1,mps:tesla_t4:100"),
        node("c1", "(null)"),
    ),
    partitions=(
        part("low", ("g1", "g2", "g3", "g4")),
        part("cpu", ("c1",), preempt_mode="OFF"),
    ),
)


def test_slices_and_shards_are_types_of_their_own() -> None:
    site, text = discovered(PARTS)
    types = site.gpu_types
    assert set(types) == {
        "h100", "a100-1g-10gb", "h100-3g-40gb", "h100-80gb-hbm3", "l40s", "l40s-shard", "tesla-t4"
    }  # fmt: skip
    small, big = types["a100-1g-10gb"], types["h100-3g-40gb"]
    assert small.memory == pytest.approx(9.5 * 2**30, rel=0.01)
    assert small.memory_bandwidth == pytest.approx(2.039e12 / 8, rel=0.01)
    assert small.flops == pytest.approx(312e12 / 8, rel=0.01)
    assert big.memory_bandwidth == pytest.approx(3.35e12 / 2, rel=0.01)
    shard = types["l40s-shard"]
    assert shard.memory is not None and shard.memory < 46068 * 2**20 / 4
    asked = {name: gres_option(name, 1, site) for name in types}
    assert asked == {
        "h100": "--gres=gpu:h100:1",
        "a100-1g-10gb": "--gres=gpu:a100_1g.10gb:1",
        "h100-3g-40gb": "--gres=gpu:h100_3g.40gb:1",
        "h100-80gb-hbm3": "--gres=gpu:nvidia_h100_80gb_hbm3:1",
        "l40s": "--gres=gpu:l40s:1",
        "l40s-shard": "--gres=shard:1",
        "tesla-t4": "--gres=gpu:tesla_t4:1",
    }
    assert (site.partitions["low"].gpus_per_node, site.partitions["low"].cpus_per_gpu) == (10, 1)
    for note in ("one of 4 shards", "by MPS", "its share of a100-80", "its share of h100"):
        assert note in text
    assert check_alone(site).problems == [] and check_against(site, PARTS).problems == []


def test_a_larger_share_is_several_shards() -> None:
    text = "name: x\ngpu_types: {half: {gres: shard, gres_per_gpu: 2}}"
    site = parse_section(Site, text, "site.yaml")
    assert gres_option("half", 3, site) == "--gres=shard:6"
    assert gpu_request("half", site).gpus_in(parse_gres("gpu:a100:1,shard:7")) == 3


def test_gpus_without_a_type_where_there_are_no_others() -> None:
    site, text = discovered(replace(FACTS, nodes=(node("u1", "gpu:4"), node("c1", ""))))
    assert gres_option("gpu", 4, site) == "--gres=gpu:4"
    assert "Slurm names no type (u1)" in text
    assert site.partitions["low"].gpus_per_node == 4


def test_a_cluster_without_gpus_is_told_so() -> None:
    with pytest.raises(SlurmError, match="no GPUs on 1 nodes"):
        discovered(replace(FACTS, nodes=(node("c1", "(null)"),)))


@pytest.mark.parametrize(
    ("kind", "piece"),
    [
        ("1g.5gb", (None, 1, 5)), ("a100_1g.10gb", ("a100", 1, 10)),
        ("nvidia_a100_80gb_pcie_3g.40gb", ("nvidia_a100_80gb_pcie", 3, 40)),
        ("1c.2g.10gb", (None, 2, 10)), ("H100-1g.10gb+me", ("H100", 1, 10)),
        ("a100", None), ("a100_80gb", None), ("g.10gb", None), ("", None),
    ],
)  # fmt: skip
def test_names_of_slices(kind: str, piece: tuple[str | None, int, int] | None) -> None:
    found = mig_slice(kind)
    assert (None if found is None else (found.card, found.parts, found.gigabytes)) == piece


def test_rails_of_this_machine() -> None:
    ports = tuple(FabricPort(f"mlx5_{i}", 1, i != 3, 400.0, True, f"ib{i}") for i in range(4))
    slow = FabricPort("mlx5_9", 1, True, 25.0, False, "eth0")
    site, _ = discovered(replace(FACTS, fabric=(*ports, slow)))
    link = site.network.node_link
    assert (link.rails, link.bandwidth, site.network.interface) == (3, 50e9, "ib0")
    assert site.network.nccl_env["NCCL_IB_HCA"] == "=mlx5_0:1,mlx5_1:1,mlx5_2:1"
    assert site.network.nccl_env["NCCL_SOCKET_IFNAME"] == "=ib0"


def test_preemption_by_qos_takes_the_least_that_is_promised() -> None:
    qos = parse_qos(
        "normal|00:00:00|cluster|scavenger,low|\nscavenger|120|requeue||00:30:00\n"
        "low|00:00:30|cancel||\nbanner\n"
    )
    assert [q.name for q in qos] == ["normal", "scavenger", "low"]
    facts = replace(FACTS, qos=tuple(qos), config={**FACTS.config, "PreemptType": "preempt/qos"})
    site, text = discovered(facts)
    low = site.partitions["low"]
    assert (low.preemptible, low.grace, low.requeue, low.exempt) == (True, 30, False, 0)
    assert "preempted by QOS" in text
    assert any("QOS" in line for line in check_against(site, facts).notes)


WRONG = """\
name: x
gpu_types: {a100: {model: a100-80, slurm_type: nvidia_a100-sxm4-80gb}, h100: {model: h100}}
partitions:
  low: {gpu_types: [a100, h100], gpus_per_node: 16, grace: 5min, max_walltime: 9d, exempt: 10min}
  gone: {}
head: {partition: lows}
"""


def test_a_file_that_does_not_fit() -> None:
    site = parse_section(Site, WRONG, "site.yaml")
    problems = "\n".join(check_against(site, FACTS).problems)
    for words in (
        "gives 20 s of warning, the site file says 300 s",
        "no 'gpu:h100' (gpu_types: h100), it has gpu without a type, gpu:1g.10gb",
        "largest node has 8",
        "max_walltime is 216h, Slurm allows 24h",
        "partition 'gone': Slurm does not have it",
        "head.partition 'lows': Slurm does not have it",
    ):
        assert words in problems, problems


def test_what_the_file_alone_shows() -> None:
    text = "name: x\ngpu_types: {a: {}}\npartitions: {p: {gpu_types: [a], default_walltime: 2h, "
    site = parse_section(
        Site, text + "max_walltime: 1h, kill_wait: 8s}}\nhead: {partition: p}", "s"
    )
    found = check_alone(site)
    assert any("longer than" in line for line in found.problems)
    assert any("streams break" in line for line in found.problems)
    assert any("8 s of warning" in line for line in found.notes)


@pytest.mark.parametrize(
    ("release", "line"),
    [
        ("22.05.8", "'SlurmctldParameters=preempt_send_user_signal'"),
        ("23.02.0", "'PreemptParameters=send_user_signal'"),
        ("24.11", "'PreemptParameters=send_user_signal'"),
    ],
)
def test_the_line_for_the_admin_depends_on_the_release(release: str, line: str) -> None:
    site, _ = discovered(FACTS)
    facts = replace(FACTS, config={**FACTS.config, "SLURM_VERSION": release})
    assert any(line in note for note in check_against(site, facts).notes)
    told = {**facts.config, "SlurmctldParameters": "preempt_send_user_signal"}
    notes = check_against(site, replace(facts, config=told)).notes
    assert any("SIGUSR1" in note for note in notes) and not any(line in note for note in notes)


@pytest.mark.parametrize(
    ("kind", "card"),
    [
        ("nvidia_h100_80gb_hbm3", "h100"), ("tesla_v100-sxm2-32gb", "v100-32"),
        ("nvidia_geforce_rtx_4090", "rtx4090"), ("a100_80g", "a100-80"), ("l40s", "l40s"),
        ("tesla", None), ("1g.10gb", None),
    ],
)  # fmt: skip
def test_names_of_cards(kind: str, card: str | None) -> None:
    assert catalogue_name(kind) == card


@given(st.text(max_size=200))
def test_no_answer_of_slurm_is_too_strange(text: str) -> None:
    parse_qos(text)
    mig_slice(text)
    parse_records(text, "SwitchName")
    catalogue_name(text)


def test_no_records_are_no_error() -> None:
    assert parse_records("No topology information available", "SwitchName") == []


def test_ports_of_the_kernel(tmp_path: Path) -> None:
    for device, state, rate, layer in (
        ("mlx5_0", "4: ACTIVE", "200 Gb/sec (4X HDR)", "InfiniBand"),
        ("mlx5_1", "1: DOWN", "10 Gb/sec (4X SDR)", "InfiniBand"),
        ("mlx5_2", "4: ACTIVE", "25 Gb/sec (1X EDR)", "Ethernet"),
    ):
        port = tmp_path / device / "ports" / "1"
        (port / "counters").mkdir(parents=True)
        (port / "state").write_text(state + "\n")
        (port / "rate").write_text(rate + "\n")
        (port / "link_layer").write_text(layer + "\n")
        (port / "counters" / "symbol_error").write_text("7\n")
        (port / "counters" / "link_downed").write_text("0\n")
    (tmp_path / "mlx5_0" / "device" / "net" / "ib0").mkdir(parents=True)
    ports = fabric_ports(tmp_path)
    first = FabricPort("mlx5_0", 1, True, 200.0, True, "ib0", {"symbol_error": 7})
    assert ports[0] == first and [p.active for p in ports] == [True, False, True]
    assert rails(ports) == [first] and rails(ports[1:]) == [ports[2]]
    assert fabric_ports(tmp_path / "none") == [] and rails([]) == []


def test_every_shipped_site_file_is_fine(root: Path) -> None:
    names = ("dgx-pod", "university", "cloud-burst", "mig", "federation", "sandbox", "example")
    for name in names:
        site = load_section(Site, root / "site-configs" / f"{name}.yaml")
        assert check_alone(site).problems == [], name
    assert load_section(Site, root / "site-configs/dgx-pod.yaml").network.node_link.rails == 8


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("gpu_types:\n  a:\n    gres: 'gpu:a b'", 4, "gpu_types.a.gres: 'gpu:a b' cannot be"),
        ("gpu_types:\n  a:\n    gres: 'gpu:a:2'", 4, "what stands before the count"),
        ("gpu_types:\n  a:\n    slurm_type: a b", 4, "cannot be a type of a GRES"),
        ("gpu_types: {a: {}}\nslurm:\n  commands: {sqeue: x}", 4, "did you mean 'squeue'?"),
        ("gpu_types: {a: {}}\nnetwork:\n  subnet: ten", 4, "write 10.1.0.0/16"),
        ("gpu_types: {a: {}}\nhead:\n  sbatch_args: [x]", 4, "'x' is no option of sbatch"),
        ("gpu_types: {a: {}}\nslurm:\n  rest: {url: ctl}", 4, "slurm.rest.url"),
    ],
)
def test_what_slurm_could_not_take_is_said_with_its_line(text: str, line: int, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_section(Site, f"name: x\n{text}\n", "site.yaml")
    shown = f"{caught.value} {caught.value.hint}"
    assert f"site.yaml:{line}: " in shown and words in shown
