"""Asking and telling Slurm: the only place of flexslurm that starts Slurm's commands.

Every call has a deadline. `SlurmUnavailable` means that nothing is known: back off (see
`command.backoff_s`) and keep what was known before. Never calls a shell, never guesses.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flexslurm.config.site import SlurmSettings
from flexslurm.errors import SlurmError
from flexslurm.slurm import jobs
from flexslurm.slurm.backfill import NodeRoom, node_room
from flexslurm.slurm.command import Completed, clean_env, failure, run
from flexslurm.slurm.gres import Gres, gpus_of, parse_gres
from flexslurm.slurm.jobids import JobId, parse_job_id, submitted_id
from flexslurm.slurm.jobs import JobInfo
from flexslurm.slurm.json_forms import jobs_from, jobs_of
from flexslurm.slurm.nodelist import expand_told
from flexslurm.slurm.records import optional, parse_records, parse_settings
from flexslurm.slurm.states import NodeState, node_state
from flexslurm.slurm.times import told_duration

_VERSION = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?")
_STARTS = (("starttime", 32), ("schednodes", 1024))
_GONE = ("invalid job id", "already completing or completed", "job/step already")


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """One node, as `scontrol show node` tells it."""

    name: str
    state: NodeState
    gres: tuple[Gres, ...]
    cpus: int
    memory_bytes: int
    partitions: tuple[str, ...]
    reason: str | None
    address: str

    @property
    def gpus(self) -> dict[str | None, int]:
        """Whole GPUs by Slurm type."""
        return gpus_of(list(self.gres))


@dataclass(frozen=True, slots=True)
class PartitionInfo:
    """One partition, as `scontrol show partition` tells it; times None: no limit."""

    name: str
    nodes: tuple[str, ...]
    up: bool
    preempt_mode: str
    priority_tier: int
    grace_s: float
    max_time_s: float | None
    default_time_s: float | None
    default: bool


class SlurmClient:
    """Slurm's commands as calls; one per process asks, so that one clock paces all of them."""

    def __init__(
        self, settings: SlurmSettings | None = None, *, environ: Mapping[str, str] | None = None
    ) -> None:
        self.settings = settings or SlurmSettings()
        self.env = clean_env(self.settings.conf, environ)

    # --------------------------------------------------------------------------- commands

    def command(self, name: str) -> str:
        """The site's own name of a command."""
        return self.settings.commands.get(name, name)

    def argv(self, name: str, *args: str) -> list[str]:
        """The command line, with the cluster where the site names one."""
        cluster = [f"--clusters={self.settings.cluster}"] if self.settings.cluster else []
        return [self.command(name), *cluster, *args]

    def call(self, name: str, *args: str, cwd: Path | None = None) -> Completed:
        """Run a command; raises SlurmError or SlurmUnavailable where it failed."""
        done = self._try(name, *args, cwd=cwd)
        if done.code:
            raise failure(done)
        return done

    def _try(self, name: str, *args: str, cwd: Path | None = None) -> Completed:
        argv = self.argv(name, *args)
        # Times are read as UTC: local ones are ambiguous once a year. Not so for sbatch, whose
        # environment becomes the job's.
        env = self.env if name == "sbatch" else self.env | {"TZ": "UTC"}
        return run(argv, env=env, timeout_s=self.settings.command_timeout, cwd=cwd)

    def available(self) -> bool:
        """Whether this machine has Slurm's commands; asks no daemon."""
        return shutil.which(self.command("sbatch"), path=self.env.get("PATH")) is not None

    # ------------------------------------------------------------------------------ asking

    def jobs(
        self, ids: Sequence[str], grace_s: Mapping[str, float] | None = None
    ) -> dict[str, JobInfo]:
        """All these jobs of ours in one call; ids Slurm does not list are `known=False`.

        squeue filters by user on the server; asking by several ids would fetch everybody's jobs.
        """
        if not ids:
            return {}
        if self.settings.rest is not None:
            from flexslurm.slurm.rest import ask_rest

            answer = ask_rest(self.settings.rest, "/jobs/", self.settings.command_timeout)
            return jobs_of(answer, ids, time.time(), grace_s or {})
        now = time.time()
        wanted = set(ids)
        rows = [row for row in self._rows() if row["jobid"] in wanted]
        rows = [self._whole(row) if jobs.cut_off(row) else row for row in rows]
        return jobs.by_id([jobs.job_info(row, now, grace_s or {}) for row in rows], list(ids))

    def survey(
        self, ids: Sequence[str], folder: Path, grace_s: Mapping[str, float]
    ) -> tuple[dict[str, JobInfo], tuple[JobInfo, ...]]:
        """As `jobs`, and all our jobs submitted from `folder` that are not over; in one call."""
        now, wanted, mine = time.time(), set(ids), _names_of(folder)
        if self.settings.rest is not None:
            from flexslurm.slurm.rest import ask_rest

            answer = ask_rest(self.settings.rest, "/jobs/", self.settings.command_timeout)
            ours = jobs_from(answer, mine, now, grace_s)
            return jobs_of(answer, ids, now, grace_s), tuple(ours)
        rows = [row for row in self._rows() if row["jobid"] in wanted or _within(row, mine)]
        rows = [self._whole(row) if jobs.cut_off(row) else row for row in rows]
        infos = [jobs.job_info(row, now, grace_s) for row in rows]
        found = (info for info in infos if info.work_dir in mine and not info.state.over)
        return jobs.by_id(infos, list(ids)), tuple(found)

    def named(self, name: str, folder: Path) -> list[str]:
        """Ids of our jobs of this name that are not over and were submitted from `folder`."""
        now = time.time()
        found = (jobs.job_info(row, now, {}) for row in self._rows() if row["name"] == name)
        ids = [info.id for info in found if not info.state.over]
        return [i for i in ids if self.job_record(i).get("WorkDir") in _names_of(folder)]

    def _rows(self) -> list[dict[str, str]]:
        done = self.call(
            "squeue", f"--user={os.geteuid()}", "--states=all", "--noheader", "--array",
            f"--Format={jobs.format_option()}",
        )  # fmt: skip
        return jobs.split_rows(done.out)

    def _whole(self, row: dict[str, str]) -> dict[str, str]:
        """A row with a value that squeue may have cut, from scontrol, which cuts nothing."""
        names = {
            "reason": "Reason", "nodelist": "NodeList", "name": "JobName", "workdir": "WorkDir"
        }  # fmt: skip
        record = self.job_record(row["jobid"])
        found = {ours: record[theirs] for ours, theirs in names.items() if theirs in record}
        return row | found

    def job_record(self, job_id: str) -> dict[str, str]:
        """Everything `scontrol show job` says; raises SlurmError for an unknown id."""
        out = self.call("scontrol", "show", "job", "-o", parse_job_id(job_id).base).out
        records = parse_records(out, "JobId")
        if not records:
            raise SlurmError(f"scontrol says nothing about job {job_id}")
        return records[0]

    def nodes(self, names: Sequence[str] = ()) -> list[NodeInfo]:
        """All nodes, or those of these names."""
        out = self.call("scontrol", "show", "node", "-o", *filter(None, [",".join(names)])).out
        return [_node_info(record) for record in parse_records(out, "NodeName")]

    def rooms(self) -> list[NodeRoom]:
        """All nodes with what is used of them."""
        out = self.call("scontrol", "show", "node", "-o", "-d").out
        return [node_room(record) for record in parse_records(out, "NodeName")]

    def reservations(self) -> list[dict[str, str]]:
        out = self.call("scontrol", "show", "reservation", "-o").out
        return parse_records(out, "ReservationName")

    def starts(self) -> list[tuple[str, str]]:
        """When and on which nodes Slurm expects everybody's pending jobs to start."""
        form = ",".join(f"{name}:{width}{jobs.SEPARATOR}" for name, width in _STARTS)
        done = self.call("squeue", "--start", "--states=PENDING", "--noheader", f"--Format={form}")
        cells = [line.split(jobs.SEPARATOR) for line in done.out.split("\n")]
        return [(row[0].strip(), row[1].strip()) for row in cells if len(row) == len(_STARTS) + 1]

    def partitions(self) -> list[PartitionInfo]:
        out = self.call("scontrol", "show", "partition", "-o").out
        return [_partition_info(record) for record in parse_records(out, "PartitionName")]

    def config(self) -> dict[str, str]:
        """The daemon's own configuration: site files are stale or absent on many nodes."""
        return parse_settings(self.call("scontrol", "show", "config").out)

    def topology(self) -> str:
        """Switches and what hangs on them, as `topology.conf` has them; empty without any."""
        out = self.call("scontrol", "show", "topology").out
        lines = (line for line in out.splitlines() if "=" in line)
        return "".join(f"{line}\n" for line in lines)

    def version(self) -> tuple[int, int, int]:
        """Major, minor and micro of the commands, as (22, 5, 8). Raises SlurmError."""
        out = self.call("scontrol", "--version").out
        found = release_in(out)
        if found is None:
            raise SlurmError(f"cannot read the Slurm version in '{out.strip()[:80]}'")
        return found

    # ----------------------------------------------------------------------------- telling

    def submit(self, script: Path, *options: str, cwd: Path | None = None) -> JobId:
        """Hand a script file to sbatch; raises SlurmError with Slurm's own words where refused."""
        return submitted_id(self.call("sbatch", "--parsable", *options, str(script), cwd=cwd).out)

    def cancel(self, ids: Sequence[str]) -> None:
        """End these jobs; those that have ended already are no error."""
        if not ids:
            return
        done = self._try("scancel", *(parse_job_id(job_id).base for job_id in ids))
        if done.code and not _only_gone(done):
            raise failure(done)

    def resize(self, job_id: str, nodes: Sequence[str], folder: Path) -> None:
        """Take all but these nodes from a running job: what still runs on them is killed.

        Raises SlurmError where the site forbids it. scontrol leaves a script for the job's shell in
        `folder`, which nobody here needs.
        """
        job = parse_job_id(job_id).base
        self.call("scontrol", "update", f"JobId={job}", f"NodeList={','.join(nodes)}", cwd=folder)
        for end in ("sh", "csh"):
            (folder / f"slurm_job_{job}_resize.{end}").unlink(missing_ok=True)

    def requeue(self, job_id: str) -> None:
        self.call("scontrol", "requeue", parse_job_id(job_id).base)


