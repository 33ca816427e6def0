"""Slurm's reasons for what a job does, in words, with what to do about it; a total map.

A reason that is not known here is said as Slurm names it. Names are those of Slurm's
`enum job_state_reason`, 20.11 to 25.11; limits of accounts and QOS are named by a scheme of Slurm's
own (`QOSMaxGRESPerUser`, `AssocGrpCpuLimit`), which is read rather than listed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum


class PendingVerdict(StrEnum):
    """What a reason means for whoever waits for the job."""

    WAITS = "waits"
    """It will start by itself, sooner or later."""
    HELD = "held"
    """Nothing happens until somebody releases it."""
    NEVER = "never"
    """As it was asked for it will not start."""
    ENDED = "ended"
    """Why a job is over."""
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Reason:
    """A sentence, and what to do; both empty where there is nothing to say."""

    words: str
    todo: str = ""
    verdict: PendingVerdict = PendingVerdict.UNKNOWN

    @property
    def sentence(self) -> str:
        return f"{self.words}: {self.todo}" if self.todo else self.words


_RELEASE = "it needs scontrol release"
_WAITS: dict[str, str] = {
    "BeginTime": "requeued, waits until Slurm lets it start again",
    "Priority": "other jobs come first",
    "Resources": "waits for nodes to become free",
    "Dependency": "waits for another job",
    "ReqNodeNotAvail": "a node it asked for is not available",
    "NodesDown": "the nodes it needs are down or reserved",
    "Reservation": "waits for its reservation",
    "Licenses": "waits for a licence",
    "Cleaning": "its last run is still being cleaned up",
    "Prolog": "the nodes' prolog runs",
    "FrontEndDown": "no front end node is up",
    "Reserved": "its nodes are reserved for it while others end",
    "BurstBufferResources": "waits for room in the burst buffer",
    "BurstBufferStageIn": "its files are being brought to the burst buffer",
    "JobArrayTaskLimit": "as many tasks of its array run as may",
    "PowerNotAvail": "waits for electrical power",
    "PowerReserved": "the power it needs is reserved",
    "FedJobLock": "clusters of the federation settle which of them runs it",
    "WaitingForScheduling": "Slurm has not looked at it yet",
    "SchedDefer": "Slurm schedules later",
    "MaxPowerPerUser": "the limit of power is reached",
    "HetJobResources": "waits for all of its components' nodes",
}
_SHUT = "ask an administrator when it opens, or use another one"
_SHUT_WORDS: dict[str, str] = {
    "PartitionDown": "the partition is down",
    "PartitionInactive": "the partition takes no jobs now",
}
_NEVER: dict[str, tuple[str, str]] = {
    "DependencyNeverSatisfied": ("waits for a job that will never end as asked", "cancel it"),
    "PartitionNodeLimit": (
        "asks for more nodes than the partition allows",
        "ask for fewer nodes or another partition in 'pool'",
    ),
    "PartitionTimeLimit": (
        "asks for more time than the partition allows",
        "set a shorter 'walltime' in 'pool'",
    ),
    "ReservationDeleted": ("its reservation is gone", "take it out of sbatch_args"),
    "BadConstraints": (
        "no node can ever satisfy what it asks for",
        "look at gpu_type, gpus and the partition's constraint",
    ),
    "NodeConfiguration": (
        "no node has what it asks for", "look at gpus, cpus_per_gpu and memory",
    ),
    "AccountNotAllowed": ("the account may not use this partition", "set partitions.*.account"),
    "QOSNotAllowed": ("the QOS may not use this partition", "set partitions.*.qos"),
    "InvalidAccount": ("the account is not valid", "set partitions.*.account in the site file"),
    "InvalidQOS": ("the QOS is not valid", "set partitions.*.qos in the site file"),
    "QOSUsageThreshold": ("the account has used more than its QOS allows", "wait, or use another"),
    "JobArrayTaskLimitExceeded": ("its array has too many tasks", "ask for fewer"),
    "DeadLine": ("its deadline cannot be met", "take --deadline out of sbatch_args"),
    "AccountingPolicy": ("accounting forbids it", "ask an administrator"),
    "BurstBufferOperation": ("the burst buffer refused it", "look at sbatch_args"),
}  # fmt: skip
_HELD: dict[str, tuple[str, str]] = {
    "JobHeldUser": ("held by its user", "release it with scontrol release"),
    "JobHeldAdmin": ("held by an administrator", _RELEASE),
    "launch_failed_requeued_held": ("could not be launched and is held", _RELEASE),
    "JobHoldMaxRequeue": ("requeued too often and held", _RELEASE),
    "MaxRequeue": ("requeued too often and held", _RELEASE),
    "job_requeued_in_held_state": ("requeued and held", _RELEASE),
}
_ENDED: dict[str, str] = {
    "JobLaunchFailure": "could not be launched",
    "FailedBurstBuffer": "the burst buffer failed",
    "NodeDown": "a node of it went down",
    "TimeLimit": "reached its time limit",
    "InactiveLimit": "was inactive for too long",
    "Preempted": "preempted",
    "NonZeroExitCode": "ended with an error",
    "RaisedSignal:53(Real-time_signal_19)": "the directory of its output file is missing",
    "SystemFailure": "Slurm failed",
    "OutOfMemory": "ran out of memory",
    "BootFailed": "its nodes did not boot",
    "PartitionConfigChanged": "the partition was changed",
    "ReconfigFail": "its nodes could not be reconfigured",
}


def _table() -> dict[str, Reason]:
    found = {name: Reason(words, "", PendingVerdict.WAITS) for name, words in _WAITS.items()}
    found |= {
        name: Reason(words, _SHUT, PendingVerdict.WAITS) for name, words in _SHUT_WORDS.items()
    }
    for table, verdict in ((_NEVER, PendingVerdict.NEVER), (_HELD, PendingVerdict.HELD)):
        found |= {name: Reason(words, todo, verdict) for name, (words, todo) in table.items()}
    return found | {name: Reason(words, "", PendingVerdict.ENDED) for name, words in _ENDED.items()}


_REASONS = _table()
_LIMIT = re.compile(
    r"^(?P<owner>QOS|Assoc)?(?P<kind>Grp|Max|Min)?(?P<what>[A-Za-z]+?)"
    r"(?P<time>Run)?(?P<minutes>Minutes)?(?P<who>PerUser|PerAccount|PerJob|PerNode|Per)?"
    r"(?P<limit>Limit)?$"
)
_WHAT = {
    "Cpu": "CPUs", "CPU": "CPUs", "Node": "nodes", "Nodes": "nodes", "GRES": "GPUs",
    "Gres": "GPUs", "Mem": "memory", "Memory": "memory", "Jobs": "running jobs",
    "Job": "running jobs", "SubmitJobs": "submitted jobs", "Submit": "submitted jobs",
    "Wall": "walltime", "WallDuration": "walltime", "Billing": "billing units", "BB": "burst "
    "buffer", "Energy": "energy", "License": "licences", "Tres": "resources", "TRES": "resources",
    "Unknown": "resources", "Time": "time", "Cpus": "CPUs", "JobAccrue": "waiting jobs",
    "UnknownTRES": "resources", "Threshold": "priority", "Prio": "priority",
    "WallDurationPerJob": "walltime",
}  # fmt: skip
_WHO = {
    "PerUser": "each user", "PerAccount": "each account", "PerJob": "each job",
    "PerNode": "each node of a job",
}  # fmt: skip


def _code(reason: str) -> str:
    """Without the brackets that squeue puts around it; some reasons end with one of their own."""
    word = reason.strip()
    return word[1:-1] if word.startswith("(") and word.endswith(")") else word


def explain(reason: str) -> Reason:
    """What Slurm's reason says; an unknown one is said as Slurm names it."""
    code = _code(reason)
    if code.lower() in ("", "none", "null", "n/a"):
        return Reason("")
    base, _, rest = code.partition(",")
    if code in _REASONS:
        return _REASONS[code]
    if base in _REASONS:
        detail = rest.strip("_").replace("_", " ", 1).replace(":", ": ", 1)
        found = _REASONS[base]
        return Reason(f"{found.words} ({detail})", found.todo, found.verdict)
    if code.startswith(("Nodes_required_for_job_are_DOWN", "Nodes required for job are DOWN")):
        return _REASONS["NodesDown"]
    if code.lower().startswith(("jobheld", "launch_failed_requeued_held")):
        return Reason(code, _RELEASE, PendingVerdict.HELD)
    return _limit(code) or Reason(code)


