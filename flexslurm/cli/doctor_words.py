"""What a check of the doctor says: fine, a note, or a failure with its mend; judges nothing."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Result(StrEnum):
    """What a check comes to."""

    OK = "ok"
    NOTE = "note"
    FAIL = "FAIL"


@dataclass(frozen=True, slots=True)
class CheckVerdict:
    """One check at one place."""

    check: str
    where: str
    result: Result
    words: str
    mend: str = ""


def ok(check: str, where: str, words: str) -> CheckVerdict:
    return CheckVerdict(check, where, Result.OK, words)


def note(check: str, where: str, words: str, mend: str = "") -> CheckVerdict:
    return CheckVerdict(check, where, Result.NOTE, words, mend)


def fail(check: str, where: str, words: str, mend: str) -> CheckVerdict:
    return CheckVerdict(check, where, Result.FAIL, words, mend)
