"""Launching a service: check everything, show what will be done, wait for the endpoint.

Nothing is submitted here (`submitting`).
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from flexslurm.cli.head_end import ended_early
from flexslurm.cli.job_names import head_job
from flexslurm.cli.launch_facts import LaunchFacts, gather_facts
from flexslurm.cli.launch_progress import Progress
from flexslurm.cli.service_places import service_directory
from flexslurm.config.service import Fragment, Service
from flexslurm.config.site import Site
from flexslurm.errors import (
    CapacityError,
    DeadlineExceeded,
    FlexslurmError,
    ServiceError,
    ServiceUnreachable,
)
from flexslurm.gear import Gear, NoGear, Signature
from flexslurm.messages import ServiceState, StatusAnswer
from flexslurm.slurm.command import backoff_s
from flexslurm.wire.service_dir import Pilot, ServiceDir

if TYPE_CHECKING:
    from flexslurm.planner.table import GearTable
    from flexslurm.slurm.pilot import Submitter
    from flexslurm.slurm.script import HeadSpec, PilotSpec

Say = Callable[[str], None]

_POLL_S = 0.25


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """All that a launch will do, decided before anything is done."""

    service: Service
    site: Site
    directory: ServiceDir
    cluster: str
    head_here: bool
    gear: Gear
    without: tuple[tuple[str, Gear | NoGear], ...]
    """For each pilot: the gear that is left when Slurm takes it."""
    pilots: tuple[tuple[Pilot, PilotSpec], ...]
    head: HeadSpec
    facts: LaunchFacts = field(default_factory=LaunchFacts)
    """What the head plans and places with, besides the two files."""
    table: bytes | None = None
    """The gear table to write; None: the one that is there holds."""
    allocation: str | None = None
    """Cluster `allocation`: the Slurm job this runs in, whose nodes are the pool."""


def plan_launch(
    service: Service,
    site: Site,
    directory: ServiceDir,
    cluster: str,
    head_here: bool,
    say: Say = lambda line: None,
) -> LaunchPlan:
    """Check the model and plan the pool; what is slow about it is said.

    Raises ModelError, CapacityError, ConfigError; with cluster `allocation` EnvironmentFault
    outside of a job.
    """
    from flexslurm.cli.launch_table import service_table
    from flexslurm.head.gear_tables import full_pool
    from flexslurm.head.main import head_command
    from flexslurm.head.pilot_specs import job_env
    from flexslurm.head.planning import ServicePlanner, check_plans
    from flexslurm.slurm.script import HeadSpec

    _check_what_the_head_reads(service)
    allocation = None
    if cluster == "local":
        site = _on_this_machine(site)
    elif cluster == "allocation":
        allocation = os.environ.get("SLURM_JOB_ID")
        service = service.model_copy(update={"pool": _pool_of_allocation(site, directory)})
    planner = ServicePlanner(service, site)
    facts = gather_facts(site, planner.spec, cluster, say)
    pool = full_pool(service)
    table, data = service_table(planner, directory, say)
    gear = table.gear(pool)
    assert gear is not None, f"the table has no {pool}"
    if isinstance(gear, NoGear):
        raise CapacityError(
            f"{service.model.path} does not fit the pool {pool}: {gear.reason}",
            hint="add pilots to 'pool' in the service file, or choose a smaller model or dtype",
        )
    check_plans(service, table)
    pilots = _pilots(service, site, directory, cluster)
    without = _without_each(table, pool, [pilot for pilot, _ in pilots])
    head = HeadSpec(
        name=head_job(service.name),
        command=head_command(directory.path),
        log_dir=directory.logs / "head",
        env=job_env(),
    )
    site = facts.used_by(site, directory)
    return LaunchPlan(
        service, site, directory, cluster, head_here, gear, without, pilots, head, facts, data,
        allocation,
    )  # fmt: skip


def _check_what_the_head_reads(service: Service) -> None:
    """The model and the keys: the head would end for what is wrong with them."""
    from flexslurm.engine.checkpoint import check_files
    from flexslurm.engine.families import check_model
    from flexslurm.gateway.guard import load_api_keys
    from flexslurm.gateway.text import TextModel

    check_files(check_model(service.model.path))
    template = service.model.chat_template
    TextModel.load(Path(service.model.path), Path(template) if template else None)
    if service.gateway.api_keys_file is not None:
        load_api_keys(Path(service.gateway.api_keys_file))


def _without_each(
    table: GearTable, pool: Signature, pilots: Sequence[Pilot]
) -> tuple[tuple[str, Gear | NoGear], ...]:
    """For each pilot the gear that is left without it, where the table has that."""
    kinds: dict[tuple[str, int, int], Gear | NoGear | None] = {}
    for pilot in pilots:
        kind = (pilot.gpu_type, pilot.gpus, pilot.nodes)
        if kind not in kinds:  # all pilots of a kind leave the same
            kinds[kind] = table.gear(_less(pool, pilot))
    lefts = ((p.fragment, kinds[p.gpu_type, p.gpus, p.nodes]) for p in pilots)
    return tuple((fragment, left) for fragment, left in lefts if left is not None)


def _pool_of_allocation(site: Site, directory: ServiceDir) -> list[Fragment]:
    """One pilot for each node of the job this runs in. Raises EnvironmentFault outside of one."""
    from flexslurm.slurm.allocation import AllocationSubmitter

    return AllocationSubmitter(site, directory.path).pool()


def _on_this_machine(site: Site) -> Site:
    """Local processes reach each other over loopback, whatever network the site has."""
    network = site.network.model_copy(update={"interface": "lo", "suffix": None, "subnet": None})
    return site.model_copy(update={"network": network})


def _less(pool: Signature, pilot: Pilot) -> Signature:
    nodes = list(pool.nodes())
    for shape in list(nodes):
        if (shape.gpu_type, shape.gpus) == (pilot.gpu_type, pilot.gpus):
            del nodes[nodes.index(shape)]
            if len(pool.nodes()) - len(nodes) == pilot.nodes:
                break
    return Signature.of(nodes)


def _pilots(
    service: Service, site: Site, directory: ServiceDir, cluster: str
) -> tuple[tuple[Pilot, PilotSpec], ...]:
    from flexslurm.head.pilot_specs import first_pilots, pilot_spec

    made = first_pilots(service)
    return tuple((p, pilot_spec(p, service, site, directory, cluster)) for p in made)


def make_submitter(plan: LaunchPlan) -> Submitter:
    from flexslurm.head.settings import submitter_for

    return submitter_for(plan.cluster, plan.site, plan.directory, plan.allocation)


def head_submitter(plan: LaunchPlan) -> Submitter:
    """Where the head goes: with the pilots, or a process of this machine."""
    from flexslurm.slurm.local import LocalSubmitter

    if _head_is_local(plan):
        return LocalSubmitter(plan.directory.path, env=plan.site.env)
    return make_submitter(plan)


def _head_is_local(plan: LaunchPlan) -> bool:
    return plan.head_here or plan.cluster == "local"


def preview(plan: LaunchPlan) -> str:
    """Everything a launch would write and submit; does none of it."""
    from flexslurm.head.pilot_specs import launched

    parts = [f"# service directory: {plan.directory.path}"]
    pilots = [pilot for pilot, _ in plan.pilots]
    later = len(pilots) - len(launched(pilots, plan.service, plan.cluster))
    left = left_to_the_head(plan, later, len(pilots))
    parts += [f"# {left}"] if left else []
    submitter = make_submitter(plan)
    parts += [submitter.preview(spec) for _, spec in plan.pilots]
    parts.append(head_submitter(plan).preview(plan.head))
    return "\n".join(parts)


def left_to_the_head(plan: LaunchPlan, later: int, pilots: int) -> str:
    """In words, what the launch itself does not submit; "" where it submits all."""
    every_s = 2 * plan.site.slurm.poll_interval
    words = f"{later} of {pilots} pilots are left to the head: one every {every_s:g} s"
    return words if later else ""


def wait_until_serving(
    plan: LaunchPlan, say: Say, timeout_s: float, sleep: Callable[[float], None] = time.sleep
) -> StatusAnswer:
    """Follow the launch until the endpoint answers; each change is said once.

    Raises DeadlineExceeded (the service goes on), ServiceError when it cannot come up.
    """
    from flexslurm.cli.ask import ask_status

    progress = Progress(say)
    deadline = time.monotonic() + timeout_s
    # a head may wait for its turn for hours: Slurm is asked less and less often
    waits = backoff_s(_POLL_S, max(_POLL_S, plan.site.slurm.poll_interval))
    look_at = time.monotonic()
    while time.monotonic() < deadline:
        try:
            answer = ask_status(plan.directory, timeout_s=2.0)
        except ServiceUnreachable:
            if time.monotonic() >= look_at:
                _watch_jobs(plan, progress)
                look_at = time.monotonic() + (0.0 if _head_is_local(plan) else next(waits))
        else:
            progress.status(answer)
            if answer.state == ServiceState.SERVING:
                return answer
            if answer.state == ServiceState.FAILED:
                raise ServiceError(
                    f"the service cannot come up: {answer.reason}",
                    hint=f"the whole story: flexslurm logs {called(plan)} head",
                )
        sleep(_POLL_S)
    raise DeadlineExceeded(
        f"the service does not serve after {timeout_s:g} s; it goes on trying",
        hint=f"follow it with: flexslurm status {called(plan)}",
    )


def _watch_jobs(plan: LaunchPlan, progress: Progress) -> None:
    """Before the head answers: what its job does. Raises ServiceError when it has ended."""
    pilots = plan.directory.pilots()
    if pilots is None or not pilots.head_job:
        return
    try:
        info = head_submitter(plan).states([pilots.head_job])[pilots.head_job]
    except FlexslurmError as error:
        if not error.transient:
            raise
        return
    progress.tell("head", str(info.state).lower(), info.reason or "")
    if info.state.over:
        log = log_tail(plan.directory.logs / "head", lines=50).splitlines()
        raise ended_early(log, info.exit_code, called(plan))


def log_tail(folder: Path, lines: int) -> str:
    """The last lines of the newest log in a folder; empty where there is none."""
    from flexslurm.cli.log_files import tail_files

    files = sorted((f for f in folder.glob("*") if f.is_file()), key=lambda f: f.stat().st_mtime)
    return "\n".join(tail_files(files[-1:], lines))


def called(plan: LaunchPlan) -> str:
    """How other commands are told which service is meant: its name where that leads there."""
    name, path = plan.service.name, plan.directory.path
    if service_directory(name).path == path:
        return name
    return f"--service-dir {shlex.quote(str(path))}"
