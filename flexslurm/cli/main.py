"""The flexslurm command: finds the subcommand and runs it; never imports what it does not run.

Each subcommand lives in a module that is imported when it is called, so that `--help` and quick
commands answer at once on a busy login node.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

import click

from flexslurm import __version__
from flexslurm.cli.endings import EndedBySignal, endings_raise
from flexslurm.cli.reporting import UnknownCommand, forget_output, report, report_ending

# name: (module:attribute, what `--help` says), in the order of use
COMMANDS: dict[str, tuple[str, str]] = {
    "launch": (
        "flexslurm.cli.service_commands:launch",
        "Start a service and wait until its endpoint answers.",
    ),
    "status": (
        "flexslurm.cli.service_commands:status",
        "Show a service: gear, pilots, requests, and why.",
    ),
    "logs": ("flexslurm.cli.service_commands:logs", "Show the logs of a service's processes."),
    "stop": ("flexslurm.cli.service_commands:stop", "End a service and its jobs."),
    "cordon": (
        "flexslurm.cli.shift_commands:cordon",
        "Take no new work on some nodes of a service.",
    ),
    "shift": (
        "flexslurm.cli.shift_commands:shift",
        "Go into another gear, or print what that would take.",
    ),
    "drain": (
        "flexslurm.cli.shift_commands:drain",
        "Move a service off some nodes, and give them back.",
    ),
    "release": (
        "flexslurm.cli.shift_commands:release",
        "Give one node of a pilot back, and keep the others.",
    ),
    "script": (
        "flexslurm.cli.script_command:script",
        "Print the job script of a whole service in one allocation.",
    ),
    "plan": ("flexslurm.cli.plan_commands:plan", "Show the gears for a model and a pool of GPUs."),
    "profile": (
        "flexslurm.cli.profile_command:profile",
        "Measure how long a model's layers take on a GPU type.",
    ),
    "probe": ("flexslurm.cli.probe_command:probe", "Measure the links between nodes."),
    "model": ("flexslurm.cli.model_commands:model", "Prepare a model's files, or check them."),
    "config": (
        "flexslurm.cli.config_commands:config",
        "Show effective settings and where each comes from.",
    ),
    "site": (
        "flexslurm.cli.site_commands:site",
        "Write a site file from a live cluster, or check one.",
    ),
    "doctor": (
        "flexslurm.cli.doctor_command:doctor",
        "Find out what would keep a service from running here.",
    ),
    "hooks": ("flexslurm.cli.hooks_commands:hooks", "Hooks for Slurm that an admin may install."),
    "notify": ("flexslurm.cli.notify_command:notify", "Called by those hooks: tell a service."),
    "sandbox": (
        "flexslurm.cli.sandbox_commands:sandbox",
        "A private Slurm on this machine, to try things on.",
    ),
    "demo": (
        "flexslurm.cli.demo:demo",
        "Serve a small model in a sandbox, lose a node, and see it go on.",
    ),
    "bench": ("flexslurm.cli.bench_commands:bench", "Measure shifts on this machine."),
    "version": ("flexslurm.cli.version_command:version", "Show versions."),
}


class CommandGroup(click.Group):
    """A group that answers an unknown word with the nearest command."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        word = args[0]
        if word[:1] != "-" and word not in self.list_commands(ctx):
            raise UnknownCommand(word, self.list_commands(ctx), ctx)
        return super().resolve_command(ctx, args)


class LazyGroup(CommandGroup):
    """A group over COMMANDS; a subcommand's module is imported when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = COMMANDS.get(cmd_name)
        return None if entry is None else load(entry[0])

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, words) for name, (_, words) in COMMANDS.items()])


def load(target: str) -> click.Command:
    """Import the command that a `module:attribute` of the table names."""
    module, attribute = target.split(":")
    command = getattr(importlib.import_module(module), attribute)
    assert isinstance(command, click.Command), f"{target} is not a command"
    return command


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: 2 usage, 3 configuration, 4 model, 5 capacity, 6 Slurm, 7 service, "
    "8 environment, 9 deadline, 1 a bug.",
)
@click.version_option(__version__, message="flexslurm %(version)s")
def cli() -> None:
    """Serve a large language model on whatever GPUs a Slurm cluster can spare."""


def run(arguments: Sequence[str]) -> int:
    """Run one command line; returns its exit code and raises nothing."""
    try:
        with endings_raise(), cli.make_context("flexslurm", list(arguments)) as context:
            cli.invoke(context)
        sys.stdout.flush()
    except click.exceptions.Exit as ending:
        return ending.exit_code
    except EndedBySignal as ending:
        return report_ending(ending)
    except SystemExit as ending:
        return ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException as error:  # noqa: BLE001 - the one place that turns errors into exit codes
        return report(error)
    return 0


def _open_streams() -> None:
    """Hooks and daemons may start us without them; no file of ours may take their numbers."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number: this one
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            setattr(sys, name, os.fdopen(nowhere, "w", encoding="utf-8"))


def main() -> None:
    """The entry point of the `flexslurm` script."""
    _open_streams()
    instruction = os.environ.get("_FLEXSLURM_COMPLETE")
    if instruction:
        from click.shell_completion import shell_complete

        sys.exit(shell_complete(cli, {}, "flexslurm", "_FLEXSLURM_COMPLETE", instruction))
    for stream in (sys.stdout, sys.stderr):
        # A terminal without our arrows and lines gets question marks, not a traceback.
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    sys.exit(_flushed(run(sys.argv[1:])))


def _flushed(code: int) -> int:
    """The exit code, or that of output that cannot be written: Python's own would be 120."""
    try:
        sys.stdout.flush()
    except OSError as error:
        code = code or report(error)
        forget_output()
    return code
