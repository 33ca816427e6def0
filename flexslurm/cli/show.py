"""Gears and status as text: what is better looked at than read."""

from __future__ import annotations

from collections.abc import Mapping

from flexslurm.config.size_words import show_bytes
from flexslurm.gear import Gear, Replica
from flexslurm.messages import FragmentStatus, StatusAnswer


def picture(gear: Gear) -> str:
    """A gear as boxes: one line a replica, one box a stage, its layers and GPUs inside."""
    lines = [
        f"gear {gear.name}: {len(gear.replicas)} replica{'s' * (len(gear.replicas) != 1)}, "
        f"{gear.gpus} of {gear.signature.gpus()} GPUs, "
        f"{gear.estimates.kv_tokens:,} tokens of KV, context to {gear.max_context:,}"
    ]
    for number, replica in enumerate(gear.replicas):
        lines += _replica(number, replica)
    if gear.reason:
        lines.append(f"  {gear.reason}")
    return "\n".join(lines)


def _replica(number: int, replica: Replica) -> list[str]:
    boxes = [
        (
            f"{stage.gpu_type} x{stage.tp}" + (" (TP)" if stage.tp > 1 else ""),
            f"layers {stage.lo}-{stage.hi - 1}",
            f"node {stage.node}",
        )
        for stage in replica.stages
    ]
    widths = [max(len(line) for line in box) for box in boxes]
    top = "   ".join(f"┌{'─' * (w + 2)}┐" for w in widths)
    bottom = "   ".join(f"└{'─' * (w + 2)}┘" for w in widths)
    rows = []
    for row in range(3):
        join = " ─▶" if row == 1 else "   "
        cells = [f"│ {box[row]:<{w}} │" for box, w in zip(boxes, widths, strict=True)]
        rows.append(join.join(cells))
    label = f"  r{number}".ljust(5)
    indent = " " * len(label)
    return [indent + top, indent + rows[0], label + rows[1], indent + rows[2], indent + bottom]


def render_status(answer: StatusAnswer) -> str:
    """The answer of a head as a few lines and a table."""
    lines = [
        f"{answer.service}: {answer.state}, epoch {answer.epoch}, up {_duration(answer.uptime_s)}",
        f"  {answer.endpoint}/v1",
        f"  why: {answer.reason}",
        f"  requests: {answer.running} running, {answer.waiting} waiting, "
        f"{answer.finished} finished; KV {answer.kv_used:.0%} used; "
        f"{answer.tokens_total:,} tokens generated",
        "",
    ]
    if answer.gear is not None:
        lines += [picture(answer.gear), ""]
    lines += _table(answer.fragments)
    lines += [f"  {line}" for line in answer.pool]
    if answer.shifts:
        lines += ["", "last shifts:"]
        lines += [_shift(shift) for shift in answer.shifts[-5:]]
    if answer.decisions:
        lines += ["", "last decisions:"]
        lines += [_decision(decision) for decision in answer.decisions[-3:]]
    if answer.judgement:
        lines += ["", answer.judgement]
    return "\n".join(lines)


def _decision(decision: Mapping[str, float | str]) -> str:
    ago = _duration(float(decision["s_ago"]))
    return f"  {ago} ago, {decision['verdict']}: {decision['reason']}"


def _shift(shift: Mapping[str, float | str]) -> str:
    def number(key: str) -> float:
        return float(shift.get(key, 0.0))

    line = (
        f"  epoch {number('epoch'):.0f}, {_duration(number('started_s_ago'))} ago, "
        f"{number('took_s'):.2f} s, {shift['outcome']}: {shift['why']}"
    )
    if number("sequences_moved") or number("sequences_recomputed"):
        moved = number("sequences_moved")
        line += (
            f"\n    KV: {moved:.0f} sequence{'s' * (moved != 1)} moved "
            f"({show_bytes(number('kv_bytes'))} sent), "
            f"{number('sequences_recomputed'):.0f} recomputed; "
            f"streams paused for {number('pause_s'):.3f} s"
        )
    if "kept_during" in shift or "kept_after" in shift:  # else there was nothing to compare
        during = f"{number('kept_during'):.0%}" if "kept_during" in shift else "-"
        after = f", {number('kept_after'):.0%} after" if "kept_after" in shift else ""
        line += f"\n    throughput kept: {during} during{after}"
    if not number("weights_bytes"):
        return line
    moved, kept = number("moved_bytes"), number("kept_bytes")
    read = max(number("weights_bytes") - moved - kept, 0.0)
    return (
        f"{line}\n    weights: {show_bytes(kept)} in place, {show_bytes(moved)} from other "
        f"GPUs, {show_bytes(read)} from files, in {number('load_s'):.2f} s"
    )


def _table(fragments: tuple[FragmentStatus, ...]) -> list[str]:
    head = ("pilot", "job", "node", "GPUs", "state", "slots")
    rows = [
        (
            f.name,
            f.job_id or "-",
            f.node or "-",
            f"{len(f.gpus)} {f.gpu_type}",
            f"{f.state} ({f.detail})" if f.detail else f.state,
            " ".join(gpu.slot for gpu in f.gpus if gpu.slot) or "-",
        )
        for f in fragments
    ]
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    return [
        "  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in [head, *rows]
    ]


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
