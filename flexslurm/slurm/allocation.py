"""Pilots inside the one allocation this process runs in; never asks Slurm for more nodes.

`sbatch/serve.sh` starts everything in one job, heterogeneous or not: the head in its batch step,
and one step over all of its nodes, in which each pilot is a process that is ordered on its node.
Slurm preempts such a job as a whole: this is the way for a fixed shape.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flexslurm.config.service import Fragment
from flexslurm.config.site import Site
from flexslurm.errors import CapacityError, EnvironmentFault, SlurmError
from flexslurm.slurm.client import SlurmClient
from flexslurm.slurm.gpu_request import gpu_request
from flexslurm.slurm.gres import Gres, parse_gres
from flexslurm.slurm.jobs import JobInfo
from flexslurm.slurm.local import LocalSubmitter
from flexslurm.slurm.nodelist import expand, expand_counts
from flexslurm.slurm.script import HeadSpec, PilotSpec

STEP_NAME = "step"
_FRESH_S = 5.0
"""The nodes of a job become fewer when one is lost: they are asked for again after so long."""
_SAY_S = 2.0
"""For a node to hear that a process shall end, and to say that it has."""
# How `scontrol show job -d` prints what a job holds on some of its nodes.
_HELD = re.compile(r"\bNodes=(\S+) CPU_IDs=\S* Mem=\S* GRES=(\S*)")
_IDENTITY = re.compile(
    r"^SLURM_(HET_SIZE|(JOB_ID|JOB_NODELIST|JOB_CPUS_PER_NODE)(_HET_GROUP_\d+)?)$"
)


@dataclass(frozen=True, slots=True)
class AllocatedNode:
    """One node of the allocation, with GPUs of one type."""

    name: str
    het_group: int | None
    """The component of a heterogeneous job; None: the job has no components."""
    gpu_type: str
    """As in the site file."""
    gpus: int
    cpus: int


@dataclass(frozen=True, slots=True)
class Component:
    """A component of the job, from the environment of its batch step."""

    het_group: int | None
    job_id: str
    nodes: tuple[str, ...]
    cpus: tuple[int, ...]


def components(environ: Mapping[str, str]) -> list[Component]:
    """The job's components. Raises EnvironmentFault outside of a job.

    Ids are read, not counted up from the first: Slurm does not promise that they follow each other.
    In the batch step SLURM_JOB_NODELIST is the first component's alone.
    """
    if "SLURM_JOB_ID" not in environ:
        raise EnvironmentFault(
            "this is not inside a Slurm job", hint="submit it: sbatch sbatch/serve.sh SERVICE.yaml"
        )
    size = environ.get("SLURM_HET_SIZE", "")
    if not size.isdecimal():
        return [_component(environ, None, "")]
    return [_component(environ, n, f"_HET_GROUP_{n}") for n in range(int(size))]


def _component(environ: Mapping[str, str], het_group: int | None, suffix: str) -> Component:
    nodes = expand(environ.get(f"SLURM_JOB_NODELIST{suffix}", ""))
    counts = expand_counts(environ.get(f"SLURM_JOB_CPUS_PER_NODE{suffix}", "1"))
    cpus = counts if len(counts) == len(nodes) else [min(counts)] * len(nodes)
    job_id = environ.get(f"SLURM_JOB_ID{suffix}", environ["SLURM_JOB_ID"])
    return Component(het_group, job_id, tuple(nodes), tuple(cpus))


def allocated_nodes(component: Component, details: str, site: Site) -> list[AllocatedNode]:
    """A component's nodes that hold GPUs; `details` is what `scontrol show job -d -o` says of it.

    Raises SlurmError for GPUs of a type that the site file does not have.
    """
    found: dict[str, AllocatedNode] = {}
    cpus = dict(zip(component.nodes, component.cpus, strict=True))
    for nodes, gres in _HELD.findall(details):
        held = _held(parse_gres(gres), site)
        if held is not None:
            for name in expand(nodes):
                count = cpus.get(name, 1)
                found[name] = AllocatedNode(name, component.het_group, *held, count)
    return [found[name] for name in component.nodes if name in found]


def _held(entries: Sequence[Gres], site: Site) -> tuple[str, int] | None:
    """The site's GPU type that a node's part of the job is of, and how many; None: no GPUs."""
    asked = {name: gpu_request(name, site) for name in site.gpu_types}
    counts = {name: request.gpus_in(entries) for name, request in asked.items()}
    types = [name for name, count in counts.items() if count]
    others = [entry for entry in entries if entry.whole_gpus]
    if not types and len(others) == 1 and others[0].type is None and len(asked) == 1:
        return next(iter(asked)), others[0].whole_gpus
    if len(types) == 1:
        return types[0], counts[types[0]]
    if not types and not others:
        return None
    told = ", ".join(str(e.type) for e in others) or ", ".join(types)
    known = ", ".join(map(str, asked.values()))
    words = "several types at once" if types else "a type that the site file does not name"
    raise SlurmError(
        f"a node of the job holds GPUs of {words}: '{told}'",
        hint=f"ask for --gres=TYPE:N with one of: {known}",
    )


def step_command(
    nodes: Sequence[AllocatedNode], site: Site, job_id: str, directory: Path
) -> tuple[str, ...]:
    """The srun of the one step: a task on each of these nodes, whatever component it is of."""
    srun = [
        site.slurm.commands.get("srun", "srun"), f"--jobid={job_id}", f"--job-name={STEP_NAME}",
        "--unbuffered", "--overlap", "--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--mpi=none",
    ]  # fmt: skip
    task = [sys.executable, "-P", "-u", "-m", "flexslurm.slurm.node_step", str(directory)]
    parts: list[str] = []
    for group in dict.fromkeys(node.het_group for node in nodes):
        members = [node for node in nodes if node.het_group == group]
        parts += [
            *([":"] if parts else []),
            *([] if group is None else [f"--het-group={group}"]),
            f"--nodes={len(members)}", f"--ntasks={len(members)}", "--ntasks-per-node=1",
            f"--nodelist={','.join(node.name for node in members)}",
            f"--cpus-per-task={min(node.cpus for node in members)}", *task,
        ]  # fmt: skip
    return (*srun, *parts)


def order_command(
    node: AllocatedNode,
    spec: PilotSpec,
    kill_wait_s: float,
    directory: Path,
    step: Path,
    job_id: str,
) -> tuple[str, ...]:
    """What stands for a pilot's process where the head is."""
    log = spec.log_dir.absolute() / f"{spec.name}.{job_id}.{node.name}.log"
    return (
        sys.executable, "-P", "-m", "flexslurm.slurm.step_order", str(directory), node.name,
        str(log), f"{kill_wait_s:g}", str(step), *spec.command,
    )  # fmt: skip


