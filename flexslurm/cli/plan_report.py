"""Gears and capacity as text and JSON, for `flexslurm plan`; never plans."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from flexslurm.config.size_words import show_bytes
from flexslurm.gear import Gear, NoGear, Replica, Signature

if TYPE_CHECKING:
    from flexslurm.planner.capacity import Capacity, CapacityPoint
    from flexslurm.planner.explain import Explained
    from flexslurm.planner.model_spec import ModelSpec
    from flexslurm.planner.problem import StageKind
    from flexslurm.planner.topology import Topology
    from flexslurm.planner.workload import Workload

Planned = Mapping[Signature, Gear | NoGear]


def seconds(value: float) -> str:
    """A time in the unit that reads best."""
    if value >= 100:
        return f"{value:,.0f} s"
    if value >= 1:
        return f"{value:.3g} s"
    return f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.3g} us"


def columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table: the first and last columns to the left, figures to the right."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    last = len(head) - 1
    return [
        "  ".join(
            f"{cell:<{w}}" if i in (0, last) else f"{cell:>{w}}"
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in [head, *rows]
    ]


def about(spec: ModelSpec, topology: Topology, used: Sequence[str], from_site: bool) -> list[str]:
    """The model and the GPUs the plan is for, with where their figures come from."""
    lines = [
        f"{spec.name}: {spec.params / 1e9:.3g}B parameters, {spec.num_layers} layers, "
        f"{show_bytes(spec.weight_bytes())} of weights in {spec.dtype}, "
        f"{show_bytes(spec.kv_bytes_per_token())} of KV a token"
    ]
    for name in used:
        gpu = topology.gpu(name)
        acts = f", acts {gpu.acts_model}" if gpu.acts_model else ""
        lines.append(
            f"  {name}: {show_bytes(gpu.memory_bytes)}, {gpu.memory_bandwidth / 1e9:,.4g} GB/s and "
            f"{gpu.flops / 1e12:,.4g} TFLOP/s in practice{acts} ({gpu.source})"
        )
    link = topology.node_link
    lines.append(
        f"  between nodes: {link.bandwidth / 1e9:,.4g} GB/s, {seconds(link.latency_s)}"
        + ("" if from_site else " (default: no --site is given)")
    )
    return lines


def cut_workload(workload: Workload, longest: int) -> list[str]:
    """What is planned for, where the workload's sequences are longer than can be served."""
    cut = workload.clipped(longest)
    if cut == workload:
        return []
    return [
        f"  the workload is longer than the {longest:,} tokens that can be served: planned for "
        f"{cut.prompt_tokens:,} in and {cut.output_tokens:,} out"
    ]


def measured(kinds: Sequence[StageKind]) -> list[str]:
    """Which times are not computed but measured."""
    if not kinds:
        return []
    return [f"  step times measured: {', '.join(f'{k.gpu_type} tp{k.tp}' for k in kinds)}"]


def gear_table(planned: Planned) -> list[str]:
    """One line for each allocation."""
    rows = []
    for signature, gear in planned.items():
        name = str(signature) or "(nothing)"
        if isinstance(gear, NoGear):
            rows.append((name, str(signature.gpus()), "-", "-", "-", "-", "-", gear.reason))
            continue
        e = gear.estimates
        rows.append(
            (
                name,
                f"{gear.gpus}/{signature.gpus()}",
                f"{e.tokens_per_s:,.1f}",
                seconds(e.ttft_s),
                seconds(e.tpot_s),
                f"{e.kv_tokens:,}",
                f"{gear.max_context:,}",
                gear.layout(),
            )
        )
    head = ("allocation", "GPUs", "tokens/s", "TTFT", "TPOT", "KV tokens", "context", "gear")
    return columns(head, rows)


def picture(gear: Gear) -> list[str]:
    """A gear as boxes, equal replicas once: layers, GPUs and KV of every stage."""
    e = gear.estimates
    margin = min((b for replica in e.memory_margin_bytes for b in replica), default=0)
    lines = [
        f"{gear.name or '(nothing)'}: {gear.gpus} of {gear.signature.gpus()} GPUs, "
        f"{e.tokens_per_s:,.1f} tokens/s, loads in {seconds(e.load_s)}, "
        f"at least {show_bytes(margin)} to spare on each GPU",
        f"  {gear.reason}",
    ]
    forms = Counter(_bare(replica) for replica in gear.replicas)
    for replica, times in forms.items():
        lines += _boxes(replica, times)
    return lines


def _bare(replica: Replica) -> Replica:
    """The replica without its nodes, so that equal ones are equal."""
    stages = tuple(msgspec.structs.replace(stage, node=0) for stage in replica.stages)
    return msgspec.structs.replace(replica, stages=stages)


