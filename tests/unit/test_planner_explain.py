"""Explanations and capacity: what binds, what came second, what is cheapest and where it ends."""

from __future__ import annotations

import pytest

from flexslurm.errors import CapacityError
from flexslurm.gear import Signature
from flexslurm.planner.capacity import capacity
from flexslurm.planner.explain import explain
from flexslurm.planner.model_spec import ModelSpec
from flexslurm.planner.planner import Planner
from flexslurm.planner.published import config_of
from flexslurm.planner.tabulate import pilots_of, plans
from flexslurm.planner.topology import Topology
from flexslurm.planner.workload import EngineLimits, Goal, Slo, Workload

SPEC = ModelSpec.from_config(config_of("llama-3.1-8b"), name="llama-3.1-8b")
FIGURES = Topology.from_catalogue(("l4", "a100-40"))


def planner(pool: str, goal: Goal) -> Planner:
    return Planner(SPEC, FIGURES, goal, Signature.parse(pool))


@pytest.mark.parametrize(
    ("goal", "words"),
    [
        (Goal(Workload(500, 100)), "the batch is limited by max_batch 64"),
        (Goal(Workload(8000, 2000)), "does not fit"),
        (Goal(Workload(500, 100), Slo(tpot_s=0.02)), "would miss the TPOT target"),
        (Goal(Workload(400, 400), Slo(ttft_s=0.06)), "would miss the TTFT target"),
        (
            Goal(Workload(500, 50), limits=EngineLimits(max_batch_tokens=64)),
            "limited by max_batch_tokens 64",
        ),
    ],
)
def test_what_binds_is_named(goal: Goal, words: str) -> None:
    found = explain(planner("a100-40:1", goal), Signature.parse("a100-40:1"))
    assert found is not None
    assert len(found.pipelines) == 1 and words in found.pipelines[0], found.pipelines
    assert "stage 0 sets the pace" in found.pipelines[0]
    assert found.gap == "no plan is better"


def test_the_runner_up_is_worse_and_different() -> None:
    pool = "a100-40:2,l4:2"
    live = planner(pool, Goal(Workload(500, 100)))
    found = explain(live, live.pool)
    assert found is not None
    assert "less:" in found.runner_up
    gear = live.plan(live.pool)
    assert gear.layout() not in found.runner_up


def test_where_pipelines_are_generated_it_is_explained_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool, goal = "a100-40:2x3,l4:2x3", Goal(Workload(500, 100), Slo(tpot_s=0.05))
    listed = explain(planner(pool, goal), Signature.parse(pool))
    monkeypatch.setattr("flexslurm.planner.solver.MOST_CELLS", 40)
    monkeypatch.setattr("flexslurm.planner.lattice.MOST_CELLS", 0)
    live = planner(pool, goal)
    found = explain(live, live.pool)
    choice = live.choose(live.pool)
    assert choice is not None and not live.solver(choice.tier).complete
    assert found is not None and listed is not None
    assert found.summary == listed.summary and len(found.pipelines) == len(choice.plan)
    assert all("sets the pace" in line for line in found.pipelines)
    assert all("batch" in line.rpartition(";")[2] for line in found.pipelines), "what binds"
    assert "runner-up, " in found.runner_up and " less: " in found.runner_up
    assert live.plan(live.pool).layout() not in found.runner_up
    assert found == explain(planner(pool, goal), live.pool), "the same again"
    assert "no plan is better" in found.gap


def test_what_does_not_fit_is_not_explained() -> None:
    live = Planner(
        ModelSpec.from_config(config_of("llama-3.1-405b")), FIGURES, Goal(), Signature.parse("l4:1")
    )
    assert explain(live, live.pool) is None


def test_the_cheapest_allocation_that_keeps_up() -> None:
    live = planner("a100-40:1x4,l4:1x4", Goal(Workload(500, 100)))
    every = list(plans(live, pilots_of(live.pool)))
    one = {str(s): c for s, c in every}
    large, small = (one[name].key / (1 << 24) / 1000 for name in ("a100-40:1", "l4:1"))
    found = capacity(every, 1.5 * large)
    assert str(found.cheapest.signature) in ("a100-40:1x2",)
    priced = capacity(every, 1.5 * small, {"a100-40": 100.0, "l4": 1.0})
    assert str(priced.cheapest.signature) == "l4:1x2"
    assert priced.cheapest.cost == 2.0
    rates = [point.tokens_per_s for point in found.curve]
    assert rates == sorted(rates) and len(set(rates)) == len(rates)
    # Four large cards first; the small ones bring less than half of what those did.
    assert found.stops_paying.gpus == 4
    with pytest.raises(CapacityError, match="the pool gives at most"):
        capacity(every, 100 * large)
    with pytest.raises(CapacityError, match="no allocation of the pool meets the targets"):
        slow = planner("l4:1", Goal(Workload(500, 100), Slo(tpot_s=1e-6)))
        capacity(plans(slow, pilots_of(slow.pool)), 1.0)
