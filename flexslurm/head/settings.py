"""What the head makes of the service and site files; reads no file itself."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping

from flexslurm.config.service import Service
from flexslurm.config.site import Site
from flexslurm.control.choices import PolicySettings
from flexslurm.control.events import ControlSettings
from flexslurm.control.phases import InstallSettings
from flexslurm.control.trends import Targets
from flexslurm.control.watch import WatchSettings
from flexslurm.head.planning import plan_name
from flexslurm.slurm.allocation import AllocationSubmitter
from flexslurm.slurm.local import LocalSubmitter
from flexslurm.slurm.pilot import SlurmSubmitter, Submitter
from flexslurm.wire.service_dir import Pilot, ServiceDir


def control_settings(
    service: Service,
    site: Site,
    head: str,
    probe: tuple[int, ...] = (),
    kind_of: Callable[[str], str] = lambda fragment: "",
    memory_bytes: Mapping[str, int] | None = None,
) -> ControlSettings:
    """The controller's settings from the service file.

    `probe`: what new replicas compute first; `kind_of`: the `risk_kind` of a pilot, by its name;
    `memory_bytes`: of a card, by type, as gears are planned with.
    """
    serving = service.serving
    return ControlSettings(
        head=head,
        install=InstallSettings(
            model=service.model.path,
            dtype=service.model.dtype,
            memory_fraction=serving.memory_fraction,
            prepare_timeout_s=120.0,
            close_timeout_s=3.0,
            install_timeout_s=serving.install_timeout,
            probe=probe,
        ),
        policy=policy_settings(service),
        gpu_types=frozenset(site.gpu_types),
        beat_s=serving.heartbeat,
        lost_s=serving.lost_after,
        watch=WatchSettings(
            interval_s=service.profiling.interval_sec,
            window_s=60 * service.profiling.window_minutes,
            kind_of=kind_of,
            targets=targets(service),
        ),
        memory_bytes=memory_bytes or {},
    )


def risk_kind(fragment: str, pilots: Iterable[Pilot]) -> str:
    """What a pilot shares its risks with, by its name: its GPU type in its partition.

    "" where there is no such pilot.
    """
    pilot = next((pilot for pilot in pilots if pilot.fragment == fragment), None)
    if pilot is None:
        return ""
    return pilot.gpu_type + (f"@{pilot.partition}" if pilot.partition else "")


def policy_settings(service: Service) -> PolicySettings:
    """When gears are left and which may be taken, from the service file."""
    decisions, plans = service.decisions, service.scheduling
    return PolicySettings(
        min_action_gap_s=decisions.min_action_gap_sec,
        migration_benefit_ratio=decisions.migration_benefit_ratio,
        eviction_risk_weight=decisions.eviction_risk_weight,
        plans=None if plans.plans is None else tuple(map(plan_name, plans.plans)),
        default_plan=plan_name(plans.default_plan) if plans.default_plan else None,
        fallback_plan=plan_name(plans.fallback_plan) if plans.fallback_plan else None,
        window_s=60 * service.profiling.window_minutes,
        targets=targets(service),
    )


def targets(service: Service) -> Targets:
    """The latencies aimed at."""
    return Targets(service.slo.ttft, service.slo.tpot)


def submitter_for(
    cluster: str, site: Site, directory: ServiceDir, allocation: str | None = None
) -> Submitter:
    """Where the pilots come from; `allocation` is the job of cluster `allocation`."""
    if cluster == "slurm":
        return SlurmSubmitter(site, directory.path)
    if cluster == "local":
        return LocalSubmitter(directory.path, kill_wait_s=site.slurm.kill_wait, env=site.env)
    assert cluster == "allocation" and allocation is not None, f"{cluster}, job {allocation}"
    environ = {**os.environ, "SLURM_JOB_ID": allocation}
    return AllocationSubmitter(site, directory.path, environ=environ)
