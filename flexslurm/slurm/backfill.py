"""Holes in Slurm's schedule: free GPUs until something else is to start there; pure, asks nothing.

What Slurm shows: nodes with what is used of them, reservations, and when and where it expects
pending jobs to start. A job that fits a hole delays nobody, so a scheduler that fills holes starts
it at once, whatever its priority.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from flexslurm.errors import SlurmError
from flexslurm.slurm.gpu_request import GpuRequest
from flexslurm.slurm.gres import Gres, parse_gres
from flexslurm.slurm.nodelist import expand_told
from flexslurm.slurm.states import node_state
from flexslurm.slurm.times import parse_time

_WORTH = 0.75
"""Of what fits a hole: Slurm may give a job as little as --time-min even where more would do."""
MARGIN_S = 60.0
"""Left of a hole: jobs end late, and Slurm counts walltimes in minutes."""


@dataclass(frozen=True, slots=True)
class NodeRoom:
    """A node, what it has and what is used of it."""

    name: str
    partitions: tuple[str, ...]
    has: tuple[Gres, ...]
    used: tuple[Gres, ...]
    usable: bool


@dataclass(frozen=True, slots=True)
class Hole:
    """GPUs of one type that are free on a node."""

    node: str
    gpus: int
    length_s: float | None
    """None: nothing is known that ends it."""


@dataclass(frozen=True, slots=True)
class Fill:
    """A job that fits: Slurm may give it as little as `least_s`."""

    walltime_s: float
    least_s: float
    nodes: tuple[str, ...]


def node_room(record: Mapping[str, str]) -> NodeRoom:
    """From `scontrol show node -d`; a node whose GRES cannot be read has none."""
    return NodeRoom(
        name=record.get("NodeName", ""),
        partitions=tuple(filter(None, record.get("Partitions", "").split(","))),
        has=_gres(record.get("Gres", "")),
        used=_gres(record.get("GresUsed", "")),
        usable=node_state(record.get("State", "")).usable_now,
    )


def _gres(text: str) -> tuple[Gres, ...]:
    try:
        return tuple(parse_gres(text))
    except SlurmError:
        return ()


def wanted_from(
    reservations: Iterable[Mapping[str, str]], starts: Iterable[tuple[str, str]]
) -> dict[str, float]:
    """For each node the first moment (Unix time) at which something else is to have it.

    `starts`: start time and nodes of pending jobs, as `squeue --start` tells them.
    """
    found: dict[str, float] = {}
    told = [(record.get("StartTime", ""), record.get("Nodes", "")) for record in reservations]
    for when, nodes in (*told, *starts):
        at = parse_time(when)
        for node in expand_told(nodes) if at is not None else ():
            found[node] = min(found.get(node, at), at) if at is not None else 0.0
    return found


def holes(
    rooms: Iterable[NodeRoom],
    wanted: Mapping[str, float],
    request: GpuRequest,
    partition: str,
    now: float,
) -> list[Hole]:
    """Free GPUs of one type in a partition, the longest holes first."""
    found = []
    for room in rooms:
        free = request.gpus_in(room.has) - request.gpus_in(room.used)
        if free <= 0 or not room.usable or partition not in room.partitions:
            continue
        at = wanted.get(room.name)
        if at is None or at > now + MARGIN_S:
            found.append(Hole(room.name, free, None if at is None else at - now - MARGIN_S))
    endless = float("inf")
    return sorted(found, key=lambda h: (-(endless if h.length_s is None else h.length_s), h.node))


def fill(
    found: Sequence[Hole], gpus: int, nodes: int, least_s: float, most_s: float
) -> Fill | None:
    """The longest job of a shape that fits, in whole minutes; None where none is worth it."""
    fitting = [hole for hole in found if hole.gpus >= gpus][:nodes]
    if len(fitting) < nodes:
        return None
    lengths = [hole.length_s for hole in fitting if hole.length_s is not None]
    walltime_s = min([most_s, *lengths]) // 60 * 60
    if walltime_s < least_s:
        return None
    worth_s = _WORTH * walltime_s // 60 * 60
    return Fill(walltime_s, max(worth_s, least_s), tuple(hole.node for hole in fitting))
