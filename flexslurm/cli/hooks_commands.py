"""`flexslurm hooks`: lists, prints and writes what an admin may install; never restarts Slurm."""

from __future__ import annotations

import json
import os
import shutil
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from flexslurm.cli import shared_options as shared
from flexslurm.cli.main import CommandGroup
from flexslurm.cli.shared_options import Command

if TYPE_CHECKING:
    from flexslurm.config.site import Site
    from flexslurm.slurm.hook_files import Hook

_SITE = shared.site("Limits for the Lua hooks, and the names of Slurm's commands.")


def _on_files(*, to: str, force: str, register: str) -> Callable[[Command], Command]:
    """NAME and the options that installing and uninstalling share; what each means to them."""
    target = click.Path(path_type=Path, file_okay=False)
    parts = (
        click.argument("name"),
        click.option("--to", "directory", metavar="DIR", required=True, type=target, help=to),
        _SITE,
        click.option("--force", is_flag=True, help=force),
        click.option("--register", is_flag=True, help=register),
    )

    def add(command: Command) -> Command:
        for part in reversed(parts):
            command = part(command)
        return command

    return add


@click.group(cls=CommandGroup)
def hooks() -> None:
    """Hooks for Slurm that an admin may install; each is optional, polling is the base."""


@hooks.command("list")
def list_hooks() -> None:
    """Which hooks there are, what each does, and where it runs."""
    from flexslurm.slurm.hook_files import HOOKS

    width = max(map(len, HOOKS))
    for hook in HOOKS.values():
        click.echo(f"{hook.name:{width}}  {hook.words} (on {hook.runs_on})")


@hooks.command()
@click.argument("name")
@_SITE
def show(name: str, site_file: Path | None) -> None:
    """Print a hook's files as they would be installed, and the lines that go with them."""
    from flexslurm.slurm.hook_files import hook_named, hook_text

    hook = hook_named(name)
    site = _site(site_file)
    for packaged, installed in hook.all_files:
        click.echo(f"==> {installed} <==")
        click.echo(hook_text(packaged, site, own_command()))
    for line in hook.lines:
        click.echo(f"# {line.format(dir='DIR')}")


@hooks.command()
@_on_files(
    to="Where the files go; all hosts that run the hook must see it.",
    force="Replace files that are there and differ.",
    register="strigger: set the triggers as well (as SlurmUser).",
)
def install(
    name: str, directory: Path, site_file: Path | None, force: bool, register: bool
) -> None:
    """Write a hook's files, and say what is left to do."""
    from flexslurm.slurm.hook_files import hook_named

    hook = hook_named(name)
    site = _site(site_file)
    directory = directory.absolute()
    for path, written in _write(hook, directory, site, force).items():
        click.echo(f"wrote {path}" if written else f"{path} is there already")
    for warning in (*warnings_of(hook, own_command()), *beside_warnings(hook, directory)):
        click.echo(f"note: {warning}")
    lines = hook.lines
    if register and hook.name == "strigger":
        _register(directory, site)
        lines = lines[-1:]  # the others are done
    click.echo("then:")
    for line in lines:
        click.echo(f"  {line.format(dir=directory)}")


@hooks.command()
@click.argument("name", required=False)
@_SITE
@shared.JSON
def status(name: str | None, site_file: Path | None, as_json: bool) -> None:
    """Which hooks this cluster has, from Slurm's own configuration."""
    from flexslurm.slurm.hook_files import HOOKS, hook_named

    chosen = list(HOOKS.values()) if name is None else [hook_named(name)]
    rows = {hook.name: _found(hook, _site(site_file)) for hook in chosen}
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    width = max(map(len, rows))
    for hook_name, (state, words) in rows.items():
        click.echo(f"{hook_name:{width}}  {state:13}  {words}")


@hooks.command()
@_on_files(
    to="Where its files are.",
    force="Also where Slurm still names them, or does not say.",
    register="strigger: clear the triggers as well.",
)
def uninstall(
    name: str, directory: Path, site_file: Path | None, force: bool, register: bool
) -> None:
    """Remove a hook's files, once Slurm no longer runs them."""
    from flexslurm.errors import EnvironmentFault
    from flexslurm.slurm.hook_files import hook_named
    from flexslurm.slurm.hook_state import undo_lines

    hook, directory, site = hook_named(name), directory.absolute(), _site(site_file)
    if register and hook.name == "strigger":
        _clear(directory, site)
    state, words = _found(hook, site)
    if state in ("installed", "unknown") and not force:
        first = "; ".join(undo_lines(hook, directory))
        raise EnvironmentFault(
            f"{hook.name}: {words}: a file that Slurm misses drains its nodes",
            hint=f"first {first}; or --force",
        )
    for path in _remove(hook, directory):
        click.echo(f"removed {path}")
    for line in undo_lines(hook, directory) if state != "not installed" else ():
        click.echo(f"left to do: {line}")


