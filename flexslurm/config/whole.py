"""Whole numbers that people and programs write, of plain digits, and values for messages."""

from __future__ import annotations

_MOST_DIGITS = 18
_MOST_SHOWN = 40


def shown(text: str) -> str:
    """A value for a message: in quotes, and no longer than people read."""
    word = text.strip()
    return f"'{word}'" if len(word) <= _MOST_SHOWN else f"'{word[:_MOST_SHOWN]}…'"


def whole(text: str) -> int | None:
    """The number; None where it is none: a sign, other digits than 0 to 9, more than 18 of them."""
    digits = text.strip()
    if not (digits.isascii() and digits.isdecimal()) or len(digits) > _MOST_DIGITS:
        return None
    return int(digits)
