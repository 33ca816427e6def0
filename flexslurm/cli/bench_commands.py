"""`flexslurm bench`: figures of this machine and this version; never judges them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from flexslurm.cli import shared_options as shared
from flexslurm.cli.main import CommandGroup
from flexslurm.cli.outputs import check_writable, write_figures
from flexslurm.errors import ServiceError

if TYPE_CHECKING:
    from flexslurm.cli.bench_shift import ShiftFigures


@click.group(cls=CommandGroup)
def bench() -> None:
    """Measure what this version does, on this machine."""


@bench.command()
@shared.FIGURES_FILE
@click.option("--quick", is_flag=True, help="A smaller model and fewer shifts.")
@click.option("--only", metavar="WORDS", help="Shifts from or to a gear with these words in it.")
@shared.KEEP
def shift(json_file: Path | None, quick: bool, only: str | None, keep: bool) -> None:
    """Change gears under streams on virtual GPUs, and print what each shift cost.

    FILE gets a list with one object for each shift.
    """
    from flexslurm.cli.bench_shift import FULL, QUICK, measure_shifts, part_of
    from flexslurm.cli.endings import scratch_directory

    if json_file is not None:
        check_writable(json_file)
    plan = QUICK if quick else FULL
    plan = plan if only is None else part_of(plan, only)
    with scratch_directory("flexslurm-shifts-", keep=keep) as home:
        if keep:
            click.echo(f"kept: {home}")
        figures = measure_shifts(home, plan, click.echo)
    click.echo(table(figures))
    if json_file is not None:
        write_figures(json_file, figures)
    wrong = [f"{one.before} to {one.after}" for one in figures if not one.tokens_equal]
    if wrong:
        raise ServiceError(f"tokens differ from the undisturbed run's: {'; '.join(wrong)}")


def table(figures: list[ShiftFigures]) -> str:
    """One line a shift, below a line that says from where to where."""
    heads = (
        "mode", "tokens", "extra gap", "calm", "step", "in steps", "beyond", "pause", "drained",
        "last move", "expected", "moved", "optimal", "transfer", "link", "of link", "expected",
        "recompute", "restart", "of recompute", "of restart",
    )  # fmt: skip
    rows = [heads, *(_row(one) for one in figures)]
    widths = [max(len(row[n]) for row in rows) for n in range(len(heads))]
    lines = ["", _aligned(rows[0], widths)]
    for one, row in zip(figures, rows[1:], strict=True):
        lines += [f"{one.before}  ⇒  {one.after}", _aligned(row, widths)]
    return "\n".join((*lines, "", *summary(figures)))


def summary(figures: list[ShiftFigures]) -> list[str]:
    """All shifts of a mode together, and what the link carries."""
    from statistics import median

    lines = []
    for mode in dict.fromkeys(one.mode for one in figures):
        found = [one for one in figures if one.mode == mode]
        steps = [one.gap_steps for one in found if one.gap_steps is not None]
        shares = [one.gap_to_restart for one in found if one.gap_to_restart is not None]
        beyond = [
            one.gap_steps_beyond_move for one in found if one.gap_steps_beyond_move is not None
        ]
        pauses = [one.pause_s for one in found]
        lines.append(
            f"{len(found)} {mode}: pause {median(pauses):.3f} s in the median, {max(pauses):.3f} s "
            f"at most; longest extra gap {median(steps or [0]):.1f} decode steps in the median, "
            f"{max(steps, default=0):.1f} at most, {max(beyond, default=0):.1f} beyond the "
            f"moves in it; at most {max(shares, default=0):.4f} of a cold restart"
        )
    moved = [one.transfer_to_link for one in figures if one.bytes_moved]
    lines.append(
        f"{sum(ratio <= 1.5 for ratio in moved)} of {len(moved)} transfers took at most 1.5 times "
        f"what their bytes take on one connection beside the same decoding, the longest "
        f"{max(moved, default=0):.1f} times"
    )
    carried = [one.link_bytes_per_s for one in figures]
    if figures:
        lines.append(
            f"a connection of the data plane carries {min(carried) / 1e6:.0f} to "
            f"{max(carried) / 1e6:.0f} MB/s beside a gear that decodes, "
            f"{figures[0].idle_link_bytes_per_s / 1e6:.0f} MB/s with nothing else"
        )
    return lines


def _aligned(row: tuple[str, ...], widths: list[int]) -> str:
    return "  " + "  ".join(f"{word:>{width}}" for word, width in zip(row, widths, strict=True))


def _row(one: ShiftFigures) -> tuple[str, ...]:
    return (
        one.mode,
        "equal" if one.tokens_equal else "WRONG",
        _seconds(one.longest_extra_gap_s),
        _seconds(one.undisturbed_extra_gap_s),
        _seconds(one.decode_step_s),
        _number(one.gap_steps, ".1f"),
        _number(one.gap_steps_beyond_move, ".1f"),
        _seconds(one.pause_s),
        _seconds(one.drain_s),
        _seconds(one.last_move_s),
        _seconds(one.expected_pause_s),
        _bytes(one.bytes_moved),
        _bytes(one.bytes_optimal),
        _seconds(one.transfer_s),
        f"{one.link_bytes_per_s / 1e6:.0f} MB/s",
        _number(one.transfer_to_link, ".1f"),
        _seconds(one.expected_transfer_s),
        _seconds(one.recompute_s),
        _seconds(one.cold_restart_s),
        _number(one.gap_to_recompute, ".3f"),
        _number(one.gap_to_restart, ".4f"),
    )


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f} s"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _bytes(value: float | None) -> str:
    from flexslurm.config.size_words import show_bytes

    return "-" if value is None else show_bytes(value)