def _limit(code: str) -> Reason | None:
    """A limit of an account or a QOS. One of each job never goes away by waiting."""
    if not code.startswith(("QOS", "Assoc", "Max", "Grp")):
        return None
    match = _LIMIT.match(code)
    what = _WHAT.get(match["what"]) if match is not None else None
    if match is None or what is None:
        return Reason(f"a limit of the account, user or QOS is reached ({code})", "",
                      PendingVerdict.WAITS)  # fmt: skip
    owner = "the QOS" if match["owner"] == "QOS" else "the account"
    if match["minutes"]:
        what = f"minutes of {what}" + (" in use" if match["time"] else "")
    if match["kind"] == "Min":
        words = f"asks for less than the least {what} that {owner} allows"
        return Reason(f"{words} ({code})", "ask for more in 'pool'", PendingVerdict.NEVER)
    whose = _WHO.get(match["who"] or "", "everybody in it" if match["kind"] == "Grp" else "a user")
    words = f"a limit of {owner} is reached: {what} of {whose} ({code})"
    if match["who"] in ("PerJob", "PerNode") or "Wall" in (match["what"]):
        never = match["kind"] != "Grp"
        todo = "ask for less in 'pool'" if never else ""
        return Reason(words, todo, PendingVerdict.NEVER if never else PendingVerdict.WAITS)
    return Reason(words, "", PendingVerdict.WAITS)


