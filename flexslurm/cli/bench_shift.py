"""Measures planned shifts under streams, on virtual GPUs of this machine; decides nothing.

Every figure is of this run: a launched service is asked for one gear after the other while streams
go on. A second service, whose workers have no data plane, does the same changes: it stops, installs
from the files and recomputes, and what its streams lose is the price of that. What a cold restart
costs is measured by one, and the link by the data plane that the workers use.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec

from flexslurm.cli.bench_link import LinkProbe
from flexslurm.cli.bench_round import Round, calm_extra_gap_s, same_tokens
from flexslurm.cli.bench_service import BLOCK_TOKENS, BenchPlan, Say, launched
from flexslurm.cli.demo_streams import StreamRun
from flexslurm.errors import ServiceError

_STOPPING = {"FLEXSLURM_FAULTS": "transfer.listen:1+:full"}
"""No worker has a data server: nothing can be moved, so a shift stops and recomputes."""


class ShiftFigures(msgspec.Struct, kw_only=True):
    """One planned shift. None: not measured, as no stream lived through it."""

    before: str = msgspec.field(name="from")
    after: str = msgspec.field(name="to")
    mode: str
    """How KV got there: `beside`, `park`, or `recompute`."""
    tokens_equal: bool
    longest_extra_gap_s: float | None
    """The longest time between two tokens of a stream since the shift began, less a step."""
    decode_step_s: float
    """Time between two tokens, in the slower of the two gears."""
    undisturbed_extra_gap_s: float
    """The same of streams without a shift, in a fast gear: what the machine itself does."""
    gap_steps: float | None
    """The longest extra gap in decode steps."""
    gap_steps_beyond_move: float | None
    """The same without the bytes that move in the pause, which take what they take.

    Beside a serving gear these are the last blocks, where gears do not fit all KV; weights that
    do not come before the pause are not left out.
    """
    pause_s: float
    """Of the head's own history: from the pause of the old gear to the start of the new one."""
    drain_s: float
    """Of the pause: until the steps under way had ended."""
    last_move_s: float
    """Of the pause: the move of what was written since the last round."""
    expected_pause_s: float
    """What `shift --dry-run` said beforehand."""
    bytes_moved: int
    """Weights and KV that came from outside the GPU that needs them."""
    bytes_optimal: int
    """The least that any placement and any routes move."""
    transfer_s: float
    """The worker that moved for longest: weights and KV, measured where they arrive."""
    expected_transfer_s: float
    link_bytes_per_s: float
    """Of one connection of the data plane between two processes, while the old gear decodes."""
    idle_link_bytes_per_s: float
    """The same with nothing else running."""
    transfer_to_link: float
    """How long the transfer took, over the time of its bytes on such a link."""
    recompute_s: float | None
    """As `longest_extra_gap_s`, where the service stops and recomputes."""
    cold_restart_s: float
    """From the stop of the service to the first token after its launch."""
    gap_to_recompute: float | None
    gap_to_restart: float | None


def even(gpu_type: str, layers: int, *tps: int) -> str:
    """A layout of stages of the same depth, by their TP degrees."""
    depth = layers // len(tps)
    parts = [f"{gpu_type} tp{tp} [{n * depth},{(n + 1) * depth})" for n, tp in enumerate(tps)]
    return " → ".join(parts)


def _walk(layers: int) -> tuple[tuple[str, str], ...]:
    def a100(*tps: int) -> str:
        return even("a100", layers, *tps)

    third = layers // 3
    uneven = f"a100 tp2 [0,{2 * third}) → a100 tp1 [{2 * third},{layers})"
    two = f"2x({a100(1)})"
    return (
        (a100(1), a100(1, 1)),
        (a100(1, 1), a100(1, 1, 1)),
        (a100(1, 1, 1), a100(1)),
        (a100(1), a100(2)),
        (a100(2), a100(3)),
        (a100(3), a100(1)),
        (a100(1, 1), a100(2)),
        (a100(2), a100(1, 1, 1)),
        (a100(1, 1, 1), uneven),
        (a100(1), two),
        (two, a100(1)),
        (even("l40s", layers, 1, 1), even("l40s", layers, 2)),
        (even("l40s", layers, 2), even("l40s", layers, 1, 1)),
    )


QUICK = BenchPlan(
    # large enough that streams last several times as long as a shift, on a fast machine too
    model={"layers": 6, "hidden": 192, "heads": 6, "kv_heads": 6, "intermediate": 1536},
    memory={"a100": "256MiB", "l40s": "47MiB"},
    walk=tuple(_walk(6)[n] for n in (0, 6, 10, 11, 12)),
)
FULL = BenchPlan(
    model={"layers": 12, "hidden": 192, "heads": 6, "kv_heads": 6, "intermediate": 1536},
    memory={"a100": "512MiB", "l40s": "94MiB"},
    walk=_walk(12),
)


