"""A gear's estimate is the planner's own figure, whoever made the gear."""

from __future__ import annotations

import pytest

from flexslurm.gear import Gear, Signature
from flexslurm.planner.estimate import at_batch, estimate
from flexslurm.planner.model_spec import ModelSpec
from flexslurm.planner.planner import Planner
from flexslurm.planner.published import config_of
from flexslurm.planner.topology import Topology
from flexslurm.planner.workload import Goal, Workload


@pytest.mark.parametrize("pool", ["l4:1", "l4:1x2", "t4:1x2", "t4:2x2,l4:1x1"])
def test_the_estimate_of_a_planned_gear_is_its_own(pool: str) -> None:
    spec = ModelSpec.from_config(config_of("llama-3.1-8b"))
    topology = Topology.from_catalogue(("l4", "t4"))
    planner = Planner(spec, topology, Goal(Workload(600, 100)), Signature.parse(pool))
    gear = planner.plan(planner.pool)
    assert isinstance(gear, Gear)
    found = estimate(planner.problem, gear)
    total = sum(one.tokens_per_s for one in found)
    assert total == pytest.approx(gear.estimates.tokens_per_s, rel=1e-9)
    mean = sum(one.tpot_s * one.tokens_per_s for one in found) / total
    assert mean == pytest.approx(gear.estimates.tpot_s, rel=1e-9)
    alone = at_batch(planner.problem, gear.replicas[0], 1)
    assert alone.tpot_s <= found[0].tpot_s
