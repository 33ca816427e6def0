"""Verdicts on InfiniBand and RoCE ports, and on what NCCL is told of them; pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from flexslurm.cli.doctor_words import CheckVerdict, fail, note, ok

_SLOW = 0.9
"""Of the rate that the site file gives a link: rates are told in round figures."""


def judge_fabric(me: dict[str, Any], where: str) -> list[CheckVerdict]:
    """The ports of one node: up, at their rate, without errors."""
    ports = me["fabric"]
    if not ports:
        return [note("fabric", where, "no InfiniBand or RoCE here")]
    found = [verdict for port in ports for verdict in _port(port, where)]
    up = _up(ports)
    if not up:
        mend = "see ibstat; NCCL falls back to TCP without it"
        return [*found, fail("fabric", where, "no port is up", mend)]
    fastest = max(port["gbit_per_s"] for port in up)
    found += [
        note(
            "fabric", where, f"{_name(port)} runs at {port['gbit_per_s']:g} Gbit/s, others at "
            f"{fastest:g}", "see ibstat: a bad cable or port makes it agree on less",
        )
        for port in up
        if port["gbit_per_s"] < fastest and port["infiniband"]
    ]  # fmt: skip
    wanted = me["network"].get("gbit_per_s")
    if wanted is not None and 0 < fastest < _SLOW * wanted:
        mend = "mend the port, or network.node_link.bandwidth in the site file"
        words = f"{fastest:g} Gbit/s a port, the site file says {wanted:g}"
        found.append(note("fabric", where, words, mend))
    rates = Counter(f"{port['gbit_per_s']:g} Gbit/s" for port in up)
    told = ", ".join(f"{count} x {rate}" for rate, count in rates.items())
    return [*found, ok("fabric", where, told)]


def _port(port: dict[str, Any], where: str) -> Iterator[CheckVerdict]:
    if not port["active"]:
        mend = "leave it out of NCCL_IB_HCA, or mend it"
        yield note("fabric", where, f"{_name(port)} is down", mend)
    if port["errors"]:
        told = ", ".join(f"{key} {count}" for key, count in port["errors"].items())
        yield note(
            "fabric", where, f"{_name(port)}: {told}", "look at its cable (ibstat, perfquery)"
        )


def _name(port: dict[str, Any]) -> str:
    return f"{port['device']}:{port['port']}"


def _up(ports: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [port for port in ports if port["active"]]


def judge_nccl(me: dict[str, Any], where: str) -> list[CheckVerdict]:
    """NCCL itself, where there are cards, and whether what the site file names is here."""
    found = []
    env = me["network"].get("nccl_env", {})
    if "NCCL_IB_HCA" in env and me["fabric"]:
        found += _devices(env["NCCL_IB_HCA"], me["fabric"], where)
    if "NCCL_SOCKET_IFNAME" in env:
        found += _interface(env["NCCL_SOCKET_IFNAME"], me["interfaces"], where)
    if not me["gpus"].get("names"):  # virtual GPUs talk by gloo
        return found
    packages = [v for name, v in me["packages"].items() if name.startswith("nvidia-nccl")]
    if packages:
        return [*found, ok("nccl", where, packages[0])]
    mend = "install torch's build for CUDA, unless torch brings NCCL in another way"
    return [*found, note("nccl", where, "no package of it", mend)]


def nccl_names(text: str) -> tuple[bool, bool, list[str]]:
    """`=a,b` (exactly these), `^a` (all but these) or `a` (all that begin so), as NCCL reads it.

    Returns whether they are exact, whether they are excluded, and the names.
    """
    excluded = text.startswith("^")
    rest = text.removeprefix("^")
    exact = rest.startswith("=")
    names = [name.strip() for name in rest.removeprefix("=").split(",")]
    return exact, excluded, [name for name in names if name]


def _devices(text: str, ports: Sequence[dict[str, Any]], where: str) -> list[CheckVerdict]:
    exact, excluded, names = nccl_names(text)
    if excluded:
        return []
    there = {_name(port) for port in ports} | {port["device"] for port in ports}
    up = {_name(port) for port in _up(ports)} | {port["device"] for port in _up(ports)}
    missing = [name for name in names if not _matches(name, there, exact)]
    down = [name for name in names if name not in missing and not _matches(name, up, exact)]
    found = []
    if missing:
        mend = "mend network.nccl_env in the site file: see ibstat on the node"
        words = f"NCCL_IB_HCA names {', '.join(missing)}, which is not here"
        found.append(fail("nccl", where, words, mend))
    if down:
        words = f"NCCL_IB_HCA names {', '.join(down)}, which is down"
        found.append(fail("nccl", where, words, "mend the port, or leave it out"))
    return found


def _interface(text: str, interfaces: Sequence[str], where: str) -> list[CheckVerdict]:
    exact, excluded, names = nccl_names(text)
    if excluded or any(_matches(name, set(interfaces), exact) for name in names):
        return []
    words = f"NCCL_SOCKET_IFNAME is {text}; the interfaces here are {', '.join(interfaces)}"
    return [fail("nccl", where, words, "mend network.nccl_env in the site file")]


def _matches(name: str, there: set[str], exact: bool) -> bool:
    return name in there if exact else any(other.startswith(name) for other in there)


def compare_fabrics(nodes: Sequence[dict[str, Any]]) -> list[CheckVerdict]:
    """A node with fewer or slower ports than the others holds all of them up."""
    told = {str(me["node"]): _rails(me["fabric"]) for me in nodes if me["fabric"]}
    if len(set(told.values())) < 2:
        return []
    (usual, _), *_rest = Counter(told.values()).most_common()
    return [
        note(
            "fabric", node, f"{rails[0]} x {rails[1]:g} Gbit/s, other nodes have {usual[0]} x "
            f"{usual[1]:g}", "a group of GPUs is as fast as its slowest node: mend it or drain it",
        )
        for node, rails in told.items()
        if rails != usual
    ]  # fmt: skip


def _rails(ports: Sequence[dict[str, Any]]) -> tuple[int, float]:
    """How many ports at the fastest rate."""
    rates = [port["gbit_per_s"] for port in _up(ports)]
    return (rates.count(max(rates)), max(rates)) if rates else (0, 0.0)
