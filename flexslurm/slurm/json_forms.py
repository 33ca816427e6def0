"""Slurm's JSON in the forms of all its releases; asks nothing, and takes nothing it cannot read for
a fact: an unknown form gives None or UNKNOWN.

What changed: numbers were plain or null, and are `{set, infinite, number}` since data parser 39;
states were words, and are lists of words since 40; the nodes of a job were text, and are a
structure since 41; what is absent may be missing, null or empty. Failures stand in `errors` beside
empty answers, with HTTP status 200.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from flexslurm.errors import SlurmError, SlurmUnavailable
from flexslurm.slurm.command import is_unavailable
from flexslurm.slurm.jobs import JobInfo, by_id
from flexslurm.slurm.nodelist import expand_told
from flexslurm.slurm.reasons import is_held
from flexslurm.slurm.reasons import reason_in_words as in_words
from flexslurm.slurm.states import JobState, NodeState, job_state, node_state

_YEAR_S = 365 * 86400
_YEAR_MINUTES = 365 * 1440
INFINITE = float("inf")


def read_answer(text: str) -> dict[str, Any]:
    """The whole answer. Raises SlurmError where Slurm says no, or what it says is no answer."""
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        raise SlurmError(f"this is no answer of Slurm's: '{text.strip()[:80]}'") from None
    if not isinstance(answer, dict):
        raise SlurmError("this is no answer of Slurm's: it is no object")
    errors = [_error_words(error) for error in _list(answer.get("errors"))]
    if errors:
        words = "; ".join(errors)
        raise (SlurmUnavailable if is_unavailable(words) else SlurmError)(f"Slurm says: {words}")
    return answer


def _error_words(error: object) -> str:
    if not isinstance(error, dict):
        return str(error)
    told = [str(error[key]) for key in ("description", "error", "error_number") if error.get(key)]
    return ", ".join(told) or "an error without words"


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def number(value: object) -> float | None:
    """A number of any release: None where it is not set, INFINITE where there is no limit."""
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        return _finite_or_endless(value)
    if isinstance(value, Mapping):
        if value.get("infinite") is True:
            return INFINITE
        if value.get("set") is True:
            return number(value.get("number"))
    return None


def _finite_or_endless(value: float) -> float | None:
    """None for NaN, -Infinity and what no float holds, all of which Python's JSON reads."""
    try:
        told = float(value)
    except OverflowError:
        return None
    return told if told > -INFINITE else None


def words(value: object) -> list[str]:
    """One word or several, as a list."""
    if isinstance(value, str):
        return [value] if value else []
    return [word for word in _list(value) if isinstance(word, str)]


def node_state_of(record: Mapping[str, Any]) -> NodeState:
    """A node's state: base and flags apart (to 23.02) or in one list."""
    told = [*words(record.get("state")), *words(record.get("state_flags"))]
    return node_state("+".join(word.upper() for word in told))


def nodes_of(record: Mapping[str, Any]) -> tuple[str, ...]:
    """A job's nodes: in order, empty while it has none."""
    resources = record.get("job_resources")
    told: object = resources.get("nodes") if isinstance(resources, Mapping) else None
    if isinstance(told, Mapping):
        told = told.get("list")
    if not isinstance(told, str) or not told:
        told = record.get("nodes")
    return expand_told(told) if isinstance(told, str) else ()


def limit_s(record: Mapping[str, Any]) -> float | None:
    """A job's time limit; None: none. Some paths of Slurm store *none* as a year."""
    minutes = number(record.get("time_limit"))
    if minutes is None or minutes in (INFINITE, _YEAR_MINUTES):
        return None
    return minutes * 60.0


def exit_code_of(value: object) -> int | None:
    """A wait status (to 23.02), or a structure with return code and signal; negative: a signal."""
    if isinstance(value, Mapping) and "set" not in value:
        signal = value.get("signal")
        told = signal.get("id", signal.get("signal_id")) if isinstance(signal, Mapping) else None
        killed = number(told)
        if killed:
            return -int(killed)
        code = number(value.get("return_code"))
        return None if code is None or code == INFINITE else int(code)
    status = number(value)
    if status is None or status == INFINITE:
        return None
    return -(int(status) & 0x7F) if int(status) & 0x7F else int(status) >> 8


def job_of(record: Mapping[str, Any], now: float, grace_s: Mapping[str, float]) -> JobInfo:
    """One job; as `jobs.job_info`, which reads text."""
    state = job_state(words(record.get("job_state")))
    reason = record.get("state_reason")
    reason = reason if isinstance(reason, str) else ""
    running = state in (JobState.RUNNING, JobState.COMPLETING, JobState.SUSPENDED)
    start, end = _time(record.get("start_time")), _time(record.get("end_time"))
    if start is not None and end is not None and end - start == _YEAR_S:
        end = None
    # The end of an unlimited job is told only once it is preempted.
    limited = limit_s(record) is not None
    partition = str(record.get("partition") or "")
    batch_host = record.get("batch_host")
    return JobInfo(
        id=_id(record),
        state=state,
        reason=in_words(reason),
        code=reason,
        nodes=nodes_of(record),
        preempt_in_s=_preempt_in(record, now, end, grace_s.get(partition, 0.0))
        if running
        else None,
        end_in_s=end - now if running and limited and end is not None else None,
        restarts=int(min(number(record.get("restart_cnt")) or 0, 2**31)),
        exit_code=exit_code_of(record.get("exit_code")) if state.over else None,
        name=str(record.get("name") or ""),
        partition=partition,
        held=state is JobState.PENDING and is_held(reason),
        started_ago_s=now - start if running and start is not None else None,
        batch_host=batch_host if isinstance(batch_host, str) and batch_host else None,
        work_dir=str(record.get("current_working_directory") or ""),
    )


def _id(record: Mapping[str, Any]) -> str:
    told = number(record.get("job_id"))
    return "" if told is None or told == INFINITE else str(int(told))


def _time(value: object) -> float | None:
    """A point in time; 0 stands for none."""
    told = number(value)
    return told if told and told != INFINITE else None


def _preempt_in(
    record: Mapping[str, Any], now: float, end: float | None, grace_s: float
) -> float | None:
    told = _time(record.get("preempt_time"))
    if told is None:
        return None
    promised = told + grace_s
    return min(promised, end if end is not None and end >= told else promised) - now


def jobs_from(
    answer: Mapping[str, Any], folders: Collection[str], now: float, grace_s: Mapping[str, float]
) -> list[JobInfo]:
    """All jobs submitted from a directory that are not over."""
    records = [record for record in _list(answer.get("jobs")) if isinstance(record, Mapping)]
    infos = (job_of(record, now, grace_s) for record in records)
    return [info for info in infos if info.work_dir in folders and not info.state.over]


def jobs_of(
    answer: Mapping[str, Any], ids: Sequence[str], now: float, grace_s: Mapping[str, float]
) -> dict[str, JobInfo]:
    """An answer for every id. Filters here: Slurm ignored its own filters with JSON until 24.05."""
    records = [record for record in _list(answer.get("jobs")) if isinstance(record, Mapping)]
    wanted = set(ids)
    rows = [job_of(record, now, grace_s) for record in records if _id(record) in wanted]
    return by_id(rows, ids)
