"""Leaf switches of a real Slurm: read at launch, respected when gears are placed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from flexslurm.cli.launch_facts import leaf_switches
from flexslurm.config.schema import load_section, parse_section
from flexslurm.config.site import Site
from flexslurm.messages import StatusAnswer
from flexslurm.slurm.client import SlurmClient
from flexslurm.slurm.sandbox import Sandbox
from flexslurm.slurm.sandbox_config import SandboxConfig
from tests.service_harness import check, oracle, running, some_asks, tiny_service

pytestmark = pytest.mark.timeout(600)

# Neighbours by name hang on different switches: any order of names crosses them.
LEAVES = {"odd": ["g1", "g3", "c1"], "even": ["g2", "g4"]}
SANDBOX = f"""
nodes:
  g: {{count: 4, gpu_type: a100, gpus: 1}}
  c: {{}}
gpu_types: {{a100: {{}}}}
partitions:
  low: {{nodes: [g], default: true}}
  cpu: {{nodes: [c]}}
head_partition: cpu
switches: {LEAVES}
"""


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    box = Sandbox(
        tmp_path_factory.mktemp("leaves"), parse_section(SandboxConfig, SANDBOX, "leaves.yaml")
    )
    box.up()
    yield box
    box.down()


def test_a_cluster_without_switches_has_none(sandbox_site: Site) -> None:
    said: list[str] = []
    assert SlurmClient(sandbox_site.slurm).topology() == ""
    assert leaf_switches(sandbox_site, "slurm", said.append) == {}
    assert said == []


@pytest.mark.slow
def test_replicas_stay_under_one_switch(box: Sandbox, tiny_model: Path, tmp_path: Path) -> None:
    site = yaml.safe_load(box.site_file.read_text())
    site["gpu_types"]["a100"]["memory"] = "1700kB"  # two GPUs hold the model, one does not
    asked = tiny_service(tiny_model, [("a100", 1, 4)])
    for entry in asked["pool"]:
        entry["partition"] = "low"
    found = leaf_switches(load_section(Site, box.site_file), "slurm", print)
    assert found == {node: leaf for leaf, nodes in LEAVES.items() for node in nodes}
    with running(tmp_path, asked, site, cluster="slurm") as service:
        assert service.directory.leaf_switches() == found
        status = service.until(lambda status: status.gear is not None and status.gear.gpus == 4)
        assert status.gear is not None
        assert [len(replica.stages) for replica in status.gear.replicas] == [2, 2]
        by_replica = nodes_of_replicas(status)
        for nodes in by_replica.values():
            assert len({found[node] for node in nodes}) == 1, by_replica
        asks = some_asks(2, 8)
        service.run(asks)
        check(asks, oracle(tiny_model, asks))


def nodes_of_replicas(status: StatusAnswer) -> dict[str, set[str]]:
    """By the replica's part of a slot's name, as `r0s1t0`."""
    found: dict[str, set[str]] = defaultdict(set)
    for fragment in status.fragments:
        for gpu in fragment.gpus:
            assert gpu.slot is not None and fragment.node is not None, fragment
            found[gpu.slot.split("s")[0]].add(fragment.node)
    return dict(found)
