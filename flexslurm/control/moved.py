"""What the shell says of a shift's moves, taken into the shift and the history; decides nothing."""

from __future__ import annotations

from collections.abc import Iterable

from flexslurm.control.actions import Action, Record, Say
from flexslurm.control.events import (
    CutOver,
    MoveFailed,
    Parked,
    ParkedAhead,
    ShiftEvent,
    ShiftPlanned,
    ShiftReport,
    Switched,
    Transferred,
)
from flexslurm.control.phases import ShiftOrder
from flexslurm.control.shift import Shift


def hear_of_moves(
    now: float, event: ShiftEvent, shift: Shift | None, history: Iterable[ShiftReport]
) -> list[Action]:
    """Of a shift that is over, only its figures count."""
    if isinstance(event, Switched):
        return _on_switched(event, history)
    if shift is None or shift.epoch != event.epoch:
        return []
    match event:
        case ShiftPlanned(_, order):
            return _on_planned(shift, order)
        case ParkedAhead():
            shift.parked_ahead = True
        case Parked():
            shift.parked = True
        case Transferred():
            shift.transferred = True
        case CutOver():
            shift.cut_over = True
        case MoveFailed(_, reason):
            shift.fail(now, reason)
    return []


def _on_planned(shift: Shift, order: ShiftOrder) -> list[Action]:
    shift.order = order
    record = {
        "event": "planned", "epoch": shift.epoch, "mode": str(order.mode),
        "evicted": list(order.evicted), "plan": list(order.lines),
        "transfer_s": round(order.transfer_s, 4), "pause_s": round(order.pause_s, 4),
    }  # fmt: skip
    return [Record(record), *(Say(f"epoch {shift.epoch}: {line}") for line in order.lines)]


def _on_switched(event: Switched, history: Iterable[ShiftReport]) -> list[Action]:
    figures = event.figures
    for report in history:
        if report.epoch == event.epoch:
            report.figures = figures
    record = {
        "event": "switched", "epoch": event.epoch, "moved": figures.moved,
        "recomputed": figures.recomputed, "bytes": figures.moved_bytes,
        "pause_s": round(figures.pause_s, 4), "drain_s": round(figures.drain_s, 4),
        "last_move_s": round(figures.last_move_s, 4), "kv": [list(one) for one in figures.kv],
    }  # fmt: skip
    return [Record(record)]
