"""A gear for one signature, or the reason there is none."""

from __future__ import annotations

from collections.abc import Mapping

from flexslurm.gear import Gear, NoGear, Signature
from flexslurm.planner.model_spec import ModelSpec
from flexslurm.planner.planner import Planner
from flexslurm.planner.problem import StageKind
from flexslurm.planner.profiles import Profile
from flexslurm.planner.topology import Topology
from flexslurm.planner.workload import Goal


def plan_gear(
    spec: ModelSpec,
    topology: Topology,
    goal: Goal,
    signature: Signature,
    *,
    acted: Mapping[str, ModelSpec] | None = None,
    profiles: Mapping[StageKind, Profile] | None = None,
) -> Gear | NoGear:
    """The best gear for a signature; for several, make a `Planner` of the largest.

    Where nothing meets the targets, the best that misses them; where nothing holds the workload's
    sequences, what holds shorter ones; the gear's reason says so. NoGear where the model does not
    fit. Raises ConfigError for a GPU type that the topology does not define.
    """
    return Planner(spec, topology, goal, signature, acted=acted, profiles=profiles).plan(signature)
