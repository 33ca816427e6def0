"""`flexslurm script`: renders the job script of a service in one allocation; submits nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from flexslurm.cli import shared_options as shared
from flexslurm.cli.outputs import check_free, put_text

if TYPE_CHECKING:
    from flexslurm.config.service import Fragment
    from flexslurm.config.site import Site


@click.command()
@shared.SERVICE_FILE
@shared.SITE
@click.option(
    "--components",
    metavar="LIST",
    help="Nodes to ask for in place of the service's pool: [PARTITION/]TYPE:GPUS[xNODES],…",
)
@click.option(
    "--head-node",
    is_flag=True,
    help="A first component without GPUs for the head, as the site's 'head' says.",
)
@shared.TO_FILE
@shared.FORCE
@shared.SERVICE_DIR
def script(
    service_file: Path, site_file: Path, components: str | None, head_node: bool,
    target: Path | None, force: bool, service_dir: str | None,
) -> None:  # fmt: skip
    """Print the script of one job that is the whole service: sbatch takes it as it is.

    A component for each kind of node, the head in the batch step, an agent on every node. Slurm
    starts all of it at once and takes all of it at once; 'flexslurm launch' is for the rest.
    """
    from flexslurm.cli.hooks_commands import own_command
    from flexslurm.cli.service_places import service_to_be
    from flexslurm.config.check import load_pair
    from flexslurm.slurm.serve import ServeCall, loss_in_words, read_components, serve_script

    pair = load_pair(service_file, site_file, cluster="allocation")
    service, site = pair.service.value, pair.site.value
    pool = read_components(components) if components else service.pool
    for entry in pool:
        _check(entry, site)
    directory = service_to_be(service.name, service_dir, site.paths.shared_dir)
    call = ServeCall(
        service.name, tuple(own_command()), service_file.absolute(), site_file.absolute(),
        directory.path.absolute(),
    )  # fmt: skip
    check_free(target, force)
    if put_text(serve_script(pool, site, call, head_node=head_node), target, executable=True):
        click.echo(f"wrote {target}; submit it with: sbatch {target}")
    click.echo(f"note: {loss_in_words(pool, head_node=head_node)}", err=True)


def _check(entry: Fragment, site: Site) -> None:
    """Whether the site has it; the service file's own pool is checked with its line before."""
    from flexslurm.config.schema import nearest_hint
    from flexslurm.errors import ConfigError

    if entry.gpu_type not in site.gpu_types:
        raise ConfigError(
            f"the site '{site.name}' has no GPU type '{entry.gpu_type}'",
            hint=nearest_hint(entry.gpu_type, list(site.gpu_types)),
        )
    if entry.partition is None:
        return
    partition = site.partitions.get(entry.partition)
    if partition is None:
        raise ConfigError(
            f"the site '{site.name}' has no partition '{entry.partition}'",
            hint=nearest_hint(entry.partition, list(site.partitions)),
        )
    if partition.gpu_types and entry.gpu_type not in partition.gpu_types:
        has = ", ".join(partition.gpu_types)
        raise ConfigError(
            f"the partition '{entry.partition}' has no {entry.gpu_type}", hint=f"it has {has}"
        )
    if partition.gpus_per_node is not None and entry.gpus > partition.gpus_per_node:
        raise ConfigError(
            f"a node of '{entry.partition}' has at most {partition.gpus_per_node} GPUs, "
            f"not {entry.gpus}",
            hint="ask for more nodes",
        )
