"""Slurm's durations and points in time as text; reads no clock."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from flexslurm.errors import SlurmError

_FOREVER = frozenset(
    {"unlimited", "infinite", "none", "n/a", "not_set", "partition_limit", "-1", ""}
)
_YEAR_S = 365 * 86400.0
_DURATION = re.compile(
    r"^(?:(\d{1,9})-)?(\d{1,9})(?::(\d{1,9}))?(?::(\d{1,9}))?(?:\.\d+)?$", re.ASCII
)
_TIME = re.compile(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", re.ASCII)


def parse_duration(text: str) -> float | None:
    """Seconds of a time limit; None for no limit.

    `30` is minutes, `30:00` minutes and seconds, `2:00:00` hours, `2-12` days and hours. Exactly
    365 days is how Slurm stores *no limit* when one of its scheduler loops starts the job. Raises
    SlurmError for anything else.
    """
    word = text.strip()
    if word.lower() in _FOREVER:
        return None
    match = _DURATION.match(word)
    if match is None:
        raise SlurmError(f"cannot read the time limit '{text[:40]}'")
    days, *rest = match.groups()
    numbers = [int(part) for part in rest if part is not None]
    if days is not None:
        hours, minutes, seconds = [*numbers, 0, 0][:3]
    elif len(numbers) == 3:
        hours, minutes, seconds = numbers
    elif len(numbers) == 2:
        hours, (minutes, seconds) = 0, numbers
    else:
        hours, minutes, seconds = 0, numbers[0], 0
    total = float(int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds)
    return None if total == _YEAR_S else total


def told_duration(text: str) -> float | None:
    """As `parse_duration`, for what a Slurm command printed: None also for what cannot be read."""
    try:
        return parse_duration(text)
    except SlurmError:
        return None


def format_duration(seconds: float) -> str:
    """For `--time`: whole minutes rounded up, as `D-HH:MM:SS`."""
    minutes = max(1, -(-round(seconds) // 60))
    days, rest = divmod(minutes, 1440)
    return f"{days}-{rest // 60:02d}:{rest % 60:02d}:00"


def parse_time(text: str) -> float | None:
    """A point in time as Slurm prints it under TZ=UTC, as a Unix time; None for `Unknown`.

    Never raises: a text that is no time means that Slurm does not tell.
    """
    word = text.strip()
    if not _TIME.match(word):
        return None
    try:
        return datetime.fromisoformat(word).replace(tzinfo=UTC).timestamp()
    except (ValueError, OverflowError, OSError):
        return None
