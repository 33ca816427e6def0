"""Which logs of a service are meant, and how they are listed; pure, opens no file.

Below `logs/` the first name is the part: `head`, or a pilot. In it are the logs of each of its
jobs, `SERVICE.PART.JOB.NODE.log`, and a directory `JOB.NODE/` with those of its workers on a node.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from flexslurm.config.schema import nearest_hint
from flexslurm.config.size_words import show_bytes
from flexslurm.errors import ServiceError

_JOB = r"(local-[0-9]+|[0-9]+(?:[_+][0-9]+)?)"
_WORKERS_OF = re.compile(rf"{_JOB}\.")


@dataclass(frozen=True, slots=True)
class LogFile:
    """One log."""

    name: str
    """Its path below `logs/`."""
    size_bytes: int
    written_at: float
    """Of the same clock as the `now` it is shown by, in seconds."""

    @property
    def part(self) -> str:
        return self.name.split("/", 1)[0]

    @property
    def workers(self) -> bool:
        """Whether it is of a worker, or of what starts them."""
        return self.name.count("/") > 1

    @property
    def job(self) -> str | None:
        """The job it is of; None where its name does not say."""
        rest = self.name.split("/")[1:]
        if len(rest) > 1:
            found = _WORKERS_OF.match(rest[0])
        else:
            last, part = "".join(rest), re.escape(self.part)
            here = re.fullmatch(rf"(?P<name>(?:.*\.)?{part})\.{_JOB}\.(?P=name)-[0-9]+\.log", last)
            if here is not None:  # a local process: its node is called as the job is
                return here[2]
            found = re.match(rf"(?:.*\.)?{part}\.{_JOB}\.", last)
        return None if found is None else found[1]


def choose(files: Sequence[LogFile], part: str, jobs: Collection[str]) -> list[LogFile]:
    """What PART means: `head` or a pilot, a job, a worker, or a path as it is listed.

    Of a head or a pilot: the logs of its job that runs now (one of `jobs`), else of its latest, and
    not its workers'. Raises ServiceError where there is none.
    """
    own = [file for file in files if file.part == part and not file.workers]
    if own:
        latest = max(own, key=lambda file: file.written_at).job
        now = [file for file in own if file.job in jobs]
        return now or [file for file in own if file.job == latest]
    path = part.strip("/")
    chosen = [file for file in files if f"{file.name}/".startswith(f"{path}/")]
    chosen = chosen or [file for file in files if file.job == part]
    chosen = chosen or [file for file in files if path in _short_names(file)]
    if not chosen:
        known = {name for file in files for name in (file.part, file.name, *_short_names(file))}
        hint = nearest_hint(part, sorted(known)) if files else None
        if hint is None or not hint.startswith("did you mean"):
            hint = f"there is: {', '.join(sorted({file.part for file in files})) or 'none yet'}"
        raise ServiceError(f"there is no log of '{part}'", hint=hint)
    return chosen


def _short_names(file: LogFile) -> tuple[str, ...]:
    """`worker-0-w-1f.log`, `worker-0-w-1f` and `w-1f` for `.../worker-0-w-1f.log`."""
    last = file.name.rsplit("/", 1)[-1]
    stem = last.removesuffix(".log")
    worker = re.fullmatch(r"worker-[0-9]+-(w-.+)", stem)
    return (last, stem) if worker is None else (last, stem, worker[1])


def listing(files: Iterable[LogFile], jobs: Collection[str], now: float) -> list[str]:
    """All logs by job, those of `jobs` (which run now) first."""
    running: dict[tuple[str, str | None], list[LogFile]] = {}
    earlier: dict[tuple[str, str | None], list[LogFile]] = {}
    for file in sorted(files, key=lambda file: (file.part != "head", file.part, file.written_at)):
        group = running if file.job in jobs else earlier
        group.setdefault((file.part, file.job), []).append(file)
    lines = _groups(running, now)
    if earlier:
        lines += (
            ["", "of earlier jobs:"]
            if running
            else ["none of its jobs is there now; of earlier ones:"]
        )
        lines += _groups(earlier, now)
    return lines or ["no logs yet"]


def _groups(groups: dict[tuple[str, str | None], list[LogFile]], now: float) -> list[str]:
    lines = []
    for (part, job), found in groups.items():
        lines.append(part if job is None else f"{part}, job {job}")
        lines += [
            f"  {show_bytes(f.size_bytes):>10}  {age(now - f.written_at):>12}  {f.name}"
            for f in found
        ]
    return lines


def age(seconds: float) -> str:
    """How long ago, in the largest unit that counts one."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit} ago"
    return f"{max(seconds, 0.0):.0f} s ago"
