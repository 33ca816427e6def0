"""From the service file to pilots, and from a pilot to the job that is submitted; submits nothing.

The launcher submits the first pilots, the head those that take their places: both by this.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import msgspec

from flexslurm.config.service import Service
from flexslurm.config.site import Site
from flexslurm.control.keeper_load import LoadSettings
from flexslurm.control.keeper_values import KeeperSettings, PilotShape, PoolEntry
from flexslurm.head.agent_process import agent_command
from flexslurm.slurm.job_names import UNSENT, pilot_job
from flexslurm.slurm.script import PilotSpec
from flexslurm.wire.service_dir import Pilot, Pilots, ServiceDir

_KEPT = ("PYTHONPATH", "FLEXSLURM_LOG", "FLEXSLURM_WORKER_THREADS", "HF_HUB_OFFLINE")

AT_ONCE = 16
"""Pilots that are submitted to Slurm at a time: many more would be a burden on it."""


def job_env(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What our processes on the nodes take from the launcher's environment."""
    return {name: environ[name] for name in _KEPT if name in environ}


def entries_of(service: Service) -> tuple[PoolEntry, ...]:
    """The pool as the keeper sees it."""
    return tuple(
        PoolEntry(
            gpu_type=entry.gpu_type,
            partition=entry.partition,
            shapes=tuple(PilotShape(shape.gpus, shape.nodes) for shape in entry.all_shapes),
            least=_or(entry.min_count, entry.count),
            wanted=_or(entry.min_count, entry.count) if service.keeping.backfill else entry.count,
            most=_or(entry.max_count, entry.count),
            walltime_s=entry.walltime,
            handover_s=entry.handover,
        )
        for entry in service.pool
    )


def _or(bound: int | None, count: int) -> int:
    return count if bound is None else bound


def keeper_settings(service: Service, site: Site) -> KeeperSettings:
    keeping = service.keeping
    return KeeperSettings(
        retry_s=keeping.retry,
        retry_most_s=keeping.retry_most,
        quick_death_s=keeping.quick_death,
        failures=keeping.failures,
        give_up_s=keeping.give_up_for,
        waiting_s=keeping.waiting,
        # an sbatch that was given up on may still come through
        unsure_s=2 * site.slurm.command_timeout,
    )


def load_settings(service: Service) -> LoadSettings:
    keeping = service.keeping
    return LoadSettings(
        high=keeping.high_load,
        high_for_s=keeping.high_for,
        low=keeping.low_load,
        low_for_s=keeping.low_for,
    )


def first_pilots(service: Service) -> list[Pilot]:
    """What a launch submits: of each entry as many as are wanted, of the shape liked best."""
    numbers: dict[str, int] = {}
    made = []
    for index, entry in enumerate(entries_of(service)):
        for _ in range(entry.wanted):
            numbers[entry.gpu_type] = numbers.get(entry.gpu_type, 0) + 1
            made.append(
                Pilot(
                    fragment=f"{entry.gpu_type}-{numbers[entry.gpu_type]}",
                    job_id=UNSENT,
                    partition=entry.partition,
                    gpu_type=entry.gpu_type,
                    gpus=entry.shapes[0].gpus,
                    nodes=entry.shapes[0].nodes,
                    entry=index,
                )
            )
    return made


def launched(missing: Sequence[Pilot], service: Service, cluster: str) -> list[Pilot]:
    """Those that a launch submits: where a head keeps the pool on Slurm, it submits the others."""
    kept = cluster == "slurm" and service.keeping.enabled
    return the_first(missing) if kept else list(missing)


def the_first(pilots: Sequence[Pilot], most: int = AT_ONCE) -> list[Pilot]:
    """At most so many of them, of all entries alike, in the order they came in."""
    turns: dict[int, int] = {}
    ranked = []
    for place, pilot in enumerate(pilots):
        turns[pilot.entry] = turns.get(pilot.entry, 0) + 1
        ranked.append((turns[pilot.entry], place))
    return [pilots[place] for place in sorted(place for _, place in sorted(ranked)[:most])]


def same_sizes(one: Service, other: Service) -> bool:
    """Whether the pools have the same entries, with the same numbers of pilots."""
    sizes = [
        [(e.gpu_type, e.partition, e.least, e.wanted, e.most) for e in entries_of(service)]
        for service in (one, other)
    ]
    return sizes[0] == sizes[1]


def entry_of(pilot: Pilot, service: Service) -> int | None:
    """The entry of a pool that a pilot would do for; None: it is none of this pool's."""
    for index, entry in enumerate(entries_of(service)):
        same = (pilot.gpu_type, pilot.partition) == (entry.gpu_type, entry.partition)
        # a pilot may have given nodes back
        if same and any(s.gpus == pilot.gpus and s.nodes >= pilot.nodes for s in entry.shapes):
            return index
    return None


def taken_over(
    alive: Sequence[Pilot], service: Service, before: Pilots | None = None
) -> tuple[list[Pilot], list[Pilot], list[Pilot]]:
    """Of an earlier launch's pilots: those that stay, those of another pool; and what is missing.

    Pilots beyond the entry's maximum count as those of another pool. `before`: what the earlier
    head had come to, where its sizes and what was drained then are to hold on.
    """
    entries = entries_of(service)
    before = before or Pilots("")
    wanted = before.wanted or tuple(entry.wanted for entry in entries)
    counts = [0] * len(entries)
    kept: list[Pilot] = []
    others: list[Pilot] = []
    for pilot in alive:
        index = entry_of(pilot, service)
        if index is None or counts[index] >= entries[index].most:
            others.append(pilot)
            continue
        counts[index] += 1
        kept.append(msgspec.structs.replace(pilot, entry=index))
    names = {pilot.fragment for pilot in kept} | before.drained.keys()
    missing = []
    for pilot in first_pilots(service):
        if counts[pilot.entry] >= wanted[pilot.entry]:
            continue
        counts[pilot.entry] += 1
        fresh = _named(pilot, names)
        names.add(fresh.fragment)
        missing.append(fresh)
    return kept, others, missing


def _named(pilot: Pilot, names: set[str]) -> Pilot:
    """Under its own name, or the next one that is free."""
    number, name = 1, pilot.fragment
    while name in names:
        name, number = f"{pilot.gpu_type}-{number}", number + 1
    return msgspec.structs.replace(pilot, fragment=name)


def pilot_spec(
    pilot: Pilot, service: Service, site: Site, directory: ServiceDir, cluster: str
) -> PilotSpec:
    """The job of a pilot."""
    entry = service.pool[pilot.entry]
    partition = site.partitions.get(pilot.partition or "")
    grace_s = partition.grace if partition is not None and cluster != "local" else 0.0
    return PilotSpec(
        name=pilot_job(service.name, pilot.fragment),
        partition=pilot.partition,
        gpu_type=pilot.gpu_type,
        gpus=pilot.gpus,
        nodes=pilot.nodes,
        walltime_s=entry.walltime if pilot.walltime_s is None else pilot.walltime_s,
        least_s=pilot.least_s,
        command=agent_command(
            directory.path, pilot.fragment, pilot.gpu_type, pilot.gpus, grace_s,
            site.kill_wait_s(pilot.partition or ""),
        ),
        log_dir=directory.logs / pilot.fragment,
        env=job_env(),
    )  # fmt: skip
