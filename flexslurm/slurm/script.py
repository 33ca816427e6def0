"""Rendering batch scripts from a pilot's or the head's specification; pure text, runs nothing.

Everything that comes from outside is quoted for the shell. Options stand in `#SBATCH` lines but for
those that sbatch would misread there.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flexslurm.config.site import Partition, Site
from flexslurm.errors import ConfigError
from flexslurm.slurm.gpu_request import gres_option
from flexslurm.slurm.states import EXIT_GIVE_BACK
from flexslurm.slurm.times import format_duration

MAX_GIVE_BACKS = 1000
LEAST_WARNING_S = 30
"""Our jobs ask to be warned at least this long before their time limit."""
_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")
_ENV_NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")
# sbatch takes an #SBATCH line with one of these words anywhere for a component's separator.
HET_WORDS = re.compile(r"hetjob|packjob", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class PilotSpec:
    """One job that holds GPUs of one type, and the command each of its nodes runs."""

    name: str
    partition: str | None
    """None: Slurm's default partition; not used by local jobs."""
    gpu_type: str
    """As in the site file; Slurm's own name for it comes from there."""
    gpus: int
    """On each node."""
    nodes: int
    walltime_s: float | None
    """None: the partition's default_walltime in the site file, or what Slurm gives."""
    command: tuple[str, ...]
    log_dir: Path
    env: Mapping[str, str] = field(default_factory=dict)
    comment: str | None = None
    """Hooks find the service by it; a comment among the site's own options wins."""
    least_s: float | None = None
    """Slurm may give it as little as this to start it sooner (--time-min)."""


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """The job that runs the head; its place and size come from the site file's `head`."""

    name: str
    command: tuple[str, ...]
    log_dir: Path
    env: Mapping[str, str] = field(default_factory=dict)
    comment: str | None = None
    """Hooks find the service by it; a comment among the site's own options wins."""


@dataclass(frozen=True, slots=True)
class BatchScript:
    """What goes to sbatch: the file's text, and options that only the command line can carry."""

    text: str
    arguments: tuple[str, ...] = ()


# ------------------------------------------------------------------------------------ options


def pilot_options(spec: PilotSpec, site: Site) -> list[str]:
    """Options of sbatch for a pilot. Raises ConfigError for what Slurm could not take."""
    partition = _partition(spec.partition, site)
    walltime = partition_walltime_s(spec.walltime_s, partition)
    return [
        *_common(spec.name, spec.log_dir, spec.comment),
        f"--nodes={spec.nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={pilot_cpus(spec, site)}",
        gres_option(spec.gpu_type, spec.gpus, site),
        # A site may default to JobRequeue=0: say it either way.
        "--requeue" if partition.requeue else "--no-requeue",
        "--no-kill",
        # Without B: the steps hear it. With B: sites that send this signal at preemption would
        # send it to the batch shell alone, and the agents would hear nothing.
        f"--signal=USR1@{warning_s(walltime)}",
        *where_options(spec.partition, partition, walltime),
        *([] if spec.least_s is None else [f"--time-min={format_duration(spec.least_s)}"]),
        *partition.sbatch_args,
    ]


def head_options(spec: HeadSpec, site: Site) -> list[str]:
    """Options of sbatch for the head's job; its partition's entry in the site file counts too."""
    head = site.head
    partition = _partition(head.partition, site)
    walltime = partition_walltime_s(head.walltime, partition)
    return [
        *_common(spec.name, spec.log_dir, spec.comment),
        "--nodes=1",
        "--ntasks=1",
        f"--cpus-per-task={head.cpus}",
        f"--mem={max(1, head.memory // 2**20)}M",
        "--requeue",
        # The head is the batch step itself: only with B: does it hear this.
        f"--signal=B:USR1@{warning_s(walltime)}",
        *where_options(head.partition, partition, walltime),
        *head.sbatch_args,
    ]


def _partition(name: str | None, site: Site) -> Partition:
    """The site file's entry; an empty one for Slurm's default partition."""
    return site.partitions.get(name or "", Partition())


def partition_walltime_s(asked_s: float | None, partition: Partition) -> float | None:
    """What is asked for, or the partition's default, at most its limit; None: what Slurm gives."""
    walltime_s = partition.default_walltime if asked_s is None else asked_s
    if walltime_s is None or partition.max_walltime is None:
        return walltime_s
    return min(walltime_s, partition.max_walltime)


def where_options(name: str | None, partition: Partition, walltime_s: float | None) -> list[str]:
    """Options for where a job runs, on whose account and for how long."""
    time = None if walltime_s is None else format_duration(walltime_s)
    given = {
        "partition": name,
        "time": time,
        "account": partition.account,
        "qos": partition.qos,
        "constraint": partition.constraint,
    }
    return [f"--{option}={value}" for option, value in given.items() if value is not None]


def _common(name: str, log_dir: Path, comment: str | None) -> list[str]:
    if not _NAME.match(name):
        raise ConfigError(
            f"'{name}' cannot be a job's name", hint="use letters, digits, '_', '.' and '-'"
        )
    return [
        f"--job-name={name}",
        f"--output={log_pattern(log_dir, name, '%j.batch')}",
        "--open-mode=append",
        *([] if comment is None else [f"--comment={comment}"]),
    ]


