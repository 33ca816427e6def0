"""States of jobs and nodes, and reasons in words; total maps: what is unknown stays UNKNOWN."""

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


_REASONS: dict[str, str] = {
    "BeginTime": "requeued, waits until Slurm lets it start again",
    "Priority": "other jobs come first",
    "Resources": "waits for nodes to become free",
    "Dependency": "waits for another job",
    "DependencyNeverSatisfied": "waits for a job that will never end as asked",
    "PartitionDown": "the partition is down",
    "PartitionInactive": "the partition takes no jobs now",
    "PartitionNodeLimit": "asks for more nodes than the partition allows",
    "PartitionTimeLimit": "asks for more time than the partition allows",
    "ReqNodeNotAvail": "a node it asked for is not available",
    "Reservation": "waits for its reservation",
    "ReservationDeleted": "its reservation is gone",
    "Licenses": "waits for a licence",
    "JobHeldUser": "held by its user: release it with scontrol release",
    "JobHeldAdmin": "held by an administrator: it needs scontrol release",
    "launch_failed_requeued_held": "could not be launched and is held: it needs scontrol release",
    "JobLaunchFailure": "could not be launched",
    "BadConstraints": "no node can ever satisfy what it asks for",
    "Cleaning": "its last run is still being cleaned up",
    "NodeDown": "a node of it went down",
    "TimeLimit": "reached its time limit",
    "Preempted": "preempted",
    "InvalidAccount": "the account is not valid",
    "InvalidQOS": "the QOS is not valid",
    "MaxRequeue": "requeued too often and held: it needs scontrol release",
    "NonZeroExitCode": "ended with an error",
    "RaisedSignal:53(Real-time_signal_19)": "the directory of its output file is missing",
    "SystemFailure": "Slurm failed",
    "OutOfMemory": "ran out of memory",
    "NodesDown": "the nodes it needs are down or reserved",
}
_HELD = frozenset({"JobHeldUser", "JobHeldAdmin", "launch_failed_requeued_held", "MaxRequeue"})


def _code(reason: str) -> str:
    """Without the brackets that squeue puts around it; some reasons end with one of their own."""
    word = reason.strip()
    return word[1:-1] if word.startswith("(") and word.endswith(")") else word


def reason_in_words(reason: str) -> str:
    """A sentence for Slurm's reason; limits and unknown ones as Slurm names them."""
    code = _code(reason)
    if code.lower() in ("", "none", "null", "n/a"):
        return ""
    base, _, rest = code.partition(",")
    if code in _REASONS:
        return _REASONS[code]
    if base in _REASONS:
        detail = rest.strip("_").replace("_", " ", 1).replace(":", ": ", 1)
        return f"{_REASONS[base]} ({detail})"
    if code.startswith(("Nodes_required_for_job_are_DOWN", "Nodes required for job are DOWN")):
        return _REASONS["NodesDown"]
    if code.startswith(("QOS", "Assoc", "Max")):
        return f"a limit of the account, user or QOS is reached ({code})"
    return code


def is_held(reason: str) -> bool:
    """Whether nothing will happen until somebody releases the job."""
    code = _code(reason)
    return code in _HELD or code.lower().startswith(("jobheld", "launch_failed_requeued_held"))
