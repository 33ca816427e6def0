"""What the planner prefers: the simplest of equals, the objectives, and what it gives up first."""

from __future__ import annotations

from typing import Any

import pytest
from planned_gear import plan_gear

from flexslurm.errors import ConfigError
from flexslurm.gear import Gear, NoGear, Signature, check_gear
from flexslurm.planner.model_spec import ModelSpec
from flexslurm.planner.planner import Planner
from flexslurm.planner.published import config_of
from flexslurm.planner.topology import GpuFigures, Link, Topology
from flexslurm.planner.workload import EngineLimits, Goal, Objective, Slo, Workload


def model(**changes: Any) -> ModelSpec:
    config = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 4,
        "vocab_size": 64, "max_position_embeddings": 4096,
    }  # fmt: skip
    return ModelSpec.from_config(config | changes, name="small")


def topology(**memory: float) -> Topology:
    """GPUs that are alike but for their memory, in multiples of the model's weights."""
    weights = model().weight_bytes()
    return Topology(
        {
            name: GpuFigures(name, int(weights * share), 1e9, 1e12, Link(1e12, 0.0), layer_s=1e-4)
            for name, share in memory.items()
        },
        Link(1e12, 0.0),
        step_s=0.0,
    )


GOAL = Goal(
    Workload(32, 16), limits=EngineLimits(block_tokens=16, max_batch=4, memory_fraction=1.0)
)


def planned(figures: Topology, pool: str, goal: Goal = GOAL, **changes: Any) -> Gear:
    gear = plan_gear(model(**changes), figures, goal, Signature.parse(pool))
    assert isinstance(gear, Gear), gear
    check_gear(gear, 8)
    return gear


def test_replicas_before_tensor_parallel_before_stages() -> None:
    """Launch times rule here, so cutting a model gains nothing: whole copies it is."""
    gear = planned(topology(a=4.0), "a:4")
    assert gear.layout() == "4x(a tp1 [0,8))"


def test_tensor_parallel_within_a_node_before_stages() -> None:
    """Two GPUs must share the model; a group has one step where two stages have two."""
    gear = planned(topology(a=0.9), "a:2")
    assert gear.layout() == "a tp2 [0,8)"
    apart = planned(topology(a=0.9), "a:1x2")
    assert apart.layout() == "a tp1 [0,4) → a tp1 [4,8)"


def test_types_are_mixed_only_where_that_gains() -> None:
    gear = planned(topology(a=0.9, b=0.9), "a:1x2,b:1x2")
    assert gear.layout() in (
        "a tp1 [0,4) → a tp1 [4,8) + b tp1 [0,4) → b tp1 [4,8)",
        "b tp1 [0,4) → b tp1 [4,8) + a tp1 [0,4) → a tp1 [4,8)",
    )
    odd = planned(topology(a=0.9, b=0.9), "a:1x3,b:1x1")
    assert len(odd.replicas) == 2
    assert odd.gpus == 4


def test_layers_follow_memory_where_memory_binds() -> None:
    gear = planned(topology(a=0.45, b=0.9), "a:1,b:1")
    stages = {stage.gpu_type: stage.layers for stage in gear.replicas[0].stages}
    assert stages["b"] > stages["a"] >= 1


def test_layers_follow_speed_where_memory_does_not() -> None:
    figures = topology(a=0.99, b=0.99)
    for name in ("a", "b"):
        figures = msgspec_replace(figures, name, memory_bandwidth=1e15, flops=1e18)
    slow = msgspec_replace(figures, "a", layer_s=3e-4)
    one = Goal(Workload(8, 8), limits=EngineLimits(16, 2, memory_fraction=1.0))
    gear = planned(slow, "a:1,b:1", one)
    stages = {stage.gpu_type: stage.layers for stage in gear.replicas[0].stages}
    assert stages == {"a": 2, "b": 6}


def msgspec_replace(figures: Topology, name: str, **changes: Any) -> Topology:
    import msgspec

    gpus = dict(figures.gpus) | {name: msgspec.structs.replace(figures.gpu(name), **changes)}
    return msgspec.structs.replace(figures, gpus=gpus)


def test_all_cards_of_one_type_are_used() -> None:
    """44 nodes of four for a model that takes three cards: no twelve are left idle."""
    spec = ModelSpec.from_config(config_of("llama-3.1-70b"))
    planner = Planner(
        spec, Topology.from_catalogue(("a100-80",)), Goal(Workload(1000, 256)),
        Signature.parse("a100-80:4x44"),
    )  # fmt: skip
    gear = planner.plan(planner.pool)
    assert isinstance(gear, Gear)
    assert gear.gpus == 176


def test_targets_go_first_and_the_reason_says_so() -> None:
    quick = planned(topology(a=4.0), "a:2", Goal(GOAL.workload, Slo(tpot_s=0.5), GOAL.limits))
    assert quick.reason == "most tokens per second"
    late = planned(topology(a=4.0), "a:2", Goal(GOAL.workload, Slo(tpot_s=1e-5), GOAL.limits))
    assert late.reason.startswith("no plan meets the targets")


