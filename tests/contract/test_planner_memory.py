"""The planner's bytes of a stage are the engine's, for every family, degree and rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from planned_gear import plan_gear

from flexslurm.engine import footprint
from flexslurm.engine.families import ModelInfo, check_model
from flexslurm.gear import NoGear, Signature, Stage
from flexslurm.planner.model_spec import ModelSpec
from flexslurm.planner.topology import Topology
from flexslurm.planner.workload import EngineLimits, Goal, Workload

_ROTARY = {
    "hidden_size": 72, "intermediate_size": 100, "num_hidden_layers": 5, "num_attention_heads": 9,
    "num_key_value_heads": 3, "head_dim": 8, "vocab_size": 101, "max_position_embeddings": 512,
}  # fmt: skip
_LEARNED = {
    "hidden_size": 40, "ffn_dim": 100, "intermediate_size": 104, "num_hidden_layers": 5,
    "num_attention_heads": 5, "vocab_size": 101, "max_position_embeddings": 64,
}  # fmt: skip
CONFIGS = {
    "llama": {"model_type": "llama", **_ROTARY},
    "llama tied": {"model_type": "llama", **_ROTARY, "tie_word_embeddings": True},
    "llama biased": {"model_type": "llama", **_ROTARY, "attention_bias": True, "mlp_bias": True},
    "llama default heads": {
        "model_type": "llama", "hidden_size": 40, "intermediate_size": 64,
        "num_hidden_layers": 3, "num_attention_heads": 5, "vocab_size": 33,
    },
    "llama of odd grains": {
        "model_type": "llama", "hidden_size": 576, "intermediate_size": 1000,
        "num_hidden_layers": 3, "num_attention_heads": 9, "num_key_value_heads": 3,
        "vocab_size": 515, "tie_word_embeddings": True, "max_position_embeddings": 512,
    },
    "mistral": {"model_type": "mistral", **_ROTARY},
    "qwen2": {"model_type": "qwen2", **_ROTARY},
    "qwen3": {"model_type": "qwen3", **_ROTARY, "head_dim": 16},
    "opt": {"model_type": "opt", **_LEARNED},
    "opt projected": {"model_type": "opt", **_LEARNED, "word_embed_proj_dim": 24},
    "opt without biases": {"model_type": "opt", **_LEARNED, "enable_bias": False},
    "opt norm after": {"model_type": "opt", **_LEARNED, "do_layer_norm_before": False},
    "opt no affine": {"model_type": "opt", **_LEARNED, "layer_norm_elementwise_affine": False},
    "gpt_neox": {"model_type": "gpt_neox", **_LEARNED},
    "gpt_neox unbiased": {"model_type": "gpt_neox", **_LEARNED, "attention_bias": False},
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_stage_bytes_are_the_engines(name: str, dtype: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    info = check_model(tmp_path)
    spec = ModelSpec.from_config(CONFIGS[name], dtype)
    assert spec.num_layers == info.num_layers
    assert spec.max_context == info.max_context
    for tp in range(1, spec.max_tp() + 1):
        for tp_rank in range(tp):
            for lo in range(info.num_layers):
                for hi in range(lo + 1, info.num_layers + 1):
                    assert spec.stage_weight_bytes(lo, hi, tp, tp_rank) == footprint.stage_bytes(
                        info, lo, hi, tp, tp_rank, dtype
                    ), (lo, hi, tp, tp_rank)
    assert spec.page_bytes(16) == footprint.page_bytes(info, dtype, 16)


def takes(info: ModelInfo, stage: Stage, blocks: int) -> int:
    """Bytes of weights and KV on the rank of a stage that has the most of them."""
    cut = info, stage.lo, stage.hi, stage.tp
    return max(
        footprint.stage_bytes(*cut, rank, "float64")
        + footprint.kv_bytes(*cut, rank, "float64", 16, blocks)
        for rank in range(stage.tp)
    )


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("pool", ["big:1", "mid:2", "mid:3", "mid:1x3,big:2", "small:1x9"])
def test_gears_fit_the_arena_to_the_byte(name: str, pool: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    info = check_model(tmp_path)
    spec = ModelSpec.from_config(CONFIGS[name], "float64")
    sizes = {"big": 4_000_000, "mid": 900_000, "small": 700_000}
    topology = Topology.from_catalogue(("l4", "a10", "t4"))
    gpus = dict(zip(("big", "mid", "small"), topology.gpus.values(), strict=True))
    topology = Topology(gpus, topology.node_link).with_memory(sizes)
    goal = Goal(Workload(20, 10), limits=EngineLimits(block_tokens=16, memory_fraction=1.0))
    gear = plan_gear(spec, topology, goal, Signature.parse(pool))
    if isinstance(gear, NoGear):
        return
    for replica in gear.replicas:
        for stage in replica.stages:
            size = sizes[stage.gpu_type]
            assert stage.kv_blocks > 0
            assert takes(info, stage, stage.kv_blocks) <= size
            assert takes(info, stage, stage.kv_blocks + 1) > size