def _found(hook: Hook, site: Site | None) -> tuple[str, str]:
    """installed, not installed, broken or unknown; and in words."""
    from flexslurm.errors import FlexslurmError
    from flexslurm.slurm.client import SlurmClient
    from flexslurm.slurm.hook_state import named_files, parse_triggers

    client = SlurmClient(None if site is None else site.slurm)
    try:
        config = client.config()
        told = client.call("strigger", "--get").out if hook.name == "strigger" else ""
    except FlexslurmError as error:
        return "unknown", error.message
    found = named_files(hook, config, parse_triggers(told))
    broken = [f"{named.path}: {named.problem}" for named in found if named.problem]
    if broken:
        return "broken", "; ".join(broken)
    if found:
        return "installed", ", ".join(named.path for named in found)
    return "not installed", f"flexslurm hooks install {hook.name} --to DIR"


def _remove(hook: Hook, directory: Path) -> list[Path]:
    """Remove our files, those too that no other hook here shares. EnvironmentFault: not ours."""
    from flexslurm.errors import EnvironmentFault
    from flexslurm.slurm.hook_files import HOOKS

    others = [other for other in HOOKS.values() if other.name != hook.name]
    shared = {
        name
        for other in others
        if any((directory / installed).exists() for _, installed in other.files)
        for _, name in other.beside
    }
    paths = [directory / name for _, name in hook.all_files if name not in shared]
    there = [path for path in paths if path.exists()]
    for path in there:
        if "flexslurm" not in path.read_text(errors="replace"):
            raise EnvironmentFault(f"{path} is not ours", hint="remove it by hand, if it is wanted")
    for path in there:
        path.unlink()
    return there


def _clear(directory: Path, site: Site | None) -> None:
    from flexslurm.slurm.client import SlurmClient
    from flexslurm.slurm.hook_state import parse_triggers

    client = SlurmClient(None if site is None else site.slurm)
    for trigger in parse_triggers(client.call("strigger", "--get").out):
        if Path(trigger.program).parent == directory:
            client.call("strigger", "--clear", f"--id={trigger.id}")
            click.echo(f"cleared: trigger {trigger.id} ({trigger.program})")


def own_command() -> list[str]:
    """How a hook starts this flexslurm: the script beside this Python, or the module."""
    beside = Path(sys.executable).parent / "flexslurm"
    if beside.is_file():
        return [str(beside)]
    found = shutil.which("flexslurm")
    program = "from flexslurm.cli.main import main; main()"
    return [found] if found else [sys.executable, "-P", "-c", program]


def _site(path: Path | None) -> Site | None:
    from flexslurm.config.check import site_with_slurm

    return None if path is None else site_with_slurm(path)


def _write(hook: Hook, directory: Path, site: Site | None, force: bool) -> dict[Path, bool]:
    """The files, and whether each was written: one that is as it should be stays, and its owner."""
    from flexslurm.errors import EnvironmentFault
    from flexslurm.slurm.hook_files import hook_text

    texts = {
        directory / installed: hook_text(packaged, site, own_command(), str(directory))
        for packaged, installed in hook.all_files
    }
    there = {path: path.read_text(errors="replace") for path in texts if path.exists()}
    missing = {path: text for path, text in texts.items() if there.get(path) != text}
    for path in missing:
        if not force and path in there:
            raise EnvironmentFault(
                f"{path} is there and differs",
                hint="--force replaces it; a site's own file can call ours, as its head says",
            )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for path, text in missing.items():
            part = path.with_name(f".{path.name}.part")
            part.write_text(text, encoding="utf-8")
            part.chmod(0o755 if hook.executable and path.suffix == ".sh" else 0o644)
            part.replace(path)
    except OSError as error:
        raise EnvironmentFault(
            f"cannot write into {directory}: {error.strerror}",
            hint="run as who owns it, or choose another directory with --to",
        ) from None
    return {path: path in missing for path in texts}


def warnings_of(hook: Hook, command: list[str]) -> list[str]:
    """What an admin should know before root runs this."""
    if not hook.executable:
        return []
    program = Path(command[0]).resolve()
    if not _others_may_replace(program):
        return []
    return [
        f"{program} or a directory above it is not root's alone: whoever may write there would run "
        "code as the hooks' user; install flexslurm where only root writes"
    ]


def beside_warnings(hook: Hook, directory: Path) -> list[str]:
    """What an admin should know before sudo lets SlurmUser run a file that was just written."""
    if not hook.beside:
        return []
    path = directory.resolve() / hook.beside[0][1]
    if not _others_may_replace(path):
        return []
    return [
        f"{path} or a directory above it is not root's alone: before sudo lets anybody run it, "
        "install it as root where only root writes, or who may write there becomes any user but "
        "root"
    ]


def _others_may_replace(path: Path) -> bool:
    """Whether it, or a directory above it, is another's than root's or open to others' writing."""
    return any(_is_open(place.stat()) for place in (path, *path.parents))


def _is_open(status: os.stat_result) -> bool:
    if status.st_uid != 0:
        return True
    if stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX:
        return False  # as /tmp: what is root's there stays
    of_group = stat.S_IWGRP if status.st_gid != 0 else 0
    return bool(status.st_mode & (of_group | stat.S_IWOTH))


def _register(directory: Path, site: Site | None) -> None:
    from flexslurm.slurm.client import SlurmClient
    from flexslurm.slurm.hook_files import trigger_arguments

    client = SlurmClient(None if site is None else site.slurm)
    for arguments in trigger_arguments(directory):
        client.call("strigger", *arguments)
        click.echo(f"set: strigger {' '.join(arguments)}")
