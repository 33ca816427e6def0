"""Which memory gears are planned with, of the cards that are here; plans nothing itself."""

from __future__ import annotations

from collections.abc import Mapping

TOLERANCE = 0.01
"""Where cards have up to this share less than gears are planned with, gears are only cut to fit."""
_STEPS = 100


def memory_to_plan_with(found: Mapping[str, int], promised: Mapping[str, int]) -> dict[str, int]:
    """By type, where it is not what was promised: the memory found, in whole hundredths of that.

    In steps, so that cards which differ by little do not have the table planned again and again.
    """
    planned: dict[str, int] = {}
    for name, has in found.items():
        share = has * _STEPS // promised[name]
        if share < _STEPS * (1 - TOLERANCE):
            planned[name] = promised[name] * share // _STEPS
    return planned


def memory_option(memory: Mapping[str, int]) -> list[str]:
    """As options of the planning process; `read_memory` reads them."""
    return [f"--memory={name}={size}" for name, size in sorted(memory.items())]


def read_memory(texts: list[str]) -> dict[str, int]:
    """Raises ValueError."""
    pairs = (text.rpartition("=") for text in texts)
    return {name: int(size) for name, _, size in pairs}
