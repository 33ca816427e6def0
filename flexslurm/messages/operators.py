"""The link of command line and head: questions, orders and their answers; no member's word."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from flexslurm.gear import Gear
from flexslurm.messages.base import Message


class StatusAsk(Message, frozen=True, tag="ask.status"):
    """Answered by `StatusAnswer`."""


class StopAsk(Message, frozen=True, tag="ask.stop"):
    """End the service: refuse new requests, let running ones end for `drain_s`, release pilots."""

    drain_s: float = 0.0


class CordonAsk(Message, frozen=True, tag="ask.cordon"):
    """Take a fragment out of planning (or back in), without ending it."""

    fragment: str
    cordon: bool = True


class NotifyAsk(Message, frozen=True, tag="ask.notify"):
    """What one of Slurm's hooks has seen; `slurm.notices` says what it means for the pilots."""

    event: str
    """A word of `slurm.notices.HookEvent`."""
    source: str
    """Which hook: `epilog`, `strigger`, …"""
    job_id: str | None = None
    nodes: tuple[str, ...] = ()
    grace_s: float | None = None
    """Seconds until the end, where the hook knows."""
    restarts: int | None = None
    """Which run of the job, as SLURM_RESTART_COUNT counts; None: the hook was not told."""
    reason: str = ""


class DrainAsk(Message, frozen=True, tag="ask.drain"):
    """Cordon a fragment, and end it once nothing of it is used."""

    fragment: str


class ReleaseAsk(Message, frozen=True, tag="ask.release"):
    """Move the service off one node, and give the node back; its pilot goes on with the others."""

    node: str


class ShiftAsk(Message, frozen=True, tag="ask.shift"):
    """Go into a gear and stay there until members change; answered by `ShiftAnswer`."""

    to: str
    """An allocation's name, a layout, or `best`: what the policy would choose."""
    dry_run: bool = False


class ShiftAnswer(Message, frozen=True, tag="answer.shift"):
    """The plan of the shift."""

    to: str
    """The gear's layout."""
    lines: tuple[str, ...] = ()
    epoch: int = 0
    """It will be tried under; 0: it will not."""


class AskRefused(Message, frozen=True, tag="answer.refused"):
    """The head does not do it, and why."""

    message: str
    hint: str | None = None


class AskDone(Message, frozen=True, tag="answer.done"):
    """It is done, or begun; in words."""

    message: str = ""


class ServiceState(StrEnum):
    """How the service as a whole is: everybody who speaks of it uses these words."""

    STARTING = "starting"
    SERVING = "serving"
    SHIFTING = "shifting"
    WAITING = "waiting"
    """Nothing fits what is there; requests wait."""
    FAILED = "failed"
    """The model cannot be installed anywhere; an operator must act."""
    STOPPING = "stopping"


class GpuStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU, its worker and the slot that the worker fills."""

    index: int
    worker: str | None
    slot: str | None
    pid: int = 0
    """Of the worker, on its node; 0: none runs."""
    used_bytes: int = 0
    """Of the worker's memory: weights and KV pages, as of its last beat."""
    epochs: tuple[int, ...] = ()
    """What it holds: more than one while a shift is under way or an old epoch is being closed."""


class FragmentStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A pilot's node, or a pilot that has no agent."""

    name: str
    job_id: str | None
    node: str | None
    gpu_type: str
    state: str
    """`ready`, `serving`, `leaving`, `faulty`, `cordoned`, `left out`; without agents the state of
    its job in Slurm's words (`pending`, `running`, …), `unknown`, and once it has ended `lost`,
    `drained`."""
    detail: str
    gpus: tuple[GpuStatus, ...]

    @property
    def is_there(self) -> bool:
        """Whether the node has come, and nothing is against its use."""
        return self.state in ("ready", "serving")


class StatusAnswer(Message, frozen=True, tag="answer.status"):
    """What the service runs on, in which gear and why; totals are since the head began."""

    service: str
    head: str
    endpoint: str
    state: ServiceState
    reason: str
    """Why the present gear, in the words of the decision."""
    epoch: int
    gear: Gear | None
    fragments: tuple[FragmentStatus, ...]
    running: int
    waiting: int
    kv_used: float
    """Share of the block pool in use, 0 to 1."""
    finished: int
    tokens_total: int
    shifts: tuple[dict[str, float | str], ...] = ()
    """The last shifts: `epoch`, `why`, `from`, `to`, `started_s_ago`, `took_s`, `outcome`; of the
    weights, `weights_bytes`, of which `moved_bytes` came from other GPUs and `kept_bytes` were in
    place, `load_s` and `groups_s` of the slowest worker; of the KV, `mode`, `sequences_moved`,
    `sequences_recomputed`, `kv_bytes`, `transfer_s`, and `pause_s` with the steps awaited in it."""
    uptime_s: float = 0.0
    pool: tuple[str, ...] = ()
    """A line for each entry of the pool: what is wanted, what there is, why no more comes."""
    judgement: str = ""
    """The three figures of the shifts so far, in words."""
    figures: dict[str, float | None] = msgspec.field(default_factory=dict)
    """The same for programs: `throughput_kept_during`, `throughput_kept_after` (shifts),
    `requests_succeeded`, `time_shifting`, each a share, and `paused_s`; null where none is known.
    """
    decisions: tuple[dict[str, float | str], ...] = ()
    """The last decisions: `s_ago`, `verdict` (`shift`, `stay`, `wait`) and `reason`."""
    measured: dict[str, Any] = msgspec.field(default_factory=dict)
    """`windows`: the last whole one and the one before it; `corrections`: measured over estimated
    tokens per second, by gear; `losses`: expected of one pilot in an hour, by its kind."""
