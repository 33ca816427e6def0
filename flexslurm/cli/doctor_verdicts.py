"""What the probes' facts come to: a verdict for each check, with its mend; pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from flexslurm.config.units import SIZE

_LEAST_MEMORY = 2 * 2**30
_GPU_TAKEN = 0.1
_CLOCK_WARN_S, _CLOCK_FAIL_S = 1.0, 30.0


class Result(StrEnum):
    OK = "ok"
    NOTE = "note"
    FAIL = "FAIL"


@dataclass(frozen=True, slots=True)
class Verdict:
    """One check at one place."""

    check: str
    where: str
    result: Result
    words: str
    mend: str = ""


def ok(check: str, where: str, words: str) -> Verdict:
    return Verdict(check, where, Result.OK, words)


def note(check: str, where: str, words: str, mend: str = "") -> Verdict:
    return Verdict(check, where, Result.NOTE, words, mend)


def fail(check: str, where: str, words: str, mend: str) -> Verdict:
    return Verdict(check, where, Result.FAIL, words, mend)


def judge_node(me: dict[str, Any], virtual: bool) -> list[Verdict]:
    """What one node says of itself. `virtual`: the site's GPUs need no cards."""
    where = str(me["node"])
    found = [_address(me, where), _memory(me, where), _gpus(me, where, virtual)]
    found += [*_nccl(me, where), *_fabric(me, where)]
    if me["model"] is not None:
        found.append(_model(me["model"], where))
    return found


def _address(me: dict[str, Any], where: str) -> Verdict:
    told = me["address"]
    if "problem" in told:
        return fail("address", where, told["problem"], "mend 'network' in the site file")
    if told["address"].startswith("127."):
        return note(
            "address", where, f"{told['address']}: other nodes cannot reach this one",
            "set network.interface, subnet or suffix, unless all runs on this machine",
        )  # fmt: skip
    return ok("address", where, told["address"])


def _memory(me: dict[str, Any], where: str) -> Verdict:
    free = int(me["memory_free_bytes"])
    words = f"{free / 2**30:.1f} GiB free"
    if free < _LEAST_MEMORY:
        return note("memory", where, words, f"{SIZE.show(_LEAST_MEMORY)} or more are wanted")
    return ok("memory", where, words)


def _gpus(me: dict[str, Any], where: str, virtual: bool) -> Verdict:
    told = me["gpus"]
    if virtual:
        return ok("gpus", where, "virtual: no card is needed")
    if "problem" in told:
        if not told.get("wanted"):
            return note("gpus", where, "none here")
        return fail(
            "gpus", where, f"the driver does not answer: {told['problem']}",
            "see nvidia-smi on the node; the driver may have been updated without a reboot",
        )  # fmt: skip
    names = Counter(told["names"])
    words = ", ".join(f"{count} x {name}" for name, count in names.items()) or "none"
    words += f", driver {told['driver']}"
    if told["wanted"] is not None and len(told["names"]) < told["wanted"]:
        return fail(
            "gpus", where, f"{words}; Slurm gave {told['wanted']}",
            "a card has fallen off, or the step was not given them: --gres, gres.conf",
        )  # fmt: skip
    taken = [str(i) for i, share in enumerate(told["used_share"]) if share > _GPU_TAKEN]
    if taken:
        mend = "see nvidia-smi: a process of another job, or one that was left"
        return note("gpus", where, f"{words}; memory of GPU {', '.join(taken)} is taken", mend)
    return ok("gpus", where, words)


def _nccl(me: dict[str, Any], where: str) -> list[Verdict]:
    """Only where there are cards: virtual GPUs talk by gloo."""
    if not me["gpus"].get("names"):
        return []
    found = [v for name, v in me["packages"].items() if name.startswith("nvidia-nccl")]
    if found:
        return [ok("nccl", where, found[0])]
    mend = "install torch's build for CUDA, unless torch brings NCCL in another way"
    return [note("nccl", where, "no package of it", mend)]


def _fabric(me: dict[str, Any], where: str) -> Iterable[Verdict]:
    ports = me["fabric"]
    if not ports:
        return [note("fabric", where, "no InfiniBand or RoCE here")]
    found = []
    for port in ports:
        name = f"{port['device']}:{port['port']}"
        if not port["active"]:
            found.append(
                note("fabric", where, f"{name} is down", "leave it out of NCCL_IB_HCA, or mend it")
            )
        if port["errors"]:
            told = ", ".join(f"{key} {count}" for key, count in port["errors"].items())
            found.append(note("fabric", where, f"{name}: {told}", "look at its cable (ibstat)"))
    up = [port for port in ports if port["active"]]
    if not up:
        mend = "see ibstat; NCCL falls back to TCP without it"
        return [*found, fail("fabric", where, "no port is up", mend)]
    rates = Counter(f"{port['gbit_per_s']:g} Gbit/s" for port in up)
    words = ", ".join(f"{count} x {rate}" for rate, count in rates.items())
    return [*found, ok("fabric", where, words)]


