"""The best gear for one signature, by a planner made for it alone."""

from __future__ import annotations

from typing import Any

from flexslurm.gear import Gear, NoGear, Signature
from flexslurm.planner.model_spec import ModelSpec
from flexslurm.planner.planner import Planner
from flexslurm.planner.topology import Topology
from flexslurm.planner.workload import Goal


def plan_gear(
    spec: ModelSpec, topology: Topology, goal: Goal, signature: Signature, **more: Any
) -> Gear | NoGear:
    return Planner(spec, topology, goal, signature, **more).plan(signature)
