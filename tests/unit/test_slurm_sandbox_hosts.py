"""What a sandbox writes for hosts of their own and for accounting; nothing is started."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import yaml

from flexslurm.config.schema import parse_section
from flexslurm.errors import ConfigError, EnvironmentFault
from flexslurm.slurm import sandbox_accounting, sandbox_host, sandbox_network
from flexslurm.slurm.sandbox_config import SandboxConfig
from flexslurm.slurm.sandbox_daemons import Daemons
from flexslurm.slurm.sandbox_files import Layout, slurm_conf
from flexslurm.slurm.sandbox_network import SandboxNetwork
from flexslurm.slurm.sandbox_site import site_yaml

QOS = """\
nodes: {a: {count: 2, gpu_type: a100, gpus: 1}}
gpu_types: {a100: {}}
partitions:
  low: {nodes: [a], qos: scavenger, grace: 99s}
  free: {nodes: [a]}
qos:
  scavenger: {grace: 10s, preempt_mode: CANCEL}
  urgent: {preempts: [scavenger], priority: 7}
"""
PORTS = {"slurmctld": 1, "a1": 2, "a2": 3, "mariadbd": 4, "slurmdbd": 5}


@pytest.fixture
def config() -> SandboxConfig:
    return parse_section(SandboxConfig, QOS, "s.yaml")


@pytest.fixture
def network(tmp_path: Path) -> SandboxNetwork:
    return SandboxNetwork(tmp_path, "10.201.3", ("a1", "a2"))


def test_each_host_has_its_address(
    config: SandboxConfig, network: SandboxNetwork, tmp_path: Path
) -> None:
    layout = Layout(tmp_path, tmp_path / "run")
    text = slurm_conf(config, layout, PORTS, "box", "root", network)
    assert "SlurmctldHost=box(10.201.3.1)" in text
    assert "NodeName=a1 NodeHostname=a1 NodeAddr=10.201.3.10 Port=2 " in text
    assert "NodeName=a2 NodeHostname=a2 NodeAddr=10.201.3.11 Port=3 " in text
    assert network.hosts_text("box").splitlines() == [
        "127.0.0.1 localhost", "10.201.3.1 box", "10.201.3.10 a1", "10.201.3.11 a2",
    ]  # fmt: skip


def test_names_fit_the_kernel_and_are_the_directory_s(tmp_path: Path) -> None:
    one, two = (SandboxNetwork(tmp_path / n, "10.1.1", ("a1",) * 240) for n in ("one", "two"))
    names = {network._link("a1") for network in (one, two)}
    assert len(names) == 2 and all(len(name) + len("39") <= 15 for name in names)
    with pytest.raises(EnvironmentFault, match="no node 'x'"):
        one.cut("x")


def test_addresses_that_somebody_uses_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox_network, "check", lambda nodes: None)
    monkeypatch.setattr("random.randint", lambda low, high: low)
    monkeypatch.setattr(sandbox_network, "_ip", lambda *words: "2: e  inet 10.9.0.5/16 scope")
    assert sandbox_network.choose(tmp_path, ["a1"]).prefix == "10.200.0"
    monkeypatch.setattr(sandbox_network, "_ip", lambda *words: "2: e  inet 10.200.7.5/13 scope")
    with pytest.raises(EnvironmentFault, match="no free network"):
        sandbox_network.choose(tmp_path, ["a1"])


@pytest.mark.parametrize(
    ("euid", "commands", "words"),
    [(1000, True, "need root"), (0, False, "need the command"), (0, True, "at most")],
)
def test_where_there_can_be_no_hosts(
    euid: int, commands: bool, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: euid)
    monkeypatch.setattr("shutil.which", lambda name: name if commands else None)
    with pytest.raises(EnvironmentFault, match=words) as caught:
        sandbox_network.check(241)
    assert caught.value.hint or words == "at most"


def test_accounting_is_written_only_where_it_is_asked_for(
    config: SandboxConfig, tmp_path: Path
) -> None:
    layout = Layout(tmp_path, tmp_path / "run")
    lines = sandbox_accounting.slurm_conf_lines(config, layout, PORTS)
    assert f"AccountingStoragePass={layout.munge_socket}" in lines
    assert "PreemptType=preempt/qos" in lines and "AccountingStoragePort=5" in lines
    plain = config.model_copy(update={"qos": {}})
    assert "PreemptType=preempt/partition_prio" in sandbox_accounting.slurm_conf_lines(
        plain, layout, {}
    )


def test_the_password_is_its_owner_s_alone(
    config: SandboxConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    for name in sandbox_accounting._TABLES:
        (scripts / name).write_text(f"-- {name}\n")
    monkeypatch.setattr(sandbox_accounting, "_SCRIPTS", scripts)
    layout = Layout(tmp_path, tmp_path / "run")
    sandbox_accounting.write_files(layout, PORTS, sandbox_host._write)
    secret = [tmp_path / "slurmdbd.conf", tmp_path / "db" / "boot.sql"]
    password = secret[0].read_text().split("StoragePass=")[1].split()[0]
    assert len(password) >= 32 and password in secret[1].read_text()
    assert {stat.S_IMODE(path.stat().st_mode) for path in secret} == {0o600}
    assert stat.S_IMODE((tmp_path / "db").stat().st_mode) == 0o700
    assert "bind-address=127.0.0.1" in (tmp_path / "db" / "my.cnf").read_text()


def test_the_cluster_is_known_before_its_controller_starts(
    config: SandboxConfig, tmp_path: Path
) -> None:
    daemons = Daemons(config, Layout(tmp_path, tmp_path / "run"), "mark")
    assert daemons.all() == ["munged", "mariadbd", "slurmdbd", "slurmctld", "a1", "a2"]
    asked: list[list[str]] = []

    def ask(argv: list[str]) -> str:
        asked.append(argv)
        return ""

    sandbox_accounting.enrol(config, ask, "me", 0.0)
    told = [" ".join(argv[2:]) for argv in asked[1:]]
    assert told[0] == "add cluster sandbox"
    assert "add qos scavenger Priority=0 GraceTime=10 PreemptMode=CANCEL" in told
    assert "modify qos urgent set Preempt=scavenger" in told
    assert told[-1].endswith("QOS=normal,scavenger,urgent")


def test_the_site_file_promises_what_the_qos_gives(config: SandboxConfig) -> None:
    low, free = (yaml.safe_load(site_yaml(config, None))["partitions"][n] for n in ("low", "free"))
    assert (low["qos"], low["grace"], low["requeue"]) == ("scavenger", "10s", False)
    assert not free["preemptible"] and "qos" not in free


@pytest.mark.parametrize(
    "wrong",
    [QOS.replace("preempts: [scavenger]", "preempts: [nobody]"),
     QOS.replace("qos: scavenger", "qos: nobody")],
)  # fmt: skip
def test_unknown_qos_are_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match="nobody"):
        parse_section(SandboxConfig, wrong, "s.yaml")
