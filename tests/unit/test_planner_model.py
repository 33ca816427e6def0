"""What a model costs: parameters as published, KV, cuts over ranks, and wrong configurations."""

from __future__ import annotations

from typing import Any

import pytest

from flexslurm.errors import ModelError
from flexslurm.planner.model_spec import (
    ModelSpec,
    even_shard,
    kv_heads_of_ranks,
    kv_shard,
)
from flexslurm.planner.published import PUBLISHED, config_of


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_ones(name: str) -> None:
    spec = ModelSpec.from_config(PUBLISHED[name].config)
    assert spec.params == PUBLISHED[name].parameters
    assert PUBLISHED[name].source


@pytest.mark.parametrize(
    ("name", "bytes_per_token"),
    [
        ("llama-2-7b", 2 * 32 * 4096 * 2),  # multi-head: all of hidden, twice, in each layer
        ("llama-3.1-8b", 128 * 1024),
        ("llama-3.1-70b", 320 * 1024),
        ("qwen2.5-7b", 56 * 1024),
        ("gemma-2b", 18 * 1024),  # multi-query
        ("deepseek-v3", (512 + 64) * 61 * 2),  # latent: compressed KV and the rotary part
    ],
)
def test_kv_of_a_token(name: str, bytes_per_token: int) -> None:
    assert ModelSpec.from_config(config_of(name)).kv_bytes_per_token() == bytes_per_token


def active(spec: ModelSpec) -> int:
    """Parameters that one token is multiplied with, and the embedding table."""
    weights = [w for kind in spec.layers() for w in kind.weights] + [*spec.last]
    return sum(w.multiplied for w in weights) + spec.vocab * spec.hidden


def test_active_parameters_of_experts() -> None:
    """DeepSeek-V3 is said to use 37B of 671B for a token, Qwen3-30B-A3B 3.3B, with embeddings."""
    deepseek = ModelSpec.from_config(config_of("deepseek-v3"))
    assert active(deepseek) / 1e9 == pytest.approx(37.5, abs=0.5)
    qwen = ModelSpec.from_config(config_of("qwen3-30b-a3b"))
    assert active(qwen) / 1e9 == pytest.approx(3.35, abs=0.1)
    assert [kind.name for kind in deepseek.layers()[:4]] == ["dense", "dense", "dense", "moe"]


def test_dtypes_scale_weights_and_kv() -> None:
    config = config_of("llama-3.1-8b")
    half = ModelSpec.from_config(config, "bfloat16")
    whole = ModelSpec.from_config(config, "float32")
    assert whole.weight_bytes() == pytest.approx(2 * half.weight_bytes(), rel=1e-4)
    assert whole.kv_bytes_per_token() == 2 * half.kv_bytes_per_token()
    eighth = ModelSpec.from_config(config, "float8")
    ends = 2 * 2 * half.vocab * half.hidden  # embedding and head stay in bf16
    layers = half.weight_bytes() - ends
    assert eighth.weight_bytes() == pytest.approx(ends + layers / 2, rel=1e-4)
    assert eighth.kv_bytes_per_token() == half.kv_bytes_per_token()
    both = ModelSpec.from_config(config, "float8", kv_dtype="float8")
    assert both.kv_bytes_per_token() == half.kv_bytes_per_token() // 2


@pytest.mark.parametrize("name", ["llama-3.2-1b", "opt-125m", "qwen3-0.6b", "gpt-neox-20b"])
@pytest.mark.parametrize("tp", [1, 2, 3, 5])
def test_ranks_hold_the_model_between_them(name: str, tp: int) -> None:
    """What is cut is held once; what is whole, by every rank."""
    spec = ModelSpec.from_config(config_of(name))
    kind = spec.kinds[0]
    for weight in kind.weights:
        held = sum(weight.shard_params(spec.kv_heads, tp, rank) for rank in range(tp))
        whole_bias = weight.bias and weight.split.value.endswith("cols")
        expected = weight.params + (tp - 1) * (weight.rows if whole_bias else 0)
        assert held == (weight.params * tp if weight.split == "whole" else expected)


def test_uneven_cuts() -> None:
    assert kv_heads_of_ranks(3, 2) == (2, 1)
    assert kv_shard(9 * 64, 3, 2) == (384, 192)
    assert even_shard(1536, 5) == (308, 307, 307, 307, 307)
    spec = ModelSpec.from_config(config_of("smollm2-135m"), "float32")
    assert spec.max_tp() == 3
    assert spec.kv_heads_on(2, 0) == 2 and spec.kv_heads_on(2, 1) == 1
    assert spec.layer_bytes(0, 2, 0) > spec.layer_bytes(0, 2, 1)


def test_tied_head_is_a_second_copy_only_on_another_stage() -> None:
    spec = ModelSpec.from_config(config_of("smollm2-135m"), "float32")
    head = spec.vocab * spec.hidden * 4
    alone = spec.stage_weight_bytes(0, 30)
    split = spec.stage_weight_bytes(0, 10) + spec.stage_weight_bytes(10, 30)
    assert split - alone == head
    assert alone == spec.weight_bytes()


def _llama(**changes: Any) -> dict[str, Any]:
    config = dict(config_of("llama-3.2-1b")) | changes
    return {key: value for key, value in config.items() if value is not None}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "no 'model_type'"),
        ({"model_type": "lama"}, "models of type 'lama'"),
        (_llama(hidden_size=None), "no 'hidden_size'"),
        (_llama(num_hidden_layers=0), "'num_hidden_layers' must be a whole number from 1"),
        (_llama(num_hidden_layers=10**12), "from 1 to 4096, not 1000000000000"),
        (_llama(vocab_size="many"), "'vocab_size' must be a whole number"),
        (_llama(tie_word_embeddings=3), "'tie_word_embeddings' must be true or false"),
        (_llama(num_key_value_heads=5), "32 attention heads cannot share 5 KV heads"),
    ],
)
def test_wrong_configurations_are_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        ModelSpec.from_config(config)


def test_hints_name_the_nearest() -> None:
    with pytest.raises(ModelError) as caught:
        ModelSpec.from_config({"model_type": "qwen"})
    assert caught.value.hint in ("did you mean 'qwen2'?", "did you mean 'qwen3'?")
    with pytest.raises(ModelError) as caught:
        config_of("llama-3.1-70")
    assert caught.value.hint == "did you mean 'llama-3.1-70b'?"
    with pytest.raises(ModelError, match="unknown dtype 'int3'"):
        ModelSpec.from_config(config_of("llama-2-7b"), "int3")


def test_multimodal_configurations_are_read_by_their_text_part() -> None:
    text = dict(config_of("llama-3.2-1b"))
    whole = {"model_type": "some_vision_model", "text_config": text}
    assert ModelSpec.from_config(whole).params == PUBLISHED["llama-3.2-1b"].parameters