def _boxes(replica: Replica, times: int) -> list[str]:
    boxes = [
        (
            f"{stage.gpu_type}" + (f" x{stage.tp} TP" if stage.tp > 1 else ""),
            f"layers {stage.lo}-{stage.hi - 1}",
            f"KV {stage.kv_blocks:,} blocks",
        )
        for stage in replica.stages
    ]
    widths = [max(map(len, box)) for box in boxes]
    label = f"  {times}x "
    indent = " " * len(label)
    rows = [
        [f"│ {box[row]:<{w}} │" for box, w in zip(boxes, widths, strict=True)] for row in range(3)
    ]
    return [
        indent + "   ".join(f"┌{'─' * (w + 2)}┐" for w in widths),
        indent + "   ".join(rows[0]),
        label + "──▶".join(rows[1]),
        indent + "   ".join(rows[2]),
        indent + "   ".join(f"└{'─' * (w + 2)}┘" for w in widths),
        f"{indent}up to {replica.max_batch} sequences of {replica.max_context:,} tokens",
    ]


def explained(signature: Signature, found: Explained) -> list[str]:
    return [
        f"why {signature}:",
        f"  {found.summary}",
        *(f"  - {line}" for line in found.pipelines),
        f"  {found.runner_up}",
        f"  {found.gap}",
    ]


def compared(before: Gear | NoGear, after: Gear | NoGear) -> list[str]:
    """What more GPUs change."""
    if isinstance(after, NoGear):
        return [f"with {after.signature} there is still no gear: {after.reason}"]
    now = after.estimates
    if isinstance(before, NoGear):
        return [f"with {after.signature} the model fits: {now.tokens_per_s:,.1f} tokens/s"]
    was = before.estimates
    more = after.signature.gpus() - before.signature.gpus()
    gain = now.tokens_per_s - was.tokens_per_s
    return [
        f"with {more} GPUs more: {was.tokens_per_s:,.1f} → {now.tokens_per_s:,.1f} tokens/s "
        f"({gain / was.tokens_per_s:+.1%}, {gain / max(1, more):,.1f} each), "
        f"TPOT {seconds(was.tpot_s)} → {seconds(now.tpot_s)}, "
        f"KV {was.kv_tokens:,} → {now.kv_tokens:,} tokens"
    ]


def capacity_report(found: Capacity, prices: Mapping[str, float]) -> list[str]:
    """The cheapest part of the pool that carries the load, and the curve of throughput."""
    unit = "cost" if prices else "GPUs"
    cheapest, knee = found.cheapest, found.stops_paying
    rows = [_point(point, prices) for point in _thin(found.curve)]
    return [
        f"{found.wanted_tokens_per_s:,.1f} tokens/s are wanted",
        f"cheapest in {unit}: {cheapest.signature} ({cheapest.gpus} GPUs) gives "
        f"{cheapest.tokens_per_s:,.1f} tokens/s",
        f"more GPUs stop paying after {knee.gpus} ({knee.tokens_per_s:,.1f} tokens/s)",
        "",
        *columns(("GPUs", "tokens/s", "a GPU", "allocation"), rows),
    ]


def _point(point: CapacityPoint, prices: Mapping[str, float]) -> tuple[str, str, str, str]:
    cost = f" at {point.cost:g}" if prices else ""
    each = f"{point.tokens_per_s / point.gpus:,.1f}"
    return str(point.gpus), f"{point.tokens_per_s:,.1f}", each, f"{point.signature}{cost}"


def point_json(point: CapacityPoint) -> dict[str, Any]:
    return {
        "gpus": point.gpus,
        "cost": point.cost,
        "tokens_per_s": point.tokens_per_s,
        "signature": str(point.signature),
    }


def _thin(curve: Sequence[CapacityPoint], most: int = 24) -> list[CapacityPoint]:
    """Some of the points, the first and the last among them."""
    if len(curve) <= most:
        return list(curve)
    return [curve[i * (len(curve) - 1) // (most - 1)] for i in range(most)]


def as_json(planned: Planned, gaps: Mapping[Signature, float]) -> list[dict[str, Any]]:
    """Every allocation with its gear and estimates, or why it has none."""
    return [
        {"signature": str(s), "gear": None, "reason": g.reason, "short_bytes": g.short_bytes}
        if isinstance(g, NoGear)
        else {
            "signature": str(s),
            "gear": {k: v for k, v in msgspec.to_builtins(g).items() if k != "estimates"},
            "layout": g.layout(),
            "gpus": g.gpus,
            "max_context": g.max_context,
            "estimates": msgspec.to_builtins(g.estimates),
            "gap": gaps.get(s, 0.0),
            "reason": g.reason,
        }
        for s, g in planned.items()
    ]
