"""`flexslurm config`: shows and checks settings; never starts or asks anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from flexslurm.cli import shared_options as shared
from flexslurm.cli.main import CommandGroup

if TYPE_CHECKING:
    from flexslurm.config.sources import Setting

_SET = click.option(
    "--set",
    "overrides",
    metavar="KEY=VALUE",
    multiple=True,
    help="As for launch; site.KEY=VALUE sets a key of the site file.",
)


@click.group(cls=CommandGroup)
def config() -> None:
    """Show effective settings and where each comes from."""


@config.command()
@click.option("--service", "service_file", metavar="SERVICE.yaml", type=shared.PATH)
@shared.site("What the cluster is made of.")
@_SET
@click.option("--changed", is_flag=True, help="Only what differs from the defaults.")
@shared.JSON
def show(
    service_file: Path | None,
    site_file: Path | None,
    overrides: tuple[str, ...],
    changed: bool,
    as_json: bool,
) -> None:
    """Every effective value, and who set it.

    The order is: command line (--set), environment (FLEXSLURM_SERVICE__SERVING__MAX_BATCH,
    FLEXSLURM_SITE__SLURM__KILL_WAIT), file, default.
    """
    from flexslurm.config.sources import load_service, load_site
    from flexslurm.config.yaml_text import Origin

    if service_file is None and site_file is None:
        raise click.UsageError("which settings? give --service, --site or both")
    found: dict[str, list[Setting]] = {}
    if service_file is not None:
        found["service"] = load_service(service_file, overrides).settings()
    if site_file is not None:
        from flexslurm.cli.site_figures import with_catalogue

        site = load_site(site_file, overrides)
        found["site"] = with_catalogue(site.value, site.settings())
    if changed:
        found = {
            name: [setting for setting in settings if setting.origin is not Origin.DEFAULT]
            for name, settings in found.items()
        }
    click.echo(_as_json(found) if as_json else _as_text(found))


def _as_json(found: dict[str, list[Setting]]) -> str:
    rows = {
        name: [
            {
                "key": setting.key,
                "value": setting.value,
                "origin": str(setting.origin),
                "source": setting.source,
            }
            for setting in settings
        ]
        for name, settings in found.items()
    }
    return json.dumps(rows, indent=2)


def _as_text(found: dict[str, list[Setting]]) -> str:
    lines: list[str] = []
    for name, settings in found.items():
        lines += ["", f"# {name}"] if lines else [f"# {name}"]
        key_width = max((len(setting.key) for setting in settings), default=0)
        shown_width = min(max((len(setting.shown) for setting in settings), default=0), 32)
        for setting in settings:
            source = f" ({setting.source})" if setting.source else ""
            lines.append(
                f"{setting.key:{key_width}}  {setting.shown:{shown_width}}  "
                f"{setting.origin}{source}"
            )
    return "\n".join(lines)


@config.command()
@click.option("--service", "service_file", metavar="SERVICE.yaml", type=shared.PATH, required=True)
@shared.SITE
@_SET
@click.option("--cluster", type=click.Choice(["slurm", "local"]), default="slurm")
def check(service_file: Path, site_file: Path, overrides: tuple[str, ...], cluster: str) -> None:
    """Check a service file against a site file, as launch does."""
    from flexslurm.cli.site_figures import check_figures
    from flexslurm.config.check import load_pair

    pair = load_pair(service_file, site_file, overrides=overrides, cluster=cluster)
    check_figures(pair.service, pair.site)
    for note in pair.notes:
        click.echo(f"note: {note}")
    click.echo(f"{service_file} fits {site_file}")


@config.command()
@click.argument("file", type=click.Choice(["service", "site", "sandbox"]))
def schema(file: str) -> None:
    """All keys of a settings file, with their defaults, as a Markdown page."""
    from flexslurm.config.schema_page import page

    if file == "service":
        from flexslurm.config.service import Service

        click.echo(page(Service, "Keys of a service file"), nl=False)
    elif file == "site":
        from flexslurm.config.site import Site

        click.echo(page(Site, "Keys of a site file"), nl=False)
    else:
        from flexslurm.slurm.sandbox_config import SandboxConfig

        click.echo(page(SandboxConfig, "Keys of a sandbox file"), nl=False)
