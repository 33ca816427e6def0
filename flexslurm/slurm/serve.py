"""The script of a whole service in one allocation, `sbatch/serve.sh` among them; pure text.

One component of the job for each kind of node. Never submits anything.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flexslurm.config.service import Fragment
from flexslurm.config.site import Partition, Site
from flexslurm.errors import ConfigError
from flexslurm.slurm.gpu_request import gres_option
from flexslurm.slurm.script import (
    HET_WORDS,
    checked_option,
    export_lines,
    partition_walltime_s,
    quoted,
    warning_s,
    where_options,
)
from flexslurm.slurm.times import format_duration

_HEAD = """\
#!/bin/bash
# A whole service in one allocation: the head in the batch step, an agent on every node.
#
#   {usage}
#
# The #SBATCH lines ask for {pool}: change them to the nodes you want.
# Each component of the job is one kind of node. Slurm starts all of them together and preempts all
# of them together: for a service that outlives its preemption piece by piece, use flexslurm launch
# from a login node instead.
# {loss}
"""
_BODY = """\

{before}# Without a shell in between, signals reach the launcher. The job ends with the service.
exec {launch} --cluster allocation
"""
_COMPONENT = re.compile(
    r"^(?:(?P<partition>[^/:]+)/)?(?P<type>[^/:]+):(?P<gpus>\d{1,5})(?:x(?P<n>\d{1,5}))?$", re.ASCII
)
# Not carried over from the first component to the others: without it the loss of one of their nodes
# takes the whole job.
_NO_KILL = ("--no-kill",)


@dataclass(frozen=True, slots=True)
class ServeCall:
    """Which service the script launches; without one it is a template that takes arguments."""

    name: str
    command: tuple[str, ...]
    """How flexslurm is started on the nodes."""
    service_file: Path
    site_file: Path
    service_dir: Path

    def launch(self) -> str:
        words = [
            *self.command, "launch", str(self.service_file), "--site", str(self.site_file),
            "--service-dir", str(self.service_dir),
        ]  # fmt: skip
        return f'{shlex.join(words)} "$@"'


def serve_script(
    pool: Sequence[Fragment],
    site: Site,
    call: ServeCall | None = None,
    *,
    head_node: bool = False,
) -> str:
    """The script for a pool; `head_node`: a first component, of the site's `head`, without GPUs.

    Raises ConfigError for a GPU type the site does not define, and for what sbatch would misread.
    """
    text = ", ".join(f"{f.count * f.nodes} x {f.gpu_type}:{f.gpus}" for f in pool)
    usage = (
        "sbatch sbatch/serve.sh SERVICE.yaml --site SITE.yaml [other options of flexslurm launch]"
    )
    if call is not None:
        usage = "sbatch THIS_FILE [options of flexslurm launch]"
    comment = [] if call is None else [f"--comment=flexslurm:{call.service_dir}"]
    components = [_component(fragment, site, comment) for fragment in _merged(pool)]
    if head_node:
        components.insert(0, _head_component(site, comment))
    options = [_line(option) for option in _whole_job(pool, site, call)]
    lines = [*options, "\n#SBATCH hetjob\n".join(" ".join(["#SBATCH", *c]) for c in components)]
    loss = loss_in_words(pool, head_node=head_node)
    before = "" if call is None else _before(site, call)
    launch = 'flexslurm launch "$@"' if call is None else call.launch()
    return (
        _HEAD.format(usage=usage, pool=text, loss=loss)
        + "\n".join(lines)
        + "\n"
        + _BODY.format(before=before, launch=launch)
    )


def loss_in_words(pool: Sequence[Fragment], *, head_node: bool = False) -> str:
    """What the loss of a node means for the job.

    With --no-kill slurmctld takes a lost node out of a job of several nodes and ends a job of one.
    It asks each component of a heterogeneous job so, whichever of them the node belonged to
    (kill_running_job_by_node_name in slurmctld/job_mgr.c; seen with 22.05).
    """
    counts = [fragment.count for fragment in _merged(pool)] + [1] * head_node
    if min(counts) > 1:
        return "It outlives the loss of a node, of any but the first."
    if len(counts) == 1:
        return "It ends with its node."
    return "It ends with any node: it would outlive one only if each component had two or more."


def read_components(text: str) -> list[Fragment]:
    """`[PARTITION/]TYPE:GPUS[xNODES]`, separated by commas. Raises ConfigError."""
    found = []
    for item in text.split(","):
        match = _COMPONENT.match(item.strip())
        gpus, nodes = (0, 0) if match is None else (int(match["gpus"]), int(match["n"] or 1))
        if match is None or not 1 <= gpus <= 1024 or not 1 <= nodes <= 65536:
            raise ConfigError(
                f"--components: cannot read '{item.strip()}'",
                hint="write [PARTITION/]TYPE:GPUS[xNODES],… as spare/a100:4x2,spare/l40s:2",
            )
        found.append(
            Fragment(partition=match["partition"], gpu_type=match["type"], gpus=gpus, count=nodes)
        )
    return found


def _merged(pool: Sequence[Fragment]) -> list[Fragment]:
    """One entry for each kind of node: entries that differ in walltime alone are one component."""
    found: dict[tuple[str | None, str, int], Fragment] = {}
    for entry in pool:
        kind = (entry.partition, entry.gpu_type, entry.gpus)
        nodes = entry.count * entry.nodes + (found[kind].count if kind in found else 0)
        found[kind] = entry.model_copy(update={"count": nodes, "nodes": 1})
    return list(found.values())


def _whole_job(pool: Sequence[Fragment], site: Site, call: ServeCall | None) -> list[str]:
    """Options of the job as a whole; Slurm carries them over to all components."""
    entries = [(fragment, _partition(fragment.partition, site)) for fragment in pool]
    walltime = _walltime_s(entries)
    name = "flexslurm" if call is None else f"flexslurm.{call.name}"
    options = [
        f"--job-name={name}",
        f"--output={name}.%j.log",
        "--open-mode=append",
        "--requeue" if all(entry.requeue for _, entry in entries) else "--no-requeue",
        f"--signal=B:USR1@{warning_s(walltime)}",
    ]
    return options if walltime is None else [*options, f"--time={format_duration(walltime)}"]


def _walltime_s(entries: Sequence[tuple[Fragment, Partition]]) -> float | None:
    """The shortest that is asked for, and within every partition's limit; None: Slurm's own."""
    asked = [partition_walltime_s(fragment.walltime, entry) for fragment, entry in entries]
    given = [walltime for walltime in asked if walltime is not None]
    limits = [entry.max_walltime for _, entry in entries if entry.max_walltime is not None]
    return min([*given, *limits]) if given else None


def _component(fragment: Fragment, site: Site, comment: Sequence[str]) -> list[str]:
    partition = _partition(fragment.partition, site)
    options = [
        *where_options(fragment.partition, partition, None),
        f"--nodes={fragment.count}",
        "--ntasks-per-node=1",
        *_NO_KILL,
        f"--cpus-per-task={fragment.gpus * partition.cpus_per_gpu}",
        gres_option(fragment.gpu_type, fragment.gpus, site),
        *comment,
        *partition.sbatch_args,
    ]
    return [_option(option) for option in options]


def _head_component(site: Site, comment: Sequence[str]) -> list[str]:
    head = site.head
    options = [
        *where_options(head.partition, _partition(head.partition, site), None),
        "--nodes=1",
        "--ntasks=1",
        *_NO_KILL,
        f"--cpus-per-task={head.cpus}",
        f"--mem={max(1, head.memory // 2**20)}M",
        *comment,
        *head.sbatch_args,
    ]
    return [_option(option) for option in options]


def _before(site: Site, call: ServeCall) -> str:
    """Lines that stand before the launch: variables and setup of the site file."""
    env = {**site.env, "FLEXSLURM_SERVICE_DIR": str(call.service_dir)}
    lines = [
        "# sbatch sets it beside SLURM_CPUS_PER_TASK from 23.11 on, and srun refuses both.",
        "unset SLURM_TRES_PER_TASK",
        *export_lines(env),
        *site.setup,
    ]
    return "".join(f"{line}\n" for line in lines)


def _partition(name: str | None, site: Site) -> Partition:
    return site.partitions.get(name or "", Partition())


def _line(option: str) -> str:
    return f"#SBATCH {_option(option)}"


def _option(option: str) -> str:
    """An option as it stands in an #SBATCH line. Raises ConfigError where it cannot."""
    if HET_WORDS.search(option):
        raise ConfigError(
            f"sbatch would take this for the start of a component: '{option}'",
            hint="choose another directory or name: 'hetjob' may stand nowhere in an option",
        )
    return quoted(checked_option(option))
