"""The curve of throughput against GPUs as a picture; needs matplotlib, the extra `plot`."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

import click

from flexslurm.cli.outputs import replace_file
from flexslurm.errors import EnvironmentFault

if TYPE_CHECKING:
    from flexslurm.planner.capacity import Capacity

FORMATS = ("png", "svg", "pdf")
_DATELESS = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
"""The same curve gives the same file."""


def check_form(path: Path) -> str:
    """The format that a name ends in. Raises UsageError where it is none of FORMATS."""
    form = path.suffix.removeprefix(".").lower()
    if form not in FORMATS:
        legal = ", ".join(f".{name}" for name in FORMATS)
        raise click.UsageError(f"--picture ends in one of {legal}, not as '{path}' does")
    return form


def save_curve(found: Capacity, model: str, path: Path) -> None:
    """Draw the curve into a file of the format its name ends in.

    Raises EnvironmentFault where matplotlib is missing or the file cannot be written, UsageError.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise EnvironmentFault(
            "a picture needs matplotlib", hint="pip install 'flexslurm[plot]'"
        ) from error
    form = check_form(path)
    figure, axes = pyplot.subplots(figsize=(8, 5))
    gpus = [0, *(point.gpus for point in found.curve)]
    rates = [0.0, *(point.tokens_per_s for point in found.curve)]
    axes.step(gpus, rates, where="post", color="#1f77b4", label="best use of the GPUs")
    axes.axhline(found.wanted_tokens_per_s, color="#888888", linestyle="--", label="the load")
    for point, colour, label in (
        (found.cheapest, "#2ca02c", f"cheapest: {found.cheapest.signature}"),
        (found.stops_paying, "#d62728", f"more stops paying: {found.stops_paying.signature}"),
    ):
        axes.plot([point.gpus], [point.tokens_per_s], "o", color=colour, label=label)
    axes.set(xlabel="GPUs", ylabel="output tokens per second within the targets", title=model)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    drawn = io.BytesIO()
    figure.savefig(drawn, format=form, bbox_inches="tight", metadata=_DATELESS.get(form, {}))
    pyplot.close(figure)
    replace_file(path, drawn.getvalue(), "--picture")
