"""`flexslurm doctor`: finds out what would keep a service from running; mends nothing itself."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flexslurm.cli import shared_options as shared

if TYPE_CHECKING:
    from flexslurm.cli.doctor_words import CheckVerdict
    from flexslurm.config.site import Site
    from flexslurm.slurm.client import SlurmClient

_OLDEST = (20, 11, 0)


@click.command()
@shared.site("Without it Slurm is asked as it comes, and any address will do.")
@click.option(
    "--model", metavar="DIR", type=click.Path(path_type=Path), help="Must be readable everywhere."
)
@click.option("--job", "in_job", is_flag=True, help="In an allocation: on every node of it.")
@shared.JSON
@click.option(
    "--timeout",
    type=shared.Number(min=4, max=3600),
    default=60.0,
    show_default=True,
    metavar="S",
    help="With --job.",
)
def doctor(
    site_file: Path | None, model: Path | None, in_job: bool, as_json: bool, timeout: float
) -> None:
    """Check this machine and Slurm, or with --job every node of an allocation."""
    from flexslurm.cli.doctor_verdicts import table
    from flexslurm.cli.doctor_words import Result
    from flexslurm.config.check import site_with_slurm
    from flexslurm.errors import EnvironmentFault

    site = None if site_file is None else site_with_slurm(site_file)
    found = (
        list(_job_checks(site, site_file, model, timeout))
        if in_job
        else list(_login_checks(site, site_file, model))
    )
    if as_json:
        click.echo(json.dumps([asdict(verdict) for verdict in found], indent=2))
    else:
        click.echo(table(found))
    failed = sum(verdict.result is Result.FAIL for verdict in found)
    if failed:
        raise EnvironmentFault(f"{failed} check{'s' * (failed != 1)} failed")


# ---------------------------------------------------------------------------------- login node


def _login_checks(
    site: Site | None, site_file: Path | None, model: Path | None
) -> Iterator[CheckVerdict]:
    from flexslurm.cli.doctor_probe import facts
    from flexslurm.cli.doctor_verdicts import judge_node
    from flexslurm.cli.doctor_words import ok
    from flexslurm.slurm.client import SlurmClient

    client = SlurmClient(None if site is None else site.slurm)
    yield from _slurm(client)
    yield from _rest(site)
    if site_file is not None:
        yield from _site(site_file)
    yield from _directory(_shared(site))
    me = facts(None if site_file is None else str(site_file), None if model is None else str(model))
    yield ok("python", me["node"], f"{me['python']} ({me['executable']})")
    yield from _packages(me)
    yield from judge_node(me, _virtual(site))


def _slurm(client: SlurmClient) -> Iterator[CheckVerdict]:
    from flexslurm.cli.doctor_words import fail, ok
    from flexslurm.errors import FlexslurmError

    try:
        version = client.version()
        began = time.monotonic()
        nodes = client.nodes()
        took_s = time.monotonic() - began
    except FlexslurmError as error:
        mend = error.hint or "see 'scontrol ping'; is this a login node, and is munge running?"
        yield fail("slurm", "controller", error.message, mend)
        return
    words = f"{version[0]}.{version[1]:02d}.{version[2]}"
    if version < _OLDEST:
        yield fail("slurm", "controller", f"{words} is too old", "20.11 or later is needed")
    else:
        yield ok("slurm", "controller", f"{words}, answers in {took_s:.2f} s")
    usable = sum(node.state.usable_now for node in nodes)
    yield ok("nodes", "controller", f"{usable} of {len(nodes)} usable now")


def _rest(site: Site | None) -> Iterator[CheckVerdict]:
    """slurmrestd, where the site file names one."""
    from flexslurm.cli.doctor_words import fail, ok
    from flexslurm.errors import FlexslurmError
    from flexslurm.slurm.rest import ask_rest

    settings = None if site is None else site.slurm.rest
    if site is None or settings is None:
        return
    began = time.monotonic()
    try:
        ask_rest(settings, "/jobs/", site.slurm.command_timeout)
    except FlexslurmError as error:
        mend = error.hint or "mend slurm.rest in the site file, or leave it out: squeue does it too"
        yield fail("slurmrestd", settings.url, error.message, mend)
        return
    yield ok("slurmrestd", settings.url, f"answers in {time.monotonic() - began:.2f} s")


def _site(site_file: Path) -> Iterator[CheckVerdict]:
    from flexslurm.cli.doctor_words import fail, note, ok
    from flexslurm.cli.site_commands import findings_of
    from flexslurm.config.sources import load_site
    from flexslurm.errors import FlexslurmError

    loaded = load_site(site_file)
    try:
        found = findings_of(loaded, offline=False)
    except FlexslurmError:  # that Slurm is not there has been said
        found = findings_of(loaded, offline=True)
    for problem in found.problems:
        yield fail("site file", site_file.name, problem, f"mend {site_file}")
    for line in found.notes:
        yield note("site file", site_file.name, line)
    if not found.problems:
        yield ok("site file", site_file.name, f"{len(loaded.value.partitions)} partitions")


def _packages(me: dict[str, Any]) -> Iterator[CheckVerdict]:
    """Whether what flexslurm says it needs is there."""
    from importlib import metadata

    from flexslurm.cli.doctor_words import fail, note, ok

    if not _installed("flexslurm"):
        mend = f"{sys.executable} -m pip install . in the clone"
        yield note("packages", me["node"], "flexslurm itself runs from its files alone", mend)
        return
    needed = [line for line in metadata.requires("flexslurm") or [] if "extra ==" not in line]
    names = [found[0] for line in needed if (found := re.match(r"[\w.-]+", line))]
    missing = [name for name in names if not _installed(name)]
    if missing:
        mend = f"{sys.executable} -m pip install {' '.join(missing)}"
        yield fail("packages", me["node"], f"missing: {', '.join(missing)}", mend)
    else:
        yield ok("packages", me["node"], f"{len(names)} of {len(names)}")


def _installed(name: str) -> bool:
    from importlib import metadata

    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _directory(path: Path) -> Iterator[CheckVerdict]:
    """Writable, with room, and on a server whose clock agrees with ours."""
    from flexslurm.cli.doctor_verdicts import clock
    from flexslurm.cli.doctor_words import fail, note, ok

    probe = path / f".doctor-{secrets.token_hex(4)}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        before = time.time()
        probe.write_text("x")
        skew_s = probe.stat().st_mtime - (before + time.time()) / 2
        probe.unlink()
        free = shutil.disk_usage(path).free
    except OSError as error:
        mend = "set paths.shared_dir in the site file to what all nodes can write"
        yield fail("shared directory", str(path), error.strerror or str(error), mend)
        return
    words = f"writable, {free / 2**30:.1f} GiB free"
    if free < 2**30:
        yield note("shared directory", str(path), words, "logs and journals need room")
    else:
        yield ok("shared directory", str(path), words)
    yield clock(str(path), skew_s, "this machine")


def _shared(site: Site | None) -> Path:
    """Where services would live."""
    from flexslurm.cli.service_places import service_directory

    given = None if site is None else site.paths.shared_dir
    shared = None if given is None else f"{given}/services"
    return service_directory("x", shared=shared).path.parent


def _virtual(site: Site | None) -> bool:
    return site is not None and all(entry.virtual for entry in site.gpu_types.values())


# ------------------------------------------------------------------------------- in a job


def _job_checks(
    site: Site | None, site_file: Path | None, model: Path | None, timeout_s: float
) -> Iterator[CheckVerdict]:
    from flexslurm.cli.doctor_verdicts import judge_meeting, judge_node
    from flexslurm.slurm.client import SlurmClient
    from flexslurm.slurm.each_node import nodes_of_allocation, on_each_node

    count = nodes_of_allocation()
    client = SlurmClient(None if site is None else site.slurm)
    with _meeting_place(_shared(site)) as directory:
        argv = [
            sys.executable, "-P", "-m", "flexslurm.cli.doctor_probe", f"--directory={directory}",
            f"--count={count}", f"--timeout={timeout_s / 4:g}",
            *([] if site_file is None else [f"--site={site_file.absolute()}"]),
            *([] if model is None else [f"--model={model.absolute()}"]),
        ]  # fmt: skip
        done = on_each_node(client, argv, timeout_s)
    if done.err.strip():
        click.echo(done.err.rstrip(), err=True)
    nodes = sorted(_lines(done.out), key=lambda me: str(me["node"]))
    for me in nodes:
        yield from judge_node(me, _virtual(site))
    yield from judge_meeting(nodes, count)


@contextmanager
def _meeting_place(root: Path) -> Iterator[Path]:
    """A directory of this run's own, private to the user. Raises EnvironmentFault."""
    from flexslurm.errors import EnvironmentFault

    path = root.absolute() / f".doctor-{os.environ.get('SLURM_JOB_ID', '')}-{secrets.token_hex(4)}"
    try:
        path.mkdir(parents=True, mode=0o700)
    except OSError as error:
        raise EnvironmentFault(
            f"shared directory: cannot make {path}: {error.strerror}",
            hint="set paths.shared_dir in the site file to what all nodes can write",
        ) from None
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _lines(out: str) -> list[dict[str, Any]]:
    """The probes' lines; a site's banners between them are left out."""
    found = []
    for line in out.splitlines():
        if line.startswith('{"node"'):
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
    return found