def part_of(plan: BenchPlan, words: str) -> BenchPlan:
    """Only the shifts that have these words in what they are from or to. Raises ServiceError."""
    walk = tuple(one for one in plan.walk if any(words in layout for layout in one))
    if not walk:
        known = "; ".join(f"{before} to {after}" for before, after in plan.walk)
        raise ServiceError(f"no shift of the bench is from or to '{words}'", hint=known)
    return replace(plan, walk=walk)


def measure_shifts(home: Path, plan: BenchPlan, say: Say) -> list[ShiftFigures]:
    """All shifts of a plan. Raises FlexslurmErrors of what cannot be launched or shifted."""
    from flexslurm.engine.shift_plan import LinkRates
    from flexslurm.engine.tiny import write_tiny_model

    model = write_tiny_model(home / "model", **plan.model)
    with LinkProbe() as link:
        idle = link.measure()
        say(f"one connection of the data plane carries {idle / 1e6:.0f} MB/s")
        # Declared so that the share that transfers keep to is what one connection carries.
        plan = replace(plan, link_bytes_per_s=idle / LinkRates().share)
        say("a service is launched, stopped, and launched again")
        with launched(home / "moving", model, plan, {}) as service:
            restart_s = service.cold_restart()
            calm = service.calm()

            def beside() -> float:
                return link.measure(paced=True)

            rounds = [service.round(*change, say, beside) for change in plan.walk]
    say("the same, stopping and recomputing")
    with launched(home / "recomputing", model, plan, _STOPPING) as service:
        again = [service.round(*change, say) for change in plan.walk]
    whole = [run.tokens for run in calm]
    if not all(same_tokens(one.tokens, whole) for one in again):
        raise ServiceError("tokens differ from the undisturbed run's where KV is recomputed")
    return [
        _figures(model, calm, one, other, idle, restart_s)
        for one, other in zip(rounds, again, strict=True)
    ]


def _figures(
    model: Path,
    calm: list[StreamRun],
    one: Round,
    other: Round,
    idle: float,
    restart_s: float,
) -> ShiftFigures:
    from flexslurm.cli.bench_least import least_bytes, moved_bytes

    line, switched = one.line, one.switched
    gap_s, recompute_s, step_s = one.extra_gap_s, other.extra_gap_s, one.step_s
    kv_move_s = float(line["kv_move_s"])
    transfer_s = float(line["weights_move_s"]) + kv_move_s
    moved, last_move_s = moved_bytes(line), float(switched["last_move_s"])
    in_pause_s = last_move_s if line["mode"] == "beside" else min(kv_move_s, last_move_s)
    return ShiftFigures(
        before=str(line["from"]),
        after=str(line["to"]),
        mode=str(line["mode"]),
        tokens_equal=same_tokens(one.tokens, [run.tokens for run in calm]),
        longest_extra_gap_s=_rounded(gap_s),
        decode_step_s=round(step_s, 4),
        undisturbed_extra_gap_s=round(calm_extra_gap_s(calm), 4),
        gap_steps=None if gap_s is None else round(gap_s / step_s, 2),
        gap_steps_beyond_move=_steps(gap_s, in_pause_s, step_s),
        pause_s=float(line["pause_s"]),
        drain_s=float(switched["drain_s"]),
        last_move_s=last_move_s,
        expected_pause_s=float(one.planned["pause_s"]),
        bytes_moved=moved,
        bytes_optimal=least_bytes(model, BLOCK_TOKENS, one.before, one.after, switched["kv"]),
        transfer_s=round(transfer_s, 4),
        expected_transfer_s=float(one.planned["transfer_s"]),
        link_bytes_per_s=round(one.link_bytes_per_s),
        idle_link_bytes_per_s=round(idle),
        transfer_to_link=round(transfer_s * one.link_bytes_per_s / moved, 3) if moved else 0.0,
        recompute_s=_rounded(recompute_s),
        cold_restart_s=round(restart_s, 3),
        gap_to_recompute=_ratio(gap_s, recompute_s),
        gap_to_restart=_ratio(gap_s, restart_s),
    )


def _steps(gap_s: float | None, move_s: float, step_s: float) -> float | None:
    return None if gap_s is None else round(max(gap_s - move_s, 0.0) / step_s, 2)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)


def _ratio(part_s: float | None, whole_s: float | None) -> float | None:
    return round(part_s / whole_s, 5) if part_s is not None and whole_s else None
