"""What the probes' facts come to: a verdict for each check, with its mend; pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from flexslurm.cli.doctor_fabric import compare_fabrics, judge_fabric, judge_nccl
from flexslurm.cli.doctor_words import CheckVerdict, Result, fail, note, ok
from flexslurm.config.units import SIZE

_LEAST_MEMORY = 2 * 2**30
_GPU_TAKEN = 0.1
_CLOCK_WARN_S, _CLOCK_FAIL_S = 1.0, 30.0


def judge_node(me: dict[str, Any], virtual: bool) -> list[CheckVerdict]:
    """What one node says of itself. `virtual`: the site's GPUs need no cards."""
    where = str(me["node"])
    found = [_address(me, where), _memory(me, where), _gpus(me, where, virtual)]
    found += [*judge_nccl(me, where), *judge_fabric(me, where), _slurm(me["slurm"], where)]
    if me["model"] is not None:
        found.append(_model(me["model"], where))
    return found


def _address(me: dict[str, Any], where: str) -> CheckVerdict:
    told = me["address"]
    if "problem" in told:
        return fail("address", where, told["problem"], "mend 'network' in the site file")
    if told["address"].startswith("127."):
        return note(
            "address", where, f"{told['address']}: other nodes cannot reach this one",
            "set network.interface, subnet or suffix, unless all runs on this machine",
        )  # fmt: skip
    return ok("address", where, told["address"])


def _memory(me: dict[str, Any], where: str) -> CheckVerdict:
    free = int(me["memory_free_bytes"])
    words = f"{free / 2**30:.1f} GiB free"
    if free < _LEAST_MEMORY:
        return note("memory", where, words, f"{SIZE.show(_LEAST_MEMORY)} or more are wanted")
    return ok("memory", where, words)


def _gpus(me: dict[str, Any], where: str, virtual: bool) -> CheckVerdict:
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


def _slurm(told: dict[str, str], where: str) -> CheckVerdict:
    if "problem" in told:
        return note(
            "slurm", where, told["problem"],
            "agents need no Slurm commands; steps started from this node do",
        )  # fmt: skip
    return ok("slurm", where, told["version"])


def _model(told: dict[str, Any], where: str) -> CheckVerdict:
    if "problem" in told:
        return fail("model", where, told["problem"], "put the model where all nodes can read it")
    return ok("model", where, f"{told['files']} files read in {told['seconds']:g} s")


def judge_meeting(nodes: Sequence[dict[str, Any]], wanted: int) -> list[CheckVerdict]:
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
    found += _equal("python", [me["python"] for me in nodes])
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
    found += _equal("driver", drivers)
    releases = [me["slurm"]["version"] for me in nodes if "version" in me["slurm"]]
    found += _equal("slurm", releases)
    return [*found, *compare_fabrics(nodes)]


def _equal(check: str, values: Sequence[str]) -> list[CheckVerdict]:
    kinds = Counter(values)
    if not kinds:
        return []
    if len(kinds) == 1:
        return [ok(check, "job", f"{values[0]} on {len(values)} nodes")]
    told = ", ".join(f"{value} on {count}" for value, count in kinds.items())
    return [fail(check, "job", told, "bring the nodes to one version")]


def _met(met: dict[str, Any], where: str) -> list[CheckVerdict]:
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


def _peers(peers: dict[str, dict[str, Any]], where: str) -> list[CheckVerdict]:
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


def clock(where: str, skew_s: float, against: str) -> CheckVerdict:
    """A verdict on a difference of clocks."""
    words = f"{skew_s:+.3f} s against {against}"
    if abs(skew_s) > _CLOCK_FAIL_S:
        return fail("clock", where, words, "start chrony or ntpd: munge refuses old credentials")
    if abs(skew_s) > _CLOCK_WARN_S:
        return note("clock", where, words, "see chronyc tracking on both")
    return ok("clock", where, words)


def table(verdicts: Sequence[CheckVerdict]) -> str:
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
