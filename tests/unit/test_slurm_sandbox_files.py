"""The sandbox's configuration and the files it becomes; no daemon is started."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from flexslurm.config.schema import parse_section
from flexslurm.config.site import Site
from flexslurm.errors import ConfigError, EnvironmentFault
from flexslurm.planner.leaves import read_leaves
from flexslurm.slurm import sandbox_host
from flexslurm.slurm.nodelist import expand
from flexslurm.slurm.sandbox_config import SandboxConfig, default_config, load_sandbox
from flexslurm.slurm.sandbox_files import (
    Layout,
    gres_conf,
    slurm_conf,
    sockets_fit,
    topology_conf,
)
from flexslurm.slurm.sandbox_site import site_yaml

YAML = """\
nodes:
  big: {count: 2, gpu_type: h100, gpus: 8, cpus: 64, memory: 512GiB}
  log: {prefix: login}
gpu_types:
  h100: {memory: 2GiB, speed: 0.8}
partitions:
  low: {nodes: [big], preempt_mode: CANCEL, grace: 20s, default: true}
  high: {nodes: [big], priority_tier: 5, max_time: 2h}
  cpu: {nodes: [log]}
kill_wait: 8s
slurm_conf: ["SlurmctldParameters=preempt_send_user_signal"]
plugstack: ["optional none.so"]
"""


@pytest.fixture
def config() -> SandboxConfig:
    return parse_section(SandboxConfig, YAML, "s.yaml")


LAYOUT = Layout(Path("/d"), Path("/d/run"))
PORTS = {"slurmctld": 1, "big1": 2, "big2": 3, "login1": 4}


def test_slurm_conf(config: SandboxConfig) -> None:
    lines = slurm_conf(config, LAYOUT, PORTS, "host", "me").splitlines()
    assert "SlurmctldHost=host(127.0.0.1)" in lines
    assert "AuthInfo=socket=/d/run/munge,cred_expire=5" in lines
    assert "KillWait=8" in lines and "PlugStackConfig=/d/plugstack.conf" in lines
    assert "SlurmctldParameters=preempt_send_user_signal" in lines
    assert [line for line in lines if line.startswith(("NodeName", "PartitionName"))] == [
        "NodeName=big1 NodeHostname=host NodeAddr=127.0.0.1 Port=2 "
        "CPUs=64 RealMemory=524288 Gres=gpu:h100:8 State=UNKNOWN",
        "NodeName=big2 NodeHostname=host NodeAddr=127.0.0.1 Port=3 "
        "CPUs=64 RealMemory=524288 Gres=gpu:h100:8 State=UNKNOWN",
        "NodeName=login1 NodeHostname=host NodeAddr=127.0.0.1 Port=4 "
        "CPUs=16 RealMemory=65536 State=UNKNOWN",
        "PartitionName=low Nodes=big1,big2 Default=YES MaxTime=INFINITE State=UP PriorityTier=1 "
        "PreemptMode=CANCEL GraceTime=20",
        "PartitionName=high Nodes=big1,big2 Default=NO MaxTime=120 State=UP PriorityTier=5 "
        "PreemptMode=OFF GraceTime=0",
        "PartitionName=cpu Nodes=login1 Default=NO MaxTime=INFINITE State=UP PriorityTier=1 "
        "PreemptMode=OFF GraceTime=0",
    ]
    assert gres_conf(config, LAYOUT).splitlines() == [
        "NodeName=big1 Name=gpu Type=h100 File=/d/dev/big1/gpu[0-7]",
        "NodeName=big2 Name=gpu Type=h100 File=/d/dev/big2/gpu[0-7]",
    ]


def test_switches_are_one_tree() -> None:
    text = YAML + "switches: {left: [big1, login1], right: [big2]}\n"
    config = parse_section(SandboxConfig, text, "s.yaml")
    assert "TopologyPlugin=topology/tree" in slurm_conf(config, LAYOUT, PORTS, "host", "me")
    shown = topology_conf(config)
    assert read_leaves(shown, expand) == {"big1": "left", "login1": "left", "big2": "right"}
    assert "SwitchName=spine Switches=left,right" in shown


def test_the_site_file_says_what_the_sandbox_is(config: SandboxConfig) -> None:
    site = parse_section(Site, site_yaml(config, Path("/d/slurm.conf")), "site.yaml")
    assert site.slurm.conf == "/d/slurm.conf" and site.kill_wait_s("low") == 8.0
    low, high = site.partitions["low"], site.partitions["high"]
    assert (low.preemptible, low.requeue, low.grace, low.gpus_per_node) == (True, False, 20.0, 8)
    assert (high.preemptible, high.max_walltime) == (False, 7200.0)
    assert site.partitions["cpu"].gpu_types == []
    gpu = site.gpu_types["h100"]
    assert gpu.memory == 2 * 2**30 and gpu.virtual is not None and gpu.virtual.speed == 0.8


def test_the_example_site_is_the_default_sandbox(root: Path) -> None:
    text = (root / "site-configs" / "sandbox.yaml").read_text(encoding="utf-8")
    assert text == site_yaml(default_config(), None)


def test_no_file_is_the_default(tmp_path: Path) -> None:
    assert load_sandbox(None) == default_config()
    (tmp_path / "s.yaml").write_text(YAML)
    assert load_sandbox(tmp_path / "s.yaml").all_nodes() == ["big1", "big2", "login1"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("count: 2", "cuont: 2", r"s\.yaml:2: nodes\.big\.cuont: unknown key"),
        ("gpu_type: h100, ", "", "belong together"),
        ("nodes: [log]", "nodes: [lag]", "names the node group 'lag'; defined: big, log"),
        ("gpu_type: h100", "gpu_type: h1", "names the GPU type 'h1'"),
        ("prefix: login", "prefix: big", "two node groups give the same node names"),
        ("nodes: [log]", "nodes: [log], default: true", "more than one partition"),
        ("preempt_mode: CANCEL", "preempt_mode: SUSPEND", "preempt_mode"),
        ("kill_wait: 8s", "kill_wait: 8 s", None),
        ("kill_wait: 8s", "head_partition: gpu", "names the partition 'gpu'"),
        ("kill_wait: 8s", "switches: {a: [big1, big2]}", "on no switch: login1"),
        ("kill_wait: 8s", "switches: {a: [big1, big2, login1, big1]}", "on two switches"),
        ("kill_wait: 8s", "switches: {a: [big3]}", "switch 'a' names the node 'big3'"),
        ("kill_wait: 8s", "switches: {A B: [big1]}", "switches"),
    ],
)
def test_errors_name_the_place(old: str, new: str, message: str | None) -> None:
    text = YAML.replace(old, new)
    assert text != YAML
    if message is None:
        assert parse_section(SandboxConfig, text, "s.yaml").kill_wait == 8.0
        return
    with pytest.raises(ConfigError, match=message):
        parse_section(SandboxConfig, text, "s.yaml")


def test_a_long_directory_gets_a_short_place_for_sockets(tmp_path: Path) -> None:
    config = default_config()
    near = sandbox_host.choose_layout(Path("/d"), config)
    assert near.run == Path("/d/run")
    far = sandbox_host.choose_layout(Path("/" + "x" * 100), config)
    assert sockets_fit(far.run, config.all_nodes()) and not far.run.is_relative_to("/x")
    other = sandbox_host.choose_layout(Path("/" + "y" * 100), config)
    assert far.run != other.run


def test_names_too_long_for_any_socket(config: SandboxConfig) -> None:
    nodes = {"n" * 31: config.nodes["log"].model_copy(update={"prefix": None})}
    long = SandboxConfig(nodes=nodes, partitions={"cpu": {"nodes": ["n" * 31]}})  # type: ignore[dict-item]
    with pytest.raises(EnvironmentFault, match="too long"):
        sandbox_host.choose_layout(Path("/" + "x" * 100), long)


@pytest.mark.parametrize("path", ["/a b", "/a#b", "/a[1]", "/a,b", "/a%n"])
def test_paths_that_slurm_conf_cannot_name(path: str) -> None:
    with pytest.raises(EnvironmentFault, match="cannot name"):
        sandbox_host.check_path(Path(path))


def test_free_ports_are_free_and_differ() -> None:
    ports = sandbox_host.free_ports([f"n{i}" for i in range(20)])
    assert len(set(ports.values())) == 20
    for port in ports.values():
        with socket.socket() as probe:
            probe.bind(("0.0.0.0", port))


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"srun": "/bin/srun", "sbatch": "/bin/sbatch", "scontrol": "/bin/scontrol"}
    monkeypatch.setattr(sandbox_host, "find_program", found.get)
    monkeypatch.setattr(sandbox_host, "_plugin_dirs", lambda: [Path("/nonexistent")])
    with pytest.raises(EnvironmentFault) as caught:
        sandbox_host.check_programs()
    packages = "munge slurm-wlm-basic-plugins slurmctld slurmd"
    assert packages in caught.value.message
    assert caught.value.hint is not None
    assert caught.value.hint.endswith(f"apt-get install -y --no-install-recommends {packages}")


def test_a_short_directory_of_somebody_else_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(EnvironmentFault, match="not a directory of this user"):
        sandbox_host._own_directory(tmp_path / "link")


def test_the_key_is_for_its_owner_alone(config: SandboxConfig, tmp_path: Path) -> None:
    layout = Layout(tmp_path, tmp_path / "run")
    sandbox_host.write_files(config, layout, PORTS, "mark")
    assert layout.munge_key.stat().st_mode & 0o777 == 0o600
    assert layout.munge_key.stat().st_size == 128
    first = layout.munge_key.read_bytes()
    sandbox_host.write_files(config, layout, PORTS, "mark")
    assert layout.munge_key.read_bytes() != first
    assert not list(tmp_path.rglob("*.part"))
    assert layout.device("big1", 7).exists() and os.access(layout.log, os.W_OK)
