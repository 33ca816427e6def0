"""A node's address by the site's rule, on machines with the field's odd settings."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from flexslurm.config.schema import parse_section
from flexslurm.config.site import NetworkSettings, Site
from flexslurm.errors import EnvironmentFault
from flexslurm.head.agent_process import worker_environment
from flexslurm.slurm.site_check import check_alone
from flexslurm.wire.address import node_address

INTERFACES = {
    "lo": ["127.0.0.1"], "docker0": ["172.17.0.1"], "ens1": ["169.254.3.4"], "eno1": ["10.2.0.7"],
    "ib0": ["10.10.0.7", "10.10.0.8"], "ib1": [],
}  # fmt: skip
NAMES = {"gpu01-ib0": ["10.10.0.7"], "gpu01-bad": ["127.0.1.1"], "gpu01": ["127.0.1.1"],
         "gpu01-two": ["127.0.1.1", "10.2.0.7"]}  # fmt: skip


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that its own /etc/hosts calls 127.0.1.1, as Debian's installer writes it."""

    def interfaces() -> dict[str, list[Any]]:
        entry = SimpleNamespace
        return {
            name: [entry(family=socket.AF_INET, address=a) for a in addresses]
            + [entry(family=socket.AF_INET6, address="fe80::1")]
            for name, addresses in INTERFACES.items()
        }

    def resolve(name: str, port: object, family: object) -> list[Any]:
        if name not in NAMES:
            raise socket.gaierror(-2, "Name or service not known")
        return [(family, 1, 6, "", (address, 0)) for address in NAMES[name]]

    monkeypatch.setattr(psutil, "net_if_addrs", interfaces)
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu01.cluster.example")


@pytest.mark.parametrize(
    ("rule", "address"),
    [
        ({}, "10.2.0.7"),
        ({"interface": "ib0"}, "10.10.0.7"),
        ({"subnet": "10.10.0.0/16"}, "10.10.0.7"),
        ({"subnet": "10.10.0.8/32"}, "10.10.0.8"),
        ({"suffix": "-ib0"}, "10.10.0.7"),
        ({"suffix": "-two"}, "10.2.0.7"),
        ({"interface": "lo"}, "127.0.0.1"),  # asked for by name: all on one machine
    ],
)
def test_the_rule_of_the_site(rule: dict[str, str], address: str) -> None:
    assert node_address(NetworkSettings(**rule)) == address


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ({"interface": "ib9"}, "no IPv4 address on interface 'ib9'"),
        ({"interface": "ib1"}, "no IPv4 address on interface 'ib1'"),
        ({"subnet": "192.0.2.0/24"}, "no address in 192.0.2.0/24"),
        ({"suffix": "-hsn0"}, "cannot resolve 'gpu01-hsn0'"),
        ({"suffix": "-bad"}, "'gpu01-bad' is 127.0.1.1, which no other node reaches"),
        ({"suffix": ""}, "'gpu01' is 127.0.1.1"),
    ],
)
def test_a_rule_that_does_not_hold_here(rule: dict[str, str], words: str) -> None:
    with pytest.raises(EnvironmentFault) as caught:
        node_address(NetworkSettings(**rule))
    assert words in str(caught.value)


def test_two_rules_at_once_are_told_of() -> None:
    text = "name: x\ngpu_types: {a: {}}\npartitions: {p: {}}\nnetwork: {interface: ib0, suffix: i}"
    notes = check_alone(parse_section(Site, text, "s")).notes
    assert any("network.interface counts, and not suffix" in note for note in notes)


def test_workers_on_cards_get_what_nccl_wants() -> None:
    """The site's variables for NCCL go to workers on cards alone; `env` goes to all."""
    text = (
        "name: x\ngpu_types: {a: {}, v: {virtual: {}, memory: 1GiB}}\nenv: {HF_HUB_OFFLINE: '1'}\n"
        "network: {nccl_env: {NCCL_IB_HCA: '=mlx5_0:1', NCCL_SOCKET_IFNAME: '=ib0'}}"
    )
    site = parse_section(Site, text, "s")
    card = worker_environment(site, virtual=False)
    assert card["NCCL_IB_HCA"] == "=mlx5_0:1" and card["HF_HUB_OFFLINE"] == "1"
    assert worker_environment(site, virtual=True) == {"HF_HUB_OFFLINE": "1"}
