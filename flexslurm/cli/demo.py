"""`flexslurm demo`: the main job on this machine, from nothing to the figures."""

from __future__ import annotations

from pathlib import Path

import click

from flexslurm.cli import shared_options as shared
from flexslurm.cli.outputs import check_writable, write_figures
from flexslurm.errors import ServiceError


@click.command()
@shared.FIGURES_FILE
@click.option(
    "--model",
    "model",
    type=shared.PATH,
    metavar="DIR",
    help="A prepared checkpoint; default: SmolLM2-135M-Instruct, prepared first.",
)
@click.option("--local", is_flag=True, help="Local processes, even where a Slurm could be had.")
@shared.KEEP
def demo(json_file: Path | None, model: Path | None, local: bool, keep: bool) -> None:
    """Serve a small model on a private Slurm, lose a pilot in mid-stream, and see it go on."""
    import msgspec

    from flexslurm.cli.demo_cluster import choose_cluster
    from flexslurm.cli.demo_story import Story
    from flexslurm.cli.endings import scratch_directory
    from flexslurm.cli.model_prepare import prepare_smollm2
    from flexslurm.engine.checkpoint import check_files
    from flexslurm.engine.families import check_model

    if json_file is not None:
        check_writable(json_file)
    if model is not None:
        check_files(check_model(model))
    model = (model or prepare_smollm2(click.echo)).absolute()
    with scratch_directory("flexslurm-demo-", keep=keep) as home:
        if keep:
            click.echo(f"kept: {home}")
        figures = Story(choose_cluster(home / "cluster", local, click.echo), home, model).run()
    click.echo(table(msgspec.to_builtins(figures)))
    if json_file is not None:
        write_figures(json_file, figures)
    if figures.completed != figures.requests or not figures.tokens_equal:
        raise ServiceError(
            "the streams did not all end with the undisturbed run's tokens",
            hint="run it with --keep and read the head's log",
        )


def table(figures: dict[str, object]) -> str:
    """The figures, one a line."""
    width = max(map(len, figures))
    rule = "─" * (width + 2)
    rows = [f" {name.replace('_', ' '):<{width}}  {value}" for name, value in figures.items()]
    return "\n".join(["", rule, *rows, rule])