def log_pattern(log_dir: Path, name: str, rest: str) -> str:
    """A file name with Slurm's own patterns only in `rest`."""
    return f"{log_dir}/{name}.".replace("%", "%%") + rest + ".log"


def pilot_cpus(spec: PilotSpec, site: Site) -> int:
    """CPUs of a pilot on each of its nodes."""
    return spec.gpus * _partition(spec.partition, site).cpus_per_gpu


def warning_s(walltime_s: float | None) -> int:
    """How long before the end of its time limit a job wants to be warned: a tenth of it."""
    return round(min(120.0, max(LEAST_WARNING_S, (walltime_s or 1200.0) / 10)))


# ------------------------------------------------------------------------------------ scripts


def pilot_script(spec: PilotSpec, site: Site, command: Sequence[str]) -> BatchScript:
    """A pilot's script; each node runs `command` as a task of one step."""
    step = [
        site.slurm.commands.get("srun", "srun"),
        "--unbuffered",
        "--overlap",
        "--no-kill",
        "--kill-on-bad-exit=0",
        "--wait=0",
        "--mpi=none",
        f"--nodes={spec.nodes}",
        f"--ntasks={spec.nodes}",
        "--ntasks-per-node=1",
        # Steps do not inherit it from sbatch in 22.05 and 23.02.
        f"--cpus-per-task={pilot_cpus(spec, site)}",
        f"--output={log_pattern(spec.log_dir, spec.name, '%j.%n')}",
        "--open-mode=append",
    ]
    scontrol = site.slurm.commands.get("scontrol", "scontrol")
    requeue = _partition(spec.partition, site).requeue
    body = [
        shlex.join([*step, *command]),
        "status=$?",
        *(_give_back(scontrol) if requeue else []),
        'exit "$status"',
    ]
    return _script(pilot_options(spec, site), [*_environment(site, spec.env), *body])


def head_script(spec: HeadSpec, site: Site, command: Sequence[str]) -> BatchScript:
    """The head's script: one process, in the batch step itself."""
    body = [f"exec {shlex.join(command)}"]
    return _script(head_options(spec, site), [*_environment(site, spec.env), *body])


def _give_back(scontrol: str) -> list[str]:
    """Requeue where the step asks for it, or was ended by SIGTERM before it could handle it.

    Slurm before 24.05 takes a job that ends during the grace time for finished and does not
    requeue it. But a requeue would bring a cancelled job back to life: then the batch shell has got
    SIGTERM too, and the job no longer runs.
    """
    command = shlex.quote(scontrol)
    return [
        f'if [ "$status" -eq {EXIT_GIVE_BACK} ] || [ "$status" -eq 143 ]; then',
        "  sleep 1",
        f"  again=$((${{SLURM_RESTART_COUNT:-0}} < {MAX_GIVE_BACKS}))",
        f'  case "$told:$again:$({command} show job -o "$SLURM_JOB_ID")" in',
        f'    :1:*" JobState=RUNNING "*) {command} requeue "$SLURM_JOB_ID" && sleep 60 ;;',
        "  esac",
        "fi",
    ]


def _environment(site: Site, env: Mapping[str, str]) -> list[str]:
    lines = [
        "# The batch shell outlives a warning: its step, or what it becomes, reacts to it.",
        "told=",
        "trap told=yes TERM",
        "trap : USR1 USR2 CONT",
        "# sbatch sets it beside SLURM_CPUS_PER_TASK from 23.11 on, and srun refuses both.",
        "unset SLURM_TRES_PER_TASK",
    ]
    variables = {
        "SUBMITIT_LOG_LEVEL": "WARNING",  # the job's log is for what our processes say
        **site.env,
        **env,
        "SUBMITIT_EXECUTOR": "slurm",
    }
    return [*lines, *export_lines(variables), *site.setup]


def export_lines(env: Mapping[str, str]) -> list[str]:
    """Lines of a shell. Raises ConfigError for what cannot be a variable's name."""
    for name in env:
        if not _ENV_NAME.match(name):
            raise ConfigError(f"'{name}' cannot be the name of an environment variable", key="env")
    return [f"export {name}={shlex.quote(value)}" for name, value in env.items()]


def _script(options: Sequence[str], body: Sequence[str]) -> BatchScript:
    for option in options:
        checked_option(option)
    outside = tuple(option for option in options if HET_WORDS.search(option))
    inside = [f"#SBATCH {quoted(option)}" for option in options if option not in outside]
    return BatchScript("\n".join(["#!/bin/bash", *inside, "", *body, ""]), outside)


def checked_option(option: str) -> str:
    """The option itself. Raises ConfigError for what is none."""
    if "\n" in option or "\0" in option or not option.startswith("-"):
        raise ConfigError(
            f"'{option}' is not an option of sbatch", hint="write --name or --name=value"
        )
    return option


def quoted(option: str) -> str:
    """`--name=value` with the value quoted where sbatch's own reader needs it."""
    name, equals, value = option.partition("=")
    return f"{name}{equals}{shlex.quote(value)}" if equals else option