def release_in(text: str) -> tuple[int, int, int] | None:
    """Slurm's release as `scontrol` writes it: (22, 5, 8) in "slurm 22.05.8"; None without one."""
    match = _VERSION.search(text)
    return None if match is None else (int(match[1]), int(match[2]), int(match[3] or 0))


def _names_of(folder: Path) -> frozenset[str]:
    """As it was given, and as sbatch finds it: home directories are often links."""
    return frozenset({str(folder), os.path.realpath(folder)})


def _within(row: Mapping[str, str], folders: Collection[str]) -> bool:
    """Whether a job was submitted from there, as far as squeue shows its directory."""
    told = row.get("workdir", "")
    return bool(told) and any(folder.startswith(told) for folder in folders)


def _only_gone(done: Completed) -> bool:
    lines = [line.lower() for line in done.err.splitlines() if line.strip()]
    return bool(lines) and all(any(word in line for word in _GONE) for line in lines)


def _gres(text: str) -> tuple[Gres, ...]:
    """A node's GRES; nothing where they cannot be read: other nodes still can."""
    try:
        return tuple(parse_gres(text))
    except SlurmError:
        return ()


def _node_info(record: Mapping[str, str]) -> NodeInfo:
    return NodeInfo(
        name=record["NodeName"],
        state=node_state(record.get("State", "")),
        gres=_gres(record.get("Gres", "")),
        cpus=_number(record.get("CPUTot")),
        memory_bytes=_number(record.get("RealMemory")) * 2**20,
        partitions=tuple(filter(None, record.get("Partitions", "").split(","))),
        reason=optional(record.get("Reason")),
        address=record.get("NodeAddr", record["NodeName"]),
    )


def _partition_info(record: Mapping[str, str]) -> PartitionInfo:
    return PartitionInfo(
        name=record["PartitionName"],
        nodes=expand_told(record.get("Nodes", "")),
        up=record.get("State", "UP").upper() == "UP",
        preempt_mode=record.get("PreemptMode", "OFF"),
        priority_tier=_number(record.get("PriorityTier")),
        grace_s=float(_number(record.get("GraceTime"))),
        max_time_s=told_duration(record.get("MaxTime", "")),
        default_time_s=told_duration(record.get("DefaultTime", "")),
        default=record.get("Default", "NO").upper() == "YES",
    )


def _number(text: str | None) -> int:
    digits = re.match(r"\d{1,15}", text or "", re.ASCII)
    return int(digits[0]) if digits else 0