def _model(told: dict[str, Any], where: str) -> Verdict:
    if "problem" in told:
        return fail("model", where, told["problem"], "put the model where all nodes can read it")
    return ok("model", where, f"{told['files']} files read in {told['seconds']:g} s")


def judge_meeting(nodes: Sequence[dict[str, Any]], wanted: int) -> list[Verdict]:
    """What the nodes say of each other."""
    found = []
    missing = wanted - len(nodes)
    if missing > 0:
        found.append(
            fail("nodes", "job", f"{missing} of {wanted} nodes said nothing",
                 "see srun's words above; is Python there under the same path?")
        )  # fmt: skip
    for me in nodes:
        found += _met(me["met"], str(me["node"]))
    found += _equal(nodes, "python", [me["python"] for me in nodes])
    names = sorted({name for me in nodes for name in me["packages"]})
    differing = [n for n in names if len({me["packages"].get(n) for me in nodes}) > 1]
    if differing:
        found.append(
            fail("packages", "job", f"differ: {', '.join(differing)}",
                 "use one environment on all nodes, under one path")
        )  # fmt: skip
    elif nodes:
        found.append(ok("packages", "job", f"{len(names)} equal on {len(nodes)} nodes"))
    drivers = [me["gpus"]["driver"] for me in nodes if "driver" in me["gpus"]]
    return [*found, *_equal(nodes, "driver", drivers)]


def _equal(nodes: Sequence[dict[str, Any]], check: str, values: Sequence[str]) -> list[Verdict]:
    kinds = Counter(values)
    if not kinds:
        return []
    if len(kinds) == 1:
        return [ok(check, "job", f"{values[0]} on {len(values)} nodes")]
    told = ", ".join(f"{value} on {count}" for value, count in kinds.items())
    return [fail(check, "job", told, "bring the nodes to one version")]


def _met(met: dict[str, Any], where: str) -> list[Verdict]:
    if "problem" in met:
        return [
            fail("shared directory", where, met["problem"],
                 "set paths.shared_dir to what all nodes can write")
        ]  # fmt: skip
    found = []
    if met["seen"] < met["wanted"]:
        found.append(
            fail("shared directory", where, f"sees {met['seen']} of {met['wanted']} nodes' files",
                 "set paths.shared_dir to a directory that all nodes share")
        )  # fmt: skip
    else:
        found.append(ok("shared directory", where, f"sees all {met['wanted']} nodes' files"))
    return found + _peers(met["peers"], where)


def _peers(peers: dict[str, dict[str, Any]], where: str) -> list[Verdict]:
    if not peers:
        return []
    deaf = {name: peer["problem"] for name, peer in peers.items() if "problem" in peer}
    found = [
        fail("ports", where, f"cannot reach {name}: {problem}",
             "open high TCP ports between the nodes, or set network.* to a network that has them")
        for name, problem in deaf.items()
    ]  # fmt: skip
    heard = {name: peer for name, peer in peers.items() if name not in deaf}
    if not heard:
        return found
    slowest = max(peer["way_s"] for peer in heard.values())
    if not deaf:
        words = f"reaches all {len(heard)}, the slowest in {1000 * slowest:.1f} ms"
        found.append(ok("ports", where, words))
    name, skew_s = max(
        ((name, peer["clock_s"]) for name, peer in heard.items()), key=lambda item: abs(item[1])
    )
    return [*found, clock(where, skew_s, name)]


def clock(where: str, skew_s: float, against: str) -> Verdict:
    """A verdict on a difference of clocks."""
    words = f"{skew_s:+.3f} s against {against}"
    if abs(skew_s) > _CLOCK_FAIL_S:
        return fail("clock", where, words, "start chrony or ntpd: munge refuses old credentials")
    if abs(skew_s) > _CLOCK_WARN_S:
        return note("clock", where, words, "see chronyc tracking on both")
    return ok("clock", where, words)


def table(verdicts: Sequence[Verdict]) -> str:
    """Columns, and for each failure and note the mend."""
    rows = [(v.result.value, v.check, v.where, v.words) for v in verdicts]
    widths = [max(len(row[i]) for row in rows) for i in range(3)] if rows else [0, 0, 0]
    lines = []
    for row, verdict in zip(rows, verdicts, strict=True):
        cells = "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=False))
        lines.append(f"{cells}  {row[3]}")
        if verdict.mend and verdict.result is not Result.OK:
            lines.append(f"{'':{widths[0]}}  -> {verdict.mend}")
    return "\n".join(lines)
