"""The time of a step: the formula by hand, in bulk, over the wire, and acted for a larger model."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import numpy as np
import pytest

from flexslurm.gear import Signature
from flexslurm.messages import Pacing
from flexslurm.planner.cost import LayerSums, StageCost, stage_cost, step_times
from flexslurm.planner.model_spec import ModelSpec
from flexslurm.planner.planner import Planner
from flexslurm.planner.problem import Problem, StageKind
from flexslurm.planner.published import config_of
from flexslurm.planner.topology import GpuFigures, Link, Topology
from flexslurm.planner.workload import EngineLimits, Goal, StepLoad, Workload

GPU = GpuFigures("g", 80 * 2**30, 1e12, 1e14, Link(1e11, 1e-6), layer_s=1e-5)
NODE_LINK = Link(1e10, 5e-6)


def spec_of(**changes: Any) -> ModelSpec:
    config = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 100, "max_position_embeddings": 1000,
    }  # fmt: skip
    return ModelSpec.from_config(config | changes)


def test_a_step_by_hand() -> None:
    spec = spec_of()
    cost = stage_cost(LayerSums(spec, 1), GPU, NODE_LINK, 1, 3)
    layer = 64 * 64 * 2 + 32 * 64 * 2 + 3 * 64 * 128
    weights = 2 * spec.layer_bytes(1)
    # 5 sequences: 4 decode at context 10, one brings 6 tokens; K and V of 2 heads of 16 in 2 layers
    new, context, pairs = 10, 46, 4 * 10 + 21
    memory = (weights + context * 2 * 2 * 2 * 16 * 2) / 1e12
    compute = (2 * new * 2 * layer + pairs * 2 * 4 * 64) / 1e14
    link = new * 64 * 2 / 1e10 + 5e-6
    expected = max(memory, compute) + 2 * 1e-5 + link
    assert cost.step_s(new, context, 0, pairs) == pytest.approx(expected, rel=1e-12)


def test_tensor_parallel_adds_two_all_reduces_a_layer() -> None:
    spec = spec_of()
    one = stage_cost(LayerSums(spec, 1), GPU, NODE_LINK, 0, 4)
    two = stage_cost(LayerSums(spec, 2), GPU, NODE_LINK, 0, 4)
    assert two.fixed_s - one.fixed_s == pytest.approx(4 * 2 * 2 * 1e-6)
    assert two.link_token_s - one.link_token_s == pytest.approx(4 * 2 * (2 / 2) * 128 / 1e11)
    assert one.weights_s / 2 < two.weights_s < one.weights_s
    assert two.context_s == pytest.approx(one.context_s / 2)


def test_only_the_last_stage_pays_for_the_head_and_sends_nothing() -> None:
    sums = LayerSums(spec_of(), 1)
    middle, last = (stage_cost(sums, GPU, NODE_LINK, *span) for span in ((1, 3), (2, 4)))
    assert middle.sampled_s == 0 < last.sampled_s
    assert last.weights_s > middle.weights_s
    assert last.fixed_s == pytest.approx(middle.fixed_s - NODE_LINK.latency_s)


def test_experts_are_read_as_tokens_choose_them() -> None:
    spec = ModelSpec.from_config(config_of("mixtral-8x7b"))
    cost = stage_cost(LayerSums(spec, 1), GPU, NODE_LINK, 1, 5)
    one, many = (cost.step_s(n, 0, 0, 0) for n in (1, 1000))
    weights = 4 * 2 * 3 * 4096 * 14336 / 1e12  # of one expert in four layers, two bytes each
    assert cost.experts_s == pytest.approx(8 * weights)
    assert one == pytest.approx(cost.weights_s + 2 * weights + cost.fixed_s, rel=1e-3)
    assert many >= cost.weights_s + 7.99 * weights


def test_bulk_is_the_same_formula() -> None:
    spec = ModelSpec.from_config(config_of("qwen3-30b-a3b"))
    sums = LayerSums(spec, 2)
    costs = [stage_cost(sums, GPU, NODE_LINK, lo, hi) for lo, hi in ((0, 3), (3, 48), (0, 48))]
    table = np.array([[getattr(c, f) for c in costs] for f in StageCost.__struct_fields__])
    for load in ((1.0, 5.0, 1.0, 5.0), (600.0, 9000.0, 8.0, 4e5)):
        assert step_times(table, *load) == pytest.approx(
            [c.step_s(*load) for c in costs], rel=1e-14
        )


def test_a_step_never_takes_less_for_more() -> None:
    cost = stage_cost(LayerSums(spec_of(), 2), GPU, NODE_LINK, 0, 4)
    steps = [cost.step_s(new, new * 7, new, new * 9) for new in range(1, 400)]
    assert all(a <= b for a, b in itertools.pairwise(steps))


def test_the_cost_travels_as_pacing() -> None:
    cost = stage_cost(LayerSums(spec_of(), 1), GPU, NODE_LINK, 0, 2)
    sent = msgspec.msgpack.encode(Pacing(acted=msgspec.to_builtins(cost)))
    received = msgspec.msgpack.decode(sent, type=Pacing).acted
    assert msgspec.convert(received, StageCost) == cost


def test_stages_of_a_small_model_act_out_all_of_a_large_one() -> None:
    """Six layers stand for eighty: however they are split, no time is lost or counted twice."""
    large = ModelSpec.from_config(config_of("llama-3.1-70b"))
    small = spec_of(num_hidden_layers=6)
    figures = msgspec.structs.replace(GPU, acts_model="llama-3.1-70b", virtual=True)
    topology = Topology({"g": figures}, NODE_LINK)
    problem = Problem(small, topology, Goal(), {"llama-3.1-70b": large})
    whole = Problem(large, Topology({"g": GPU}, NODE_LINK), Goal())
    kind = StageKind("g", 1)
    expected = whole.cost(kind, 0, 80)
    for cuts in ((0, 6), (0, 1, 6), (0, 2, 3, 5, 6)):
        stages = [problem.cost(kind, lo, hi) for lo, hi in itertools.pairwise(cuts)]
        for field in ("weights_s", "context_s", "token_s", "pair_s", "sampled_s"):
            total = sum(getattr(stage, field) for stage in stages)
            assert total == pytest.approx(getattr(expected, field), rel=1e-9)


def test_acted_gears_are_planned_by_the_large_models_time_and_the_small_ones_memory() -> None:
    large = ModelSpec.from_config(config_of("llama-3.1-8b"))
    small = spec_of(num_hidden_layers=8)
    figures = msgspec.structs.replace(
        GPU, memory_bytes=2 * small.weight_bytes(), acts_model="big", virtual=True
    )
    topology = Topology({"g": figures}, NODE_LINK)
    goal = Goal(Workload(100, 20), limits=EngineLimits(block_tokens=16, max_batch=4))
    planner = Planner(small, topology, goal, Signature.parse("g:1"), acted={"big": large})
    gear = planner.plan(Signature.parse("g:1"))
    assert gear.replicas[0].stages[0].hi == 8
    reading = large.weight_bytes() / figures.memory_bandwidth
    assert gear.estimates.tpot_s > reading > 0.01


def test_step_loads_of_a_request_add_up() -> None:
    """Over the steps of its life a request brings its prompt and its answer, once."""
    load = StepLoad.of(Workload(1000, 50), 256)
    steps = 49 + 4
    assert load.chunks == 4
    assert load.new_tokens * steps == pytest.approx(1000 + 49)
    assert load.sampled * steps == pytest.approx(50)
    one = StepLoad.of(Workload(1, 1), 256)
    assert (one.new_tokens, one.sampled, one.chunks) == (1, 1, 1)


@pytest.mark.parametrize("slots", [1, 3, 40])
def test_steps_with_and_without_prefill_are_a_mean_step(slots: int) -> None:
    load = StepLoad.of(Workload(1000, 50), 256)
    share = load.prefill_share(slots)
    mean = [
        (1 - share) * one + share * other
        for one, other in zip(load.without_prefill(slots), load.with_prefill(slots), strict=True)
    ]
    wanted = (load.new_tokens, load.context_tokens, load.sampled, load.pairs, 1.0)
    assert mean == pytest.approx([slots * one for one in wanted])


def test_all_stages_wait_for_one_that_has_prefill() -> None:
    """The deeper the pipeline, the more often some micro-batch in it brings a prompt."""
    slow = msgspec.structs.replace(GPU, flops=1e12)
    problem = Problem(spec_of(), Topology({"g": slow}, NODE_LINK), Goal(Workload(400, 40)))
    kind = StageKind("g", 1)
    alone, two, four = (float(problem.times(kind, 4, depth)[1, 3]) for depth in (1, 2, 4))
    longest = float(problem.full_times(kind, 4)[1, 3])
    assert alone < two < four < longest
