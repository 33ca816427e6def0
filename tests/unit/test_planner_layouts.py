"""Gears written out: what `Gear.layout` prints is read back, and what does not fit is said."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexslurm.errors import CapacityError, ConfigError
from flexslurm.gear import Estimates, Gear, Replica, Signature, Stage
from flexslurm.planner.layouts import StageText, gear_of_layout, is_layout, parse_layout
from flexslurm.planner.model_spec import ModelSpec
from flexslurm.planner.problem import Problem
from flexslurm.planner.topology import Topology
from flexslurm.planner.workload import EngineLimits, Goal, Slo, Workload

SPEC = ModelSpec.from_config(
    {
        "model_type": "llama", "hidden_size": 96, "intermediate_size": 256, "vocab_size": 256,
        "num_attention_heads": 6, "num_key_value_heads": 3, "num_hidden_layers": 6,
        "max_position_embeddings": 512, "architectures": ["LlamaForCausalLM"],
    },
    "float32",
    name="tiny",
)  # fmt: skip


def problem(memory: int = 1 << 30) -> Problem:
    topology = Topology.from_catalogue(("a100", "l40s"), "float32")
    topology = topology.with_memory({"a100": memory, "l40s": memory})
    limits = EngineLimits(block_tokens=16, max_batch=8, max_batch_tokens=64)
    return Problem(SPEC, topology, Goal(Workload(32, 32), Slo(), limits))


stage = st.builds(
    lambda kind, tp, depth: (kind, tp, depth),
    st.sampled_from(["a100", "l40s", "h100-80.x"]),
    st.integers(1, 8),
    st.integers(1, 40),
)


@given(st.lists(st.tuples(st.lists(stage, min_size=1, max_size=4), st.integers(1, 3)), min_size=1,
                max_size=3))  # fmt: skip
def test_a_layout_is_read_back_as_it_was_printed(
    forms: list[tuple[list[tuple[str, int, int]], int]],
) -> None:
    replicas = []
    for stages, count in forms:
        made, at = [], 0
        for kind, tp, depth in stages:
            made.append(Stage(kind, tp, at, at + depth, 1, 0))
            at += depth
        replicas += [Replica(tuple(made), 1, 1, 1)] * count
    gear = Gear("", Signature(), 1, tuple(replicas), Estimates(0, 0, 0, 0, 0))
    wanted = [tuple(StageText(s.gpu_type, s.tp, s.lo, s.hi) for s in r.stages) for r in replicas]
    assert is_layout(gear.layout())
    assert sorted(map(repr, parse_layout(gear.layout()))) == sorted(map(repr, wanted))


def test_a_gear_of_a_layout_has_kv_seats_and_estimates() -> None:
    text = "a100 tp2 [0,2) -> a100 [2,6) + l40s tp1 [0,6)"
    gear = gear_of_layout(problem(), Signature.parse("a100:3,l40s:1"), text)
    assert gear.layout() == gear.name
    assert [s.node for r in gear.replicas for s in r.stages] == [0, 0, 1]
    assert all(s.kv_blocks >= 1 for r in gear.replicas for s in r.stages)
    assert gear.estimates.tokens_per_s > 0 and gear.estimates.tpot_s > 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a100 tp1 [0,4)", "ends at layer 4 of 6"),
        (
            "a100 tp1 [0,4) → a100 tp1 [3,6)",
            "gear a100 tp1 [0,4) → a100 tp1 [3,6): replica 0 has layers [3,6) where a run",
        ),
        ("a100 tp4 [0,6)", "cannot be cut into tp4"),
        ("2x(a100 tp2 [0,6))", "no node has 2 free a100"),
        ("l40s tp1 [0,6)", "there is no 'l40s' here"),
        ("a100 tp0 [0,6)", "cannot read 'a100 tp0 [0,6)'"),
        ("0x(a100 tp1 [0,6))", "cannot read '0x(a100"),
        ("99999999x(a100 tp1 [0,6))", "cannot read"),
        ("a100 tp1 [6,0)", "layers [6,0) of 6"),
        ("[", "cannot read '['"),
    ],
)
def test_what_is_wrong_is_said(text: str, said: str) -> None:
    with pytest.raises((ConfigError, CapacityError)) as caught:
        gear_of_layout(problem(), Signature.parse("a100:3"), text)
    assert said in str(caught.value)


def test_memory_that_is_short_is_said() -> None:
    with pytest.raises(CapacityError, match="cannot hold layers"):
        gear_of_layout(problem(100_000), Signature.parse("a100:3"), "a100 tp1 [0,6)")
