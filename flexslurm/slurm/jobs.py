"""What Slurm says about jobs, read from squeue's rows; never guesses: unknown stays unknown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from flexslurm.errors import SlurmError
from flexslurm.slurm.jobids import parse_job_id
from flexslurm.slurm.nodelist import expand_told
from flexslurm.slurm.reasons import is_held, reason_in_words
from flexslurm.slurm.records import optional
from flexslurm.slurm.states import JobState, job_state
from flexslurm.slurm.times import parse_time, told_duration

SEPARATOR = "\x1f"

# Fields of squeue --Format and the width asked for. Slurm cuts longer values off without a word,
# so a value as long as its field is asked for again by other means.
FIELDS: tuple[tuple[str, int], ...] = (
    ("jobid", 24),
    ("state", 32),
    ("reason", 160),
    ("nodelist", 1024),
    ("batchhost", 128),
    ("partition", 128),
    ("name", 128),
    ("restartcnt", 12),
    ("preempttime", 32),
    ("starttime", 32),
    ("endtime", 32),
    ("timelimit", 32),
    ("hetjobid", 24),
    ("hetjoboffset", 24),
    ("exit_code", 16),
    ("workdir", 512),
)


@dataclass(frozen=True, slots=True)
class JobInfo:
    """One job as it was at one look. Times are seconds from that look on: clocks differ."""

    id: str
    state: JobState
    reason: str = ""
    """In words; empty where there is nothing to say."""
    nodes: tuple[str, ...] = ()
    preempt_in_s: float | None = None
    """Seconds until the promised end of a preemption under way (it may be past); None: none is.

    The job's state stays RUNNING meanwhile.
    """
    end_in_s: float | None = None
    """Seconds until the time limit ends it; None: no limit, not started, or not told."""
    restarts: int = 0
    exit_code: int | None = None
    """Known for ended jobs only; negative: the signal."""
    name: str = ""
    partition: str = ""
    known: bool = True
    """False: nobody knows this id (any more). That is no proof that the job has ended."""
    held: bool = False
    """Waits for somebody to release it: tell the user."""
    started_ago_s: float | None = None
    batch_host: str | None = None
    code: str = ""
    """The reason as Slurm names it."""
    work_dir: str = ""
    """Where it was submitted from: tells the jobs of services of one name apart."""

    @property
    def orphaned(self) -> bool:
        """Runs without its batch host: an allocation whose script is gone. Cancel it."""
        return (
            self.state is JobState.RUNNING
            and self.batch_host is not None
            and bool(self.nodes)
            and self.batch_host not in self.nodes
        )


def unknown(job_id: str, reason: str = "Slurm does not know this job any more") -> JobInfo:
    return JobInfo(job_id, JobState.UNKNOWN, reason, known=False)


def format_option() -> str:
    """The value of squeue --Format: every field with a width and our separator."""
    return ",".join(f"{name}:{width}{SEPARATOR}" for name, width in FIELDS)


def split_rows(out: str) -> list[dict[str, str]]:
    """Rows of squeue as fields; lines of another form (banners, `CLUSTER:`) are left out."""
    rows = []
    for line in out.split("\n"):
        cells = line.split(SEPARATOR)
        if len(cells) == len(FIELDS) + 1:
            names = (name for name, _ in FIELDS)
            rows.append({n: cell.strip() for n, cell in zip(names, cells, strict=False)})
    return rows


def cut_off(row: Mapping[str, str]) -> bool:
    """Whether a value fills its field, so that Slurm may have cut it."""
    return any(len(row.get(name, "")) >= width for name, width in FIELDS)


def job_info(row: Mapping[str, str], now: float, grace_s: Mapping[str, float]) -> JobInfo:
    """A row as a JobInfo. `now` is the Unix time; `grace_s` gives the grace time by partition."""
    state = job_state(row.get("state", ""))
    reason = row.get("reason", "")
    end = parse_time(row.get("endtime", ""))
    limit = told_duration(row.get("timelimit", ""))
    started = parse_time(row.get("starttime", ""))
    running = state in (JobState.RUNNING, JobState.COMPLETING, JobState.SUSPENDED)
    end_in = end - now if running and end is not None and limit is not None else None
    return JobInfo(
        id=_plain_id(row),
        state=state,
        reason=reason_in_words(reason),
        nodes=expand_told(row.get("nodelist", "")),
        preempt_in_s=_preempt_in(row, now, end, grace_s) if running else None,
        end_in_s=end_in,
        restarts=_integer(row.get("restartcnt", "")) or 0,
        exit_code=_exit_code(row.get("exit_code", "")) if state.over else None,
        name=row.get("name", ""),
        partition=row.get("partition", ""),
        held=state is JobState.PENDING and is_held(reason),
        started_ago_s=now - started if running and started is not None else None,
        batch_host=optional(row.get("batchhost")),
        code=reason,
        work_dir=row.get("workdir", ""),
    )


def _preempt_in(
    row: Mapping[str, str], now: float, end: float | None, grace_s: Mapping[str, float]
) -> float | None:
    """Slurm hides the end of a preempted unlimited job, so it is computed from the grace time."""
    told = parse_time(row.get("preempttime", ""))
    if told is None:
        return None
    promised = told + grace_s.get(row.get("partition", ""), 0.0)
    return min(promised, end if end is not None and end >= told else promised) - now


def _plain_id(row: Mapping[str, str]) -> str:
    try:
        return parse_job_id(row.get("jobid", "")).base
    except SlurmError:
        return row.get("jobid", "")


def _integer(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 12 else None


def _exit_code(text: str) -> int | None:
    """`exit_code` of squeue: `0`, a wait status such as `15` or `256`, or `1:0`."""
    code, colon, number = text.partition(":")
    if colon:
        signal = _integer(number)
        return -signal if signal else _integer(code)
    status = _integer(code)
    if status is None:
        return None
    return -(status & 0x7F) if status & 0x7F else status >> 8


def by_id(rows: Iterable[JobInfo], wanted: Sequence[str]) -> dict[str, JobInfo]:
    """An answer for every id wanted: unknown for those Slurm did not list."""
    found = {info.id: info for info in rows}
    return {job_id: found.get(job_id) or unknown(job_id) for job_id in wanted}