def test_context_goes_next_and_the_gear_says_how_much_it_holds() -> None:
    goal = Goal(Workload(3000, 500), limits=GOAL.limits)
    gear = planned(topology(a=1.2), "a:1", goal)
    assert gear.reason.startswith("sequences of the workload's length do not fit")
    assert 0 < gear.max_context < 3500
    assert gear.max_context == gear.replicas[0].kv_blocks * 16


def test_what_does_not_fit_says_by_how_much() -> None:
    figures = topology(a=0.4)
    short = plan_gear(model(), figures, GOAL, Signature.parse("a:2"))
    assert isinstance(short, NoGear)
    spec = model()
    need = spec.weight_bytes() + 16 * spec.kv_bytes_per_token()
    have = 2 * GOAL.limits.arena_bytes(figures.gpu("a").memory_bytes)
    assert short.short_bytes == need - have > 0
    assert f"{need - have:,} bytes short" in short.reason
    nothing = plan_gear(model(), figures, GOAL, Signature())
    assert isinstance(nothing, NoGear) and "no GPUs" in nothing.reason
    whole = plan_gear(model(), topology(a=0.11), GOAL, Signature.parse("a:1x10"))
    assert isinstance(whole, NoGear) and whole.short_bytes == 0
    assert "no split into whole layers and KV heads fits" in whole.reason


def test_unknown_types_are_refused() -> None:
    with pytest.raises(ConfigError, match="no GPU type 'z'"):
        plan_gear(model(), topology(a=1.0), GOAL, Signature.parse("z:1"))


def test_targets_bind_the_batch_the_engine_may_run() -> None:
    free = planned(topology(a=9.0), "a:1", Goal(GOAL.workload, limits=EngineLimits(16, 64)))
    assert free.replicas[0].max_batch == 64
    slow = msgspec_replace(topology(a=9.0), "a", flops=1e9)
    tight = plan_gear(
        model(),
        slow,
        Goal(GOAL.workload, Slo(tpot_s=0.01), EngineLimits(16, 64)),
        Signature.parse("a:1"),
    )
    assert isinstance(tight, Gear)
    assert 1 <= tight.replicas[0].max_batch < 64
    assert tight.estimates.tpot_s <= 0.01


def test_fewest_gpus_for_a_rate() -> None:
    figures = topology(a=4.0)
    one = planned(figures, "a:1").estimates.tokens_per_s
    for wanted, gpus in ((0.5, 1), (1.5, 2), (2.9, 3), (100.0, 4)):
        goal = Goal(
            Workload(32, 16, rate=wanted * one / 16), limits=GOAL.limits, objective=Objective.GPUS
        )
        gear = planned(figures, "a:4", goal)
        assert gear.gpus == gpus
        if wanted == 100.0:
            assert "more than these GPUs give" in gear.reason
        else:
            assert gear.estimates.tokens_per_s >= wanted * one
    least = planned(
        figures, "a:4", Goal(GOAL.workload, limits=GOAL.limits, objective=Objective.GPUS)
    )
    assert least.gpus == 1


def test_lowest_time_per_token() -> None:
    figures = msgspec_replace(topology(a=4.0), "a", memory_bandwidth=1e7, layer_s=0.0)
    quick = Goal(GOAL.workload, limits=GOAL.limits, objective=Objective.LATENCY)
    gear = planned(figures, "a:4", quick)
    most = planned(figures, "a:4")
    assert gear.layout() == "a tp4 [0,8)"
    assert gear.estimates.tpot_s < most.estimates.tpot_s
    rate = 0.9 * most.estimates.tokens_per_s / 16
    busy = Goal(Workload(32, 16, rate=rate), limits=GOAL.limits, objective=Objective.LATENCY)
    kept = planned(figures, "a:4", busy)
    assert kept.estimates.tokens_per_s >= 0.9 * most.estimates.tokens_per_s * (1 - 1e-6)
    assert gear.estimates.tpot_s <= kept.estimates.tpot_s <= most.estimates.tpot_s


def test_the_same_question_has_the_same_answer() -> None:
    figures = topology(a=0.6, b=0.9)
    first, second = (planned(figures, "a:3x2,b:2x2") for _ in range(2))
    assert first == second


def test_a_rough_cpu_is_planned_for_without_figures() -> None:
    """The figures of a virtual GPU may be missing altogether: only its memory is needed."""
    from flexslurm.config.site import Site

    site = Site.model_validate(
        {"name": "t", "gpu_types": {"v": {"memory": "1MiB", "virtual": {"speed": 0.01}}}}
    )
    gear = plan_gear(
        model(), Topology.from_site(site, "bfloat16"), GOAL, Signature.parse("v:1x2,v:2")
    )
    assert isinstance(gear, Gear)
    assert gear.estimates.tokens_per_s > 0


def test_a_model_of_unlike_layers_gets_as_many_stages_as_it_needs() -> None:
    """Dense layers first, then experts that no TP shares out: three of them fill a GPU."""
    spec = ModelSpec.from_config(config_of("deepseek-v3"))
    pool = Signature.parse("h100:8x3")
    live = Planner(spec, Topology.from_catalogue(("h100",)), Goal(Workload(500, 100)), pool)
    gear = live.plan(pool)
    assert isinstance(gear, Gear), gear
    check_gear(gear, spec.num_layers)
    assert len(gear.replicas[0].stages) > 16
