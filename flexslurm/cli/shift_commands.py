"""`flexslurm shift`, `cordon`, `drain`, `release`: what a service runs on, as an operator says."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from flexslurm.cli import shared_options as shared
from flexslurm.errors import ServiceError

if TYPE_CHECKING:
    from flexslurm.messages import Message


@click.command()
@shared.SERVICE
@click.option(
    "--to",
    "gear",
    metavar="GEAR",
    required=True,
    help="An allocation such as a100:4x2, a layout as 'flexslurm status' shows it, or best.",
)
@click.option("--dry-run", is_flag=True, help="Print the moves, their bytes and times; do nothing.")
@shared.SERVICE_DIR
def shift(service: str | None, gear: str, dry_run: bool, service_dir: str | None) -> None:
    """Go into another gear and stay there until members come or go; 'best' ends that."""
    from flexslurm.cli.ask import ask
    from flexslurm.cli.service_places import find_service
    from flexslurm.messages import ShiftAnswer, ShiftAsk

    directory = find_service(service, service_dir)
    answer = ask(directory, ShiftAsk(to=gear, dry_run=dry_run), timeout_s=30.0)
    if not isinstance(answer, ShiftAnswer):
        raise ServiceError("the head gave another answer than the plan of a shift")
    click.echo(f"to: {answer.to}")
    for line in answer.lines:
        click.echo(f"  {line}")
    if dry_run:
        click.echo("# dry run: nothing was changed")
    elif answer.epoch:
        click.echo(f"begun as epoch {answer.epoch}; follow it with: flexslurm status --watch")


def _order(service: str | None, service_dir: str | None, order: Message) -> None:
    """Give it to the head, and say what the head says of it."""
    from flexslurm.cli.ask import ask
    from flexslurm.cli.service_places import find_service
    from flexslurm.messages import AskDone

    answer = ask(find_service(service, service_dir), order, timeout_s=5.0)
    if isinstance(answer, AskDone):
        click.echo(answer.message)


@click.command()
@shared.SERVICE
@click.argument("pilot", required=False)
@click.option("--undo", is_flag=True, help="Take it into use again.")
@shared.SERVICE_DIR
def cordon(service: str | None, pilot: str | None, undo: bool, service_dir: str | None) -> None:
    """Move a service off a pilot without ending the pilot."""
    from flexslurm.messages import CordonAsk

    service, pilot = shared.of_service(service, pilot, "pilot")
    _order(service, service_dir, CordonAsk(fragment=pilot, cordon=not undo))


@click.command()
@shared.SERVICE
@click.argument("pilot", required=False)
@click.option("--undo", is_flag=True, help="As cordon --undo: take it, or another, into use again.")
@shared.SERVICE_DIR
def drain(service: str | None, pilot: str | None, undo: bool, service_dir: str | None) -> None:
    """Move a service off a pilot, and end the pilot once nothing of it is used."""
    from flexslurm.messages import CordonAsk, DrainAsk

    service, pilot = shared.of_service(service, pilot, "pilot")
    order = CordonAsk(fragment=pilot, cordon=False) if undo else DrainAsk(fragment=pilot)
    _order(service, service_dir, order)


@click.command()
@shared.SERVICE
@click.argument("node", required=False)
@shared.SERVICE_DIR
def release(service: str | None, node: str | None, service_dir: str | None) -> None:
    """Move a service off one node and give it back; the other nodes of its pilot stay."""
    from flexslurm.messages import ReleaseAsk

    service, node = shared.of_service(service, node, "node")
    _order(service, service_dir, ReleaseAsk(node=node))
