"""`flexslurm sandbox`: a private Slurm on this machine; only parses and prints."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from flexslurm.cli import shared_options as shared
from flexslurm.cli.main import CommandGroup

DEFAULT_DIR = ".sandbox"

_dir = click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path, file_okay=False),
    default=lambda: os.environ.get("FLEXSLURM_SANDBOX_DIR", DEFAULT_DIR),
    show_default=f"$FLEXSLURM_SANDBOX_DIR or {DEFAULT_DIR}",
    help="Directory that holds all of the sandbox.",
)


@click.group(cls=CommandGroup)
def sandbox() -> None:
    """A private, real Slurm in one directory, to try things on."""


@sandbox.command()
@_dir
@click.option(
    "--config",
    "config_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="YAML file with nodes and partitions; default: two GPU types on four nodes.",
)
@click.option("--timeout", type=shared.Number(min=1), default=40.0, help="Seconds to come up.")
@click.option("--netns", is_flag=True, help="Each node is a host of its own; needs root.")
def up(directory: Path, config_file: Path | None, timeout: float, netns: bool) -> None:
    """Bring it up; does nothing when it is up already."""
    from flexslurm.slurm.sandbox import Sandbox
    from flexslurm.slurm.sandbox_config import load_sandbox

    config = load_sandbox(config_file)
    if netns:
        config = config.model_copy(update={"network": "namespaces"})
    box = Sandbox(directory, config)
    box.up(timeout)
    click.echo(box.status().report)
    click.echo(f"Site file: {box.site_file}")
    click.echo(f"To use it: export SLURM_CONF={box.conf}")
    click.echo(f"To end it: flexslurm sandbox down --dir {directory}")


@sandbox.command()
@_dir
@click.option("--keep-logs", is_flag=True, help="Leave the daemons' logs in the directory.")
def down(directory: Path, keep_logs: bool) -> None:
    """End it and remove its files, after any crash too."""
    from flexslurm.slurm.sandbox import Sandbox

    Sandbox(directory).down(keep_logs=keep_logs)


@sandbox.command()
@_dir
def status(directory: Path) -> None:
    """Show nodes, partitions and jobs; exit status 7 when it is down."""
    from flexslurm.errors import ServiceError
    from flexslurm.slurm.sandbox import Sandbox

    found = Sandbox(directory).status()
    click.echo(f"Directory: {found.directory}")
    click.echo(f"Daemons:   {', '.join(f'{p.name} {p.pid}' for p in found.daemons) or 'none'}")
    if not found.up:
        what = "some daemons live, but Slurm does not answer" if found.daemons else "it is down"
        raise ServiceError(
            f"no sandbox is up in {found.directory}: {what}",
            hint=f"flexslurm sandbox up --dir {directory}",
        )
    click.echo(f"Use it:    export SLURM_CONF={found.directory / 'slurm.conf'}\n")
    click.echo(found.report)


@sandbox.command()
@_dir
@click.argument("name")
def kill(directory: Path, name: str) -> None:
    """Take NAME away as a crash does: munged, slurmctld, or a node with all that runs there."""
    from flexslurm.slurm.sandbox import Sandbox

    Sandbox(directory).kill(name)


@sandbox.command()
@_dir
@click.argument("name")
def start(directory: Path, name: str) -> None:
    """Start again what was taken away."""
    from flexslurm.slurm.sandbox import Sandbox

    Sandbox(directory).start(name)


@sandbox.command()
@_dir
@click.argument("node")
def cut(directory: Path, node: str) -> None:
    """Cut NODE's link, silently; the sandbox needs 'network: namespaces'."""
    from flexslurm.slurm.sandbox import Sandbox

    Sandbox(directory).cut(node)


@sandbox.command()
@_dir
@click.argument("node")
def mend(directory: Path, node: str) -> None:
    """Join NODE's link again."""
    from flexslurm.slurm.sandbox import Sandbox

    Sandbox(directory).mend(node)


@sandbox.command(context_settings={"allow_interspersed_args": False})
@_dir
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(directory: Path, command: tuple[str, ...]) -> None:
    """Run COMMAND against the sandbox; its exit status is kept."""
    from flexslurm.slurm.sandbox import Sandbox

    sys.exit(Sandbox(directory).run(command))
