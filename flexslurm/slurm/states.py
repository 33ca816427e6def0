"""States of jobs and nodes; total maps: what is unknown stays UNKNOWN."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

EXIT_GIVE_BACK = 75
"""A task that ends with this wants its job requeued: it leaves, and will come again."""


class JobState(StrEnum):
    """Where a job is. UNKNOWN is neither running nor done: ask again."""

    PENDING = "PENDING"
    CONFIGURING = "CONFIGURING"
    RUNNING = "RUNNING"
    SUSPENDED = "SUSPENDED"
    STOPPED = "STOPPED"
    COMPLETING = "COMPLETING"
    REQUEUED = "REQUEUED"
    """Between a run and the queue: held, being requeued, in a special exit state."""
    COMPLETED = "COMPLETED"
    CANCELLED = "CANCELLED"
    FAILED = "FAILED"
    TIMEOUT = "TIMEOUT"
    NODE_FAIL = "NODE_FAIL"
    PREEMPTED = "PREEMPTED"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    BOOT_FAIL = "BOOT_FAIL"
    DEADLINE = "DEADLINE"
    REVOKED = "REVOKED"
    UNKNOWN = "UNKNOWN"

    @property
    def active(self) -> bool:
        """Known to be alive: waiting, running or on its way between the two."""
        return self in _ACTIVE

    @property
    def over(self) -> bool:
        """Known to have ended for good. False for UNKNOWN."""
        return self in _OVER


_ACTIVE = frozenset({
    JobState.PENDING, JobState.CONFIGURING, JobState.RUNNING, JobState.SUSPENDED, JobState.STOPPED,
    JobState.COMPLETING, JobState.REQUEUED,
})  # fmt: skip
_OVER = frozenset(JobState) - _ACTIVE - {JobState.UNKNOWN}

_JOB_WORDS: dict[str, JobState] = {state.value: state for state in JobState} | {
    "BF": JobState.BOOT_FAIL, "CA": JobState.CANCELLED, "CD": JobState.COMPLETED,
    "CF": JobState.CONFIGURING, "CG": JobState.COMPLETING, "DL": JobState.DEADLINE,
    "F": JobState.FAILED, "NF": JobState.NODE_FAIL, "OOM": JobState.OUT_OF_MEMORY,
    "PD": JobState.PENDING, "PR": JobState.PREEMPTED, "R": JobState.RUNNING,
    "RD": JobState.PENDING, "RF": JobState.REQUEUED, "RH": JobState.REQUEUED,
    "RQ": JobState.REQUEUED, "RS": JobState.RUNNING, "RV": JobState.REVOKED,
    "SI": JobState.RUNNING, "SE": JobState.REQUEUED, "SO": JobState.COMPLETING,
    "ST": JobState.STOPPED, "S": JobState.SUSPENDED, "TO": JobState.TIMEOUT,
    "RESV_DEL_HOLD": JobState.PENDING, "REQUEUE_FED": JobState.REQUEUED,
    "REQUEUE_HOLD": JobState.REQUEUED, "REQUEUE": JobState.REQUEUED,
    "RESIZING": JobState.RUNNING, "SIGNALING": JobState.RUNNING,
    "SPECIAL_EXIT": JobState.REQUEUED, "STAGE_OUT": JobState.COMPLETING,
    "LAUNCH_FAILED": JobState.REQUEUED, "RECONFIG_FAIL": JobState.REQUEUED,
    "POWER_UP_NODE": JobState.CONFIGURING, "EXPEDITING": JobState.PENDING,
    "UPDATE_DB": JobState.UNKNOWN, "NODE_FAILED": JobState.NODE_FAIL,
    "NODEFAIL": JobState.NODE_FAIL,
}  # fmt: skip


def job_state(words: str | list[str]) -> JobState:
    """The state for any spelling: `RUNNING`, `R`, `CANCELLED by 0`, `["RUNNING", "COMPLETING"]`.

    With several words a flag that says the job is on its way out or back wins over the base state.
    """
    given = [words] if isinstance(words, str) else words
    found = [_JOB_WORDS.get(_first_word(word), JobState.UNKNOWN) for word in given]
    for flag in (JobState.REQUEUED, JobState.COMPLETING, JobState.CONFIGURING):
        if flag in found:
            return flag
    return found[0] if found else JobState.UNKNOWN


def _first_word(text: str) -> str:
    return (text.split() or [""])[0].rstrip("+").upper()


_SUFFIXES = {
    "*": "NOT_RESPONDING", "~": "POWERED_DOWN", "#": "POWERING_UP", "!": "POWER_DOWN",
    "%": "POWERING_DOWN", "$": "MAINTENANCE", "@": "REBOOT_REQUESTED", "^": "REBOOT_ISSUED",
    "-": "PLANNED",
}  # fmt: skip
_NODE_WORDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "ALLOC": ("ALLOCATED", ()), "ALLOCATED": ("ALLOCATED", ()), "ALLOCATED+": ("ALLOCATED", ()),
    "COMP": ("MIXED", ("COMPLETING",)), "COMPLETING": ("MIXED", ("COMPLETING",)),
    "DOWN": ("DOWN", ()), "ERROR": ("ERROR", ()), "FUTURE": ("FUTURE", ()), "FUTR": ("FUTURE", ()),
    "IDLE": ("IDLE", ()), "MIX": ("MIXED", ()), "MIXED": ("MIXED", ()),
    "DRAIN": ("IDLE", ("DRAIN",)), "DRAINED": ("IDLE", ("DRAIN",)),
    "DRNG": ("MIXED", ("DRAIN",)), "DRAINING": ("MIXED", ("DRAIN",)),
    "FAIL": ("IDLE", ("FAIL",)), "FAILG": ("MIXED", ("FAIL",)), "FAILING": ("MIXED", ("FAIL",)),
    "MAINT": ("IDLE", ("MAINTENANCE",)), "RESV": ("IDLE", ("RESERVED",)),
    "RESERVED": ("IDLE", ("RESERVED",)), "PLND": ("IDLE", ("PLANNED",)),
    "PLANNED": ("IDLE", ("PLANNED",)), "BLOCK": ("IDLE", ("BLOCKED",)),
    "BLOCKED": ("IDLE", ("BLOCKED",)), "BOOT": ("DOWN", ("REBOOT_ISSUED",)),
    "NPC": ("UNKNOWN", ("PERFCTRS",)), "PERFCTRS": ("UNKNOWN", ("PERFCTRS",)),
    "POW_DN": ("IDLE", ("POWERING_DOWN",)), "POW_UP": ("IDLE", ("POWERING_UP",)),
    "POWERING_DOWN": ("IDLE", ("POWERING_DOWN",)), "POWERING_UP": ("IDLE", ("POWERING_UP",)),
    "POWERED_DOWN": ("IDLE", ("POWERED_DOWN",)), "INVAL": ("UNKNOWN", ("INVALID_REG",)),
    "REBOOT": ("IDLE", ("REBOOT_REQUESTED",)), "UNK": ("UNKNOWN", ()), "UNKNOWN": ("UNKNOWN", ()),
}  # fmt: skip
_UNUSABLE = frozenset({
    "DRAIN", "NOT_RESPONDING", "INVALID_REG", "POWERING_DOWN", "POWERED_DOWN", "POWER_DOWN",
    "POWERING_UP", "MAINTENANCE", "MAINT", "RESERVED", "REBOOT_REQUESTED", "REBOOT_ISSUED", "FAIL",
    "BLOCKED", "PERFCTRS",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class NodeState:
    """A base state and its flags; suffix characters of old releases are flags too."""

    base: str
    flags: tuple[str, ...] = ()

    @property
    def usable_now(self) -> bool:
        """Whether Slurm could start something here at once."""
        return self.base in ("IDLE", "MIXED", "ALLOCATED") and not _UNUSABLE & set(self.flags)

    @property
    def busy(self) -> bool:
        return self.base in ("MIXED", "ALLOCATED")

    @property
    def slurm_drain(self) -> str | None:
        """`draining` while jobs still run, `drained` when none do, None without the flag."""
        if "DRAIN" not in self.flags:
            return None
        return "draining" if self.busy else "drained"


def node_state(words: str | list[str]) -> NodeState:
    """The state for any spelling: `IDLE+DRAIN`, `DOWN*+CLOUD`, `drng`, `["MIXED", "DRAIN"]`."""
    given = words.split("+") if isinstance(words, str) else list(words)
    base, flags = "UNKNOWN", list[str]()
    for position, raw in enumerate(given):
        word = raw.strip().upper()
        suffixes = []
        while word and word[-1] in _SUFFIXES:
            suffixes.append(_SUFFIXES[word[-1]])
            word = word[:-1]
        if position == 0:
            base, implied = _NODE_WORDS.get(word, ("UNKNOWN", (word,) if word else ()))
            flags += implied
        elif word:
            flags.append(word)
        flags += suffixes
    return NodeState(base, tuple(dict.fromkeys(flags)))