class AllocationSubmitter:
    """Pilots as processes of one step of the job this process belongs to; ids as LocalSubmitter's.

    A pilot that is cancelled gets SIGTERM on its node, and SIGKILL after the kill wait.
    """

    def __init__(
        self, site: Site, service_dir: Path, *, environ: Mapping[str, str] = os.environ
    ) -> None:
        self.site = site
        self.job_id = environ.get("SLURM_JOB_ID", "")
        self._environ = environ
        self.client = SlurmClient(site.slurm, environ=environ)
        self._identity = {k: v for k, v in environ.items() if _IDENTITY.match(k)}
        self._nodes: list[AllocatedNode] = []
        self._nodes_at = float("-inf")
        self._place = service_dir.absolute()
        srun_env = {k: environ[k] for k in ("SLURM_CONF",) if k in environ}
        self._steps = LocalSubmitter(
            service_dir,
            kill_wait_s=site.slurm.kill_wait + _SAY_S,
            env={**site.env, **srun_env},
            steps=True,
        )

    def nodes(self) -> list[AllocatedNode]:
        """The nodes with GPUs that the job holds; asked of Slurm once in a while."""
        if time.monotonic() >= self._nodes_at + _FRESH_S:
            self._nodes = [
                node
                for component in components(self._environ)
                for node in allocated_nodes(component, self._details(component.job_id), self.site)
            ]
            self._nodes_at = time.monotonic()
        return self._nodes

    def _details(self, job_id: str) -> str:
        return self.client.call("scontrol", "show", "job", "-d", "-o", job_id).out

    def pool(self) -> list[Fragment]:
        """The pool that this allocation is: one pilot per node."""
        shapes = dict.fromkeys((node.gpu_type, node.gpus) for node in self.nodes())
        counts = [(s, sum((n.gpu_type, n.gpus) == s for n in self.nodes())) for s in shapes]
        return [Fragment(gpu_type=t, gpus=g, count=count) for (t, g), count in counts]

    def submit(self, spec: PilotSpec | HeadSpec) -> str:
        if isinstance(spec, HeadSpec):  # it asks about this job too
            return self._steps.submit(replace(spec, env={**spec.env, **self._identity}))
        node = self._free_node(spec)
        step, directory = self._one_step(spec.env)
        record = self._steps.record_of(step)
        kill_wait_s = self.site.slurm.kill_wait
        command = order_command(node, spec, kill_wait_s, directory, record, self.job_id)
        return self._steps.submit(replace(spec, command=command), place=node.name)

    def _one_step(self, env: Mapping[str, str]) -> tuple[str, Path]:
        """The step over all nodes, and its directory; started where there is none that runs."""
        for step, directory in self._live_steps():
            return step, directory
        directory = self._place / "jobs" / f"step-{self.job_id}-{secrets.token_hex(4)}"
        directory.mkdir(parents=True, mode=0o700)
        command = step_command(self.nodes(), self.site, self.job_id, directory)
        logs = self._place / "logs" / STEP_NAME
        return self._steps.submit(HeadSpec(STEP_NAME, command, logs, dict(env))), directory

    def _live_steps(self) -> list[tuple[str, Path]]:
        """Steps that run and are not told to end, and their directories."""
        found = [(i, Path(self._steps.command_of(i)[-1])) for i in self._steps.find(STEP_NAME)]
        return [(step, where) for step, where in found if not (where / "end").exists()]

    def _free_node(self, spec: PilotSpec) -> AllocatedNode:
        taken = self._steps.places()
        fits = [n for n in self.nodes() if n.gpu_type == spec.gpu_type and n.gpus >= spec.gpus]
        free = [node for node in fits if node.name not in taken]
        if spec.nodes != 1 or not free:
            have = ", ".join(f"{n.name} ({n.gpus} {n.gpu_type})" for n in self.nodes()) or "none"
            raise CapacityError(
                f"the allocation has no free node for {spec.name}: {spec.nodes} x {spec.gpus} "
                f"{spec.gpu_type}; its nodes with GPUs: {have}",
                hint="inside one allocation each pilot is one node: match 'pool' to the job",
            )
        return min(free, key=lambda node: node.gpus)

    def states(self, job_ids: Sequence[str]) -> dict[str, JobInfo]:
        """The pilots, by node, with what is known of the job's end; raises SlurmUnavailable."""
        infos = {i: self._on_node(info) for i, info in self._steps.states(job_ids).items()}
        whole = self.client.jobs([self.job_id], self._grace())[self.job_id]
        return {
            job_id: replace(info, preempt_in_s=whole.preempt_in_s, end_in_s=whole.end_in_s)
            if info.state.active
            else info
            for job_id, info in infos.items()
        }

    def _on_node(self, info: JobInfo) -> JobInfo:
        place = self._steps.place_of(info.id)
        return info if place is None else replace(info, nodes=(place,))

    def _grace(self) -> dict[str, float]:
        return {name: partition.grace for name, partition in self.site.partitions.items()}

    def survey(self, job_ids: Sequence[str]) -> tuple[dict[str, JobInfo], tuple[JobInfo, ...]]:
        infos = self.states(job_ids)
        return infos, self._steps.survey([])[1]

    def find(self, name: str) -> list[str]:
        return self._steps.find(name)

    def cancel(self, job_ids: Sequence[str]) -> None:
        others = set(self._steps.places().values()) - set(job_ids)
        self._steps.cancel(job_ids)
        for _, directory in [] if others else self._live_steps():
            (directory / "end").touch()

    def resize(self, job_id: str, nodes: Sequence[str]) -> None:
        """Raises SlurmError: a step is no job."""
        raise SlurmError(f"{job_id} is not a job of Slurm that could be made smaller")

    def preview(self, spec: PilotSpec | HeadSpec) -> str:
        if isinstance(spec, HeadSpec):
            return self._steps.preview(spec)
        node, where = self._free_node(spec), self._place / "jobs" / "STEP"
        command = step_command(self.nodes(), self.site, self.job_id, where)
        lines = [
            f"# in one step over all nodes: {shlex.join(command)}",
            f"# on {node.name}:",
            shlex.join(spec.command),
        ]
        return "\n".join(lines) + "\n"

    def wait(self, job_id: str, *, every_s: float = 1.0) -> JobInfo:
        """Wait, without an end, until a job is over: the batch step must not end before."""
        return self._steps.wait(job_id, every_s=every_s)
