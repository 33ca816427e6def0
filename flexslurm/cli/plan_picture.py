"""The curve of throughput against GPUs as a picture; needs matplotlib, the extra `plot`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from flexslurm.errors import EnvironmentFault

if TYPE_CHECKING:
    from flexslurm.planner.capacity import Capacity


def save_curve(found: Capacity, model: str, path: Path) -> None:
    """Draw the curve into a file of the format its name ends in.

    Raises EnvironmentFault where matplotlib is missing or cannot write it.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise EnvironmentFault(
            "a picture needs matplotlib", hint="pip install 'flexslurm[plot]'"
        ) from error
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
    try:
        figure.savefig(path, bbox_inches="tight", metadata=_dateless(path))
    except (OSError, ValueError) as error:
        raise EnvironmentFault(f"cannot write the picture {path}: {error}") from error
    finally:
        pyplot.close(figure)


def _dateless(path: Path) -> dict[str, None]:
    """The same curve gives the same file."""
    return {"Date": None} if path.suffix == ".svg" else {}
