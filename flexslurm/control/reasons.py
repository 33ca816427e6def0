"""Figures of a decision in words; pure, and decides nothing."""

from __future__ import annotations

from collections.abc import Sequence

from flexslurm.control.horizon import Outlook
from flexslurm.control.trends import Targets, Window

_NAMED = 3


def duration(seconds: float) -> str:
    return f"{seconds / 60:.3g} min" if seconds >= 120 else f"{seconds:.3g} s"


def evicted(sequences: Sequence[str]) -> str:
    """What is recomputed for lack of room; begins with a semicolon, or is empty."""
    count = len(sequences)
    if not count:
        return ""
    some = ", ".join(sequences[:_NAMED]) + (", …" if count > _NAMED else "")
    one = "sequence does" if count == 1 else "sequences do"
    return f"; {count} {one} not fit in it and will be recomputed ({some})"


def rate(useful: float, every: float) -> str:
    """Tokens per second, and what part of them is of use."""
    if round(useful) >= round(every):
        return f"{useful:.0f} tokens/s"
    return f"{useful:.0f} of {every:.0f} tokens/s within the targets"


def about(words: str) -> str:
    """Why a gear is looked at; begins with a space, or is empty."""
    return f" ({words})" if words else ""


def ends(ends_s: Sequence[float], horizon_s: float) -> str:
    """When pilots of a gear end before the horizon; begins with a comma, or is empty."""
    found = [duration(end) for end in ends_s if end < horizon_s]
    if not found:
        return ""
    some = ", ".join(found[:_NAMED]) + (", …" if len(found) > _NAMED else "")
    return f", pilots of it ending in {some}"


def redone(sequences: int, lost_tokens: float) -> str:
    """What recomputing takes up; begins with a comma, or is empty."""
    if lost_tokens <= 0:
        return ""
    whose = "" if not sequences else f" {sequences} sequence{'s' if sequences > 1 else ''}"
    return f", less {lost_tokens:,.0f} for recomputing{whose}"


def risk(outlook: Outlook, weight: float) -> str:
    """What may come of a gear's members; begins with a comma, or is empty."""
    words = ""
    if outlook.hazard_per_s * weight > 0:
        words = (
            f", a loss every {duration(1 / outlook.hazard_per_s)} or so counted in by {weight:g}"
        )
    return words


def measured(windows: Sequence[Window], window_s: float, estimate: float, targets: Targets) -> str:
    """What the last window showed of the gear that serves; begins with a semicolon, or is empty.

    `estimate`: of that gear, in tokens per second.
    """
    if not windows:
        return ""
    last = windows[0]
    words = (
        f"; measured over {duration(window_s)}: {last.tokens_per_s:.0f} tokens/s "
        f"(P95 {last.p95_tokens_per_s:.0f}), {last.waiting:.1f} sequences waiting"
    )
    if last.saturated and estimate > 0:
        words += f", saturated, {last.tokens_per_s / estimate:.2f} times the estimate"
    share = targets.share(last) if targets else None
    if share is not None:
        words += f", {share:.0%} within the targets"
    for name, spread in (("TTFT", last.ttft), ("TPOT", last.tpot)):
        if spread.p95_s is not None:
            words += f", {name} P95 {spread.p95_s:.2g} s"
    return words
