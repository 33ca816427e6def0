"""A hash of everything a plan depends on, so that a stale gear table is seen."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import msgspec

from flexslurm.gear import Signature
from flexslurm.planner.model_spec import ModelSpec
from flexslurm.planner.problem import StepTimes
from flexslurm.planner.topology import Topology
from flexslurm.planner.workload import Goal

PLANNER_VERSION = 2
"""Grows with every change of the cost model or the search that may change gears."""


def inputs_hash(
    spec: ModelSpec,
    topology: Topology,
    goal: Goal,
    pool: Signature,
    acted: Mapping[str, ModelSpec] | None = None,
    profiles: Iterable[StepTimes] = (),
) -> str:
    """32 hexadecimal digits; of figures and profiles only those of the pool's types count."""
    used = {shape.gpu_type: topology.gpu(shape.gpu_type) for shape, _ in pool.counts}
    parts = (
        PLANNER_VERSION,
        spec,
        msgspec.structs.replace(topology, gpus=used),
        goal,
        pool,
        dict(acted or {}),
        [profile for profile in profiles if profile.gpu_type in used],
    )
    text = msgspec.json.encode(parts, order="deterministic")
    return hashlib.sha256(text).hexdigest()[:32]
