"""The phases of a shift as a table, its orders and its settings; values only.

What the phases mean is in `control.shift`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from flexslurm.messages import WeightHolder


class Phase(StrEnum):
    """The phases of a shift; what may follow which is in LEGAL."""

    PREPARE = "prepare"
    PARK = "park"
    CLOSE = "close"
    INSTALL = "install"
    TRANSFER = "transfer"
    CUTOVER = "cutover"
    COMMIT = "commit"
    ABORT = "abort"


_P = Phase
LEGAL: Mapping[Phase, frozenset[Phase]] = {
    _P.PREPARE: frozenset(
        {_P.PARK, _P.CLOSE, _P.INSTALL, _P.TRANSFER, _P.CUTOVER, _P.COMMIT, _P.ABORT}
    ),
    _P.PARK: frozenset({_P.CLOSE, _P.ABORT}),
    _P.CLOSE: frozenset({_P.INSTALL, _P.CUTOVER, _P.COMMIT, _P.ABORT}),
    _P.INSTALL: frozenset({_P.TRANSFER, _P.CUTOVER, _P.COMMIT, _P.ABORT}),
    _P.TRANSFER: frozenset({_P.CUTOVER, _P.ABORT}),
    _P.CUTOVER: frozenset({_P.COMMIT, _P.ABORT}),
    _P.COMMIT: frozenset(),
    _P.ABORT: frozenset(),
}


AT_DEADLINE: Mapping[Phase, Phase] = {
    _P.PREPARE: _P.ABORT,
    _P.PARK: _P.CLOSE,
    _P.CLOSE: _P.ABORT,
    _P.INSTALL: _P.ABORT,
    _P.TRANSFER: _P.CUTOVER,
    _P.CUTOVER: _P.ABORT,
}
"""Where a phase goes that has taken too long: on with what there is, or back."""


@dataclass(frozen=True, slots=True)
class PhaseWords:
    """A phase for people."""

    happens: str
    ends: str
    """When the next phase begins."""
    old_gear: str


WORDS: Mapping[Phase, PhaseWords] = {
    _P.PREPARE: PhaseWords(
        "missing workers start, leftovers of earlier epochs are closed, moves and memory are "
        "planned; before PARK groups form, stages are cut, weights of other GPUs come to host "
        "memory and full blocks are copied there",
        "all workers are up and free, the plan is there, and what could be made is made",
        "serves",
    ),
    _P.PARK: PhaseWords(
        "the drivers stop at a step boundary, live KV that is not yet there is copied to host "
        "memory",
        "every worker has answered, or nothing of the old gear is left",
        "pauses",
    ),
    _P.CLOSE: PhaseWords(
        "the old epoch's memory is freed; its groups too, unless its weights are handed over: "
        "then these close after COMMIT",
        "every worker has said so",
        "is over",
    ),
    _P.INSTALL: PhaseWords(
        "stages are built beside what is there: weights that are here are shared, others come from "
        "peers, then from the files; groups form; a probe runs",
        "every new worker has its stage, and the probe went through it",
        "serves; after CLOSE it is over",
    ),
    _P.TRANSFER: PhaseWords(
        "full blocks, which never change, are pulled in rounds at a share of the link",
        "little is left, or no less from round to round",
        "serves",
    ),
    _P.CUTOVER: PhaseWords(
        "the drivers stop at a step boundary, what was written since is pulled",
        "every pull is answered",
        "pauses",
    ),
    _P.COMMIT: PhaseWords(
        "the new drivers open with what was moved; then the old epoch is closed",
        "",
        "is over",
    ),
    _P.ABORT: PhaseWords(
        "the new epoch is closed everywhere, and nothing of it is kept",
        "",
        "goes on; after CLOSE its sequences wait and are recomputed",
    ),
}


class Mode(StrEnum):
    """How KV gets from the old replicas to the new ones."""

    BESIDE = "beside"
    """Both fit: moved while the old ones serve."""
    PARK = "park"
    """They do not: kept in host memory while serving pauses."""
    RECOMPUTE = "recompute"
    """It does not: sequences go on from their tokens."""


@dataclass(frozen=True, slots=True)
class ShiftOrder:
    """The shell's plan of the moves, as far as the phases depend on it."""

    mode: Mode
    holders: tuple[WeightHolder, ...] = ()
    """For `Install.holders`."""
    rate_bytes_per_s: float = 0.0
    lines: tuple[str, ...] = ()
    """The plan in words, for the journal and for people."""
    stored: bool = False
    """KV waits in files from before: it is pulled in the cut-over, whatever the mode."""
    evicted: tuple[str, ...] = ()
    """Sequences that the new gear has no room for: they wait and are recomputed."""
    turn_layers: int = 0
    """Weights of what is closed stay until the new gear has them, so many layers at a time.

    0: they do not.
    """
    transfer_s: float = 0.0
    """Expected, as is `pause_s`."""
    pause_s: float = 0.0


@dataclass(frozen=True, slots=True)
class InstallSettings:
    """What every install of this service has in common, and the bounds of the phases."""

    model: str
    dtype: str
    memory_fraction: float
    prepare_timeout_s: float
    close_timeout_s: float
    install_timeout_s: float
    assemble_timeout_s: float = 30.0
    """Half of it is waited for what can be made of the new gear before PARK."""
    close_after_s: float = 0.25
    """For so long the first steps of a new gear have the processors, where nobody must leave."""
    park_timeout_s: float = 60.0
    transfer_timeout_s: float = 120.0
    cutover_timeout_s: float = 20.0
    probe: tuple[int, ...] = ()
    """Tokens that each new replica must compute before it counts as installed."""
    leave_reserve_s: float = 1.0
    """Kept for CUTOVER of the time that a leaving member has left."""
