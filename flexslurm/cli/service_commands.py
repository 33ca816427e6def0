"""`flexslurm launch`, `status`, `logs`, `stop`: a service from its start to its end."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from flexslurm.cli import shared_options as shared
from flexslurm.cli.service_places import find_service, service_directory, service_to_be
from flexslurm.errors import FlexslurmError

if TYPE_CHECKING:
    from flexslurm.cli.launch import LaunchPlan
    from flexslurm.gear import Gear, NoGear
    from flexslurm.wire.service_dir import Pilots


def _say(line: str) -> None:
    click.echo(f"{time.strftime('%H:%M:%S')} {line}")


@click.command()
@shared.SERVICE_FILE
@shared.SITE
@click.option(
    "--cluster",
    type=click.Choice(["slurm", "local", "allocation"]),
    default="slurm",
    help="Where pilots run: as Slurm jobs, as processes of this machine, or as steps of the job "
    "that this runs in, which then lasts as long as the service.",
)
@click.option(
    "--head",
    "head_place",
    type=click.Choice(["job", "here"]),
    help="Where the head runs; default: the service file's head.place.",
)
@click.option(
    "--set",
    "overrides",
    metavar="KEY=VALUE",
    multiple=True,
    help="Set a key of the service file, such as gateway.port=8000.",
)
@click.option("--dry-run", is_flag=True, help="Print everything, submit nothing.")
@click.option(
    "--backfill",
    is_flag=True,
    help="Beyond each entry's min_count, put short jobs into holes of Slurm's schedule.",
)
@click.option("--no-wait", is_flag=True, help="Return once everything is submitted.")
@click.option(
    "--timeout",
    type=shared.SECONDS,
    default=1800.0,
    show_default=True,
    metavar="S",
    help="How long to wait for the endpoint; the service goes on after it.",
)
@shared.SERVICE_DIR  # fmt: skip
def launch(
    service_file: Path, site_file: Path, cluster: str, head_place: str | None,
    overrides: tuple[str, ...], dry_run: bool, backfill: bool, no_wait: bool, timeout: float,
    service_dir: str | None,
) -> None:  # fmt: skip
    """Launch the service described in SERVICE.yaml and wait until its endpoint answers."""
    from flexslurm.cli import launch as launching
    from flexslurm.cli import submitting
    from flexslurm.cli.show import picture
    from flexslurm.cli.site_figures import check_figures
    from flexslurm.cli.slurm_notes import require_slurm, surprises, warnings_of
    from flexslurm.config.check import check_slurm_conf, load_pair

    if backfill:
        overrides = (*overrides, "keeping.backfill=true")
    pair = load_pair(service_file, site_file, overrides=overrides, cluster=cluster)
    if cluster != "local":
        check_slurm_conf(pair.site)
    check_figures(pair.service, pair.site)
    service, site = pair.service.value, pair.site.value
    if cluster == "slurm" and not dry_run:
        require_slurm(site)
    for note in (*pair.notes, *(surprises(site) if cluster == "slurm" else ())):
        click.echo(f"note: {note}")
    directory = service_to_be(service.name, service_dir, site.paths.shared_dir)
    silent_head = "" if dry_run else submitting.refuse_if_running(directory)
    here = (head_place or service.head.place) == "here"
    plan = launching.plan_launch(service, site, directory, cluster, here, _say)
    click.echo(picture(plan.gear))
    for words in warnings_of(service.pool, site) if cluster == "slurm" else ():
        click.echo(f"partition {words}")
    for fragment, left in plan.without:
        click.echo(f"without {fragment}: {describe_left(left)}")
    if dry_run:
        click.echo(launching.preview(plan))
        click.echo("# dry run: nothing was submitted")
        return
    made = _execute(plan, site_file, silent_head)
    where = f" {launching.called(plan)}"
    if no_wait:
        click.echo(f"follow it with: flexslurm status{where}")
        return
    _wait(plan, made, timeout, where)
    if cluster == "allocation":
        from flexslurm.cli.holding import hold_until_end

        hold_until_end(plan, _say, service.executor.drain_timeout_sec)


def describe_left(left: Gear | NoGear) -> str:
    """The gear that would be left, in words; or that none would."""
    from flexslurm.gear import Gear

    if isinstance(left, Gear):
        return left.layout()
    return f"nothing fits, requests would wait ({left.reason})"


def _execute(plan: LaunchPlan, site_file: Path, silent_head: str) -> Pilots:
    from flexslurm.cli import refused, submitting
    from flexslurm.errors import SlurmError

    try:
        return submitting.execute(plan, _say, silent_head)
    except SlurmError as error:
        sbatch = plan.site.slurm.commands.get("sbatch", "sbatch")
        raise refused.told(error, sbatch, site_file) from None


def _wait(plan: LaunchPlan, made: Pilots, timeout: float, where: str) -> None:
    from flexslurm.cli import launch as launching
    from flexslurm.cli import submitting
    from flexslurm.cli.endings import EndedBySignal
    from flexslurm.errors import DeadlineExceeded

    try:
        answer = launching.wait_until_serving(plan, _say, timeout)
    except DeadlineExceeded:
        raise
    except FlexslurmError:
        submitting.cancel_all(plan, made)
        _say("cancelled what was submitted")
        raise
    except (KeyboardInterrupt, EndedBySignal):
        click.echo(f"\nthe service goes on; end it with: flexslurm stop{where}", err=True)
        raise
    model = plan.service.model.name or Path(plan.service.model.path).name
    keys = plan.service.gateway.api_keys_file
    key = "" if keys is None else "    -H 'Authorization: Bearer KEY' \\\n"  # one of that file
    click.echo(
        f"\n{plan.service.name} serves at {answer.endpoint}/v1\n"
        f"  curl {answer.endpoint}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
        f"{key}"
        f'    -d \'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello"}}]}}\'\n'
        f"  flexslurm status{where}\n"
        f"  flexslurm stop{where}"
    )


@click.command()
@shared.SERVICE
@click.option("--json", "as_json", is_flag=True, help="The same as JSON.")
@click.option("--watch", is_flag=True, help="Again every second, until interrupted.")
@shared.SERVICE_DIR
def status(service: str | None, as_json: bool, watch: bool, service_dir: str | None) -> None:
    """Show what a service runs on, in which gear and why."""
    from flexslurm.cli.ask import ask_status
    from flexslurm.cli.show import render_status

    directory = find_service(service, service_dir)
    while True:
        answer = ask_status(directory)
        if as_json:
            import msgspec

            click.echo(msgspec.json.format(msgspec.json.encode(answer)).decode())
        else:
            if watch:
                click.clear()
            click.echo(render_status(answer))
        if not watch:
            return
        time.sleep(1.0)


def _is_launched(service: str) -> bool:
    """Whether it was launched, or nothing else can be meant."""
    directory = service_directory(service)
    return directory.service.exists() or not any(directory.path.parent.glob("*/service.yaml"))


@click.command()
@shared.SERVICE
@click.argument("part", required=False)
@click.option("--follow", "-f", is_flag=True, help="Go on as lines come.")
@click.option(
    "--lines", "-n", type=click.IntRange(min=0), default=50, show_default=True,
    help="Lines from the end.",
)  # fmt: skip
@shared.SERVICE_DIR
def logs(
    service: str | None, part: str | None, follow: bool, lines: int, service_dir: str | None
) -> None:
    """Show logs of a service, or list which there are.

    PART is head, a pilot's name, a job, a worker, or a path out of the list.
    """
    from flexslurm.cli.log_choice import choose, listing
    from flexslurm.cli.log_files import follow_files, log_files, tail_files

    if part is None and service is not None and (service_dir or not _is_launched(service)):
        service, part = None, service  # there is one service, and the only word is the part
    directory = find_service(service, service_dir)
    files, jobs = log_files(directory.logs), directory.jobs_now()
    if part is None:
        for line in listing(files, jobs, time.time()):
            click.echo(line)
        return
    chosen = choose(files, part, jobs)
    paths = [directory.logs / file.name for file in chosen]
    for line in tail_files(paths, lines, [file.name for file in chosen]):
        click.echo(line)
    if follow:
        follow_files(paths, click.echo)


@click.command()
@shared.SERVICE
@click.option(
    "--drain",
    type=shared.SECONDS,
    default=0.0,
    metavar="S",
    help="Let running requests end for this long first.",
)
@click.option("--timeout", type=shared.SECONDS, default=60.0, show_default=True, metavar="S")
@shared.SERVICE_DIR  # fmt: skip
def stop(service: str | None, drain: float, timeout: float, service_dir: str | None) -> None:
    """End a service: its head, its pilots and their jobs."""
    from flexslurm.cli.stopping import stop_service

    stop_service(find_service(service, service_dir), drain, timeout, _say)