def reason_in_words(reason: str) -> str:
    """A sentence for Slurm's reason."""
    return explain(reason).sentence


def is_held(reason: str) -> bool:
    """Whether nothing will happen until somebody releases the job."""
    return explain(reason).verdict is PendingVerdict.HELD


# ------------------------------------------------------------------------------ submissions


@dataclass(frozen=True, slots=True)
class Denial:
    """Why sbatch said no."""

    words: str
    todo: str = ""
    lasting: bool = True
    """The same job would be refused again, until a file or a limit is changed."""

    @property
    def sentence(self) -> str:
        return f"{self.words}: {self.todo}" if self.todo else self.words


_FILE = "correct it in the site file"
_REFUSALS: tuple[tuple[str, Denial], ...] = (
    ("invalid account or account/partition", Denial(
        "the account is not valid in this partition", f"partitions.*.account: {_FILE}")),
    ("account not permitted", Denial("the account may not use the partition",
        f"partitions.*.account: {_FILE}")),
    ("invalid partition", Denial("Slurm has no such partition", "see sinfo")),
    ("invalid qos", Denial("the QOS is not valid", f"partitions.*.qos: {_FILE}")),
    ("qos not permitted", Denial("the QOS may not use the partition",
        f"partitions.*.qos: {_FILE}")),
    ("group not permitted", Denial("the user's group may not use the partition",
        "ask an administrator, or use another one")),
    ("access/permission denied", Denial("Slurm denies it", "ask an administrator")),
    ("user id", Denial("Slurm does not know this user", "ask an administrator")),
    ("invalid generic resource", Denial("no such GPUs are configured in Slurm",
        "gpu_types.*.slurm_type: see scontrol show node")),
    ("node configuration is not available", Denial("no node has what is asked for",
        "fewer gpus or cpus_per_gpu, or another partition")),
    ("node configuration not available", Denial("no node has what is asked for",
        "fewer gpus or cpus_per_gpu, or another partition")),
    ("node count specification", Denial("the number of nodes is not possible there",
        "fewer nodes in 'pool'")),
    ("memory required by task", Denial("no node has that much memory", "look at sbatch_args")),
    ("more processors requested", Denial("more CPUs than a job may have",
        "fewer gpus or cpus_per_gpu")),
    ("time limit is invalid", Denial("the walltime is more than is allowed",
        "a shorter 'walltime' in 'pool'")),
    ("accounting/qos policy", Denial("a limit of the account or QOS is reached",
        "fewer pilots or a shorter 'walltime'; see sacctmgr show assoc", lasting=False)),
    ("max submit", Denial("too many jobs of this user are submitted", lasting=False)),
    ("partition not available", Denial("the partition is inactive or drained", lasting=False)),
    ("reservation is invalid", Denial("the reservation is not valid", "look at sbatch_args")),
    ("feature specification", Denial("no node has that feature",
        f"partitions.*.constraint: {_FILE}")),
    ("dependency problem", Denial("the dependency is not possible", "look at sbatch_args")),
    ("temporarily unable to accept", Denial("Slurm takes no more jobs now", lasting=False)),
    ("i/o error writing script", Denial("slurmctld cannot write the script down",
        "ask an administrator", lasting=False)),
    ("reached jobs limit", Denial("Slurm takes no more jobs now", lasting=False)),
    ("unable to open file", Denial("sbatch cannot read the script", "is the shared "
        "directory there?", lasting=False)),
)  # fmt: skip


def refusal(text: str) -> Denial:
    """What sbatch's answer means; an unknown one is said as it is, and may pass."""
    lowered = " ".join(text.lower().split())
    for phrase, found in _REFUSALS:
        if phrase in lowered:
            return Denial(f"{found.words} ({_short(text)})", found.todo, found.lasting)
    return Denial(_short(text), lasting=False)


def _short(text: str) -> str:
    said = re.sub(r"^(sbatch: )?(error: )?(Batch job submission failed: )?", "", text.strip())
    said = said.splitlines()[0] if said else "no reason was given"
    return said if len(said) <= 200 else said[:199] + "…"
