"""`flexslurm version`: which versions are installed; never imports the packages it names."""

from __future__ import annotations

import platform
from importlib import metadata

import click

from flexslurm import __version__

_PACKAGES = ("torch", "deepspeed", "transformers", "submitit", "pyzmq", "pydantic", "fastapi")


@click.command()
@click.option("--all", "everything", is_flag=True, help="Also the packages flexslurm stands on.")
def version(everything: bool) -> None:
    """Show versions."""
    click.echo(f"flexslurm {__version__}")
    if not everything:
        return
    click.echo(f"python {platform.python_version()}")
    for name in _PACKAGES:
        try:
            click.echo(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            click.echo(f"{name} is not installed")
