"""Job ids in the forms that Slurm prints: plain, array, heterogeneous, with a cluster."""

from __future__ import annotations

import re
from dataclasses import dataclass

from flexslurm.errors import SlurmError

_ID = re.compile(
    r"^(?P<base>\d+)"
    r"(?:\+(?P<het>\d+)|_(?P<task>\d+)|_\[(?P<tasks>[\d,:%-]+)(?:\.\.\.)?\])?"
    r"(?:\.(?P<step>[A-Za-z0-9_+]+))?"
    r"(?:;(?P<cluster>[A-Za-z0-9_.-]+))?$",
    re.ASCII,
)
_SUBMITTED = re.compile(r"^Submitted batch job (\d+)(?: on cluster (\S+))?\s*$", re.ASCII)
_PARSABLE = re.compile(r"^(\d+)(?:;(\S+))?$", re.ASCII)


@dataclass(frozen=True, slots=True)
class JobId:
    """`base` is the id to ask for; `het` the component of a heterogeneous job."""

    base: str
    het: int | None = None
    task: str | None = None
    step: str | None = None
    cluster: str | None = None


def parse_job_id(text: str) -> JobId:
    """Read `7`, `7+1`, `7_3`, `7_[1-4]`, `7.batch`, `7;cluster`; raises SlurmError."""
    match = _ID.match(text.strip())
    if match is None:
        raise SlurmError(f"'{text[:40]}' is not a Slurm job id")
    het = match["het"]
    return JobId(
        base=match["base"],
        het=None if het is None else int(het),
        task=match["task"] or match["tasks"],
        step=match["step"],
        cluster=match["cluster"],
    )


def submitted_id(out: str) -> JobId:
    """The id in what sbatch printed on stdout, with --parsable or without.

    A site's filter may print lines before it ("This job 7 will be charged"): the last line that is
    an answer counts. Raises SlurmError where there is none.
    """
    for line in reversed(out.splitlines()):
        match = _PARSABLE.match(line.strip()) or _SUBMITTED.match(line.strip())
        if match is not None:
            return JobId(base=match[1], cluster=match[2])
    raise SlurmError(f"sbatch gave no job id: '{out.strip()[:200]}'")
