"""Parameters computed from a configuration are those of the model that transformers builds."""

from __future__ import annotations

from typing import Any

import pytest

from flexslurm.planner.model_spec import ModelSpec

_BASE: dict[str, Any] = {
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 3, "head_dim": 8, "vocab_size": 101, "max_position_embeddings": 64,
    "pad_token_id": 0,
}  # fmt: skip
_MOE = {
    "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}  # fmt: skip
_DEEPSEEK = {
    "hidden_size": 48, "intermediate_size": 80, "moe_intermediate_size": 16,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4,
    "n_shared_experts": 2, "n_routed_experts": 4, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 12, "qk_nope_head_dim": 10, "num_experts_per_tok": 2, "vocab_size": 101,
    "first_k_dense_replace": 1, "max_position_embeddings": 64, "n_group": 1, "topk_group": 1,
}  # fmt: skip
_OPT = {
    "hidden_size": 48, "ffn_dim": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
    "vocab_size": 101, "max_position_embeddings": 64, "word_embed_proj_dim": 48,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "llama": {**_BASE},
    "llama biased": {**_BASE, "attention_bias": True, "mlp_bias": True},
    "llama tied": {**_BASE, "tie_word_embeddings": True},
    "mistral": {**_BASE},
    "qwen2": {**_BASE},
    "qwen3": {**_BASE},
    "gemma": {**_BASE},
    "gemma2": {**_BASE},
    "phi3": {**_BASE},
    "opt": {**_OPT},
    "opt projected": {**_OPT, "word_embed_proj_dim": 24, "do_layer_norm_before": False},
    "gpt_neox": {**_BASE, "num_attention_heads": 6},
    "mixtral": {**_BASE, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**_BASE, **_MOE, "decoder_sparse_step": 2},
    "qwen3_moe": {**_BASE, **_MOE, "mlp_only_layers": [1]},
    "deepseek_v2": {**_DEEPSEEK, "q_lora_rank": None},
    "deepseek_v3": {**_DEEPSEEK, "q_lora_rank": 20},
}


@pytest.mark.parametrize("case", CASES)
def test_parameters_are_those_of_transformers(case: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(case.split(maxsplit=1)[0], **CASES[case])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    # A router's correction is a buffer in transformers and a parameter in the checkpoint.
    buffers = [b for name, b in model.named_buffers() if name.endswith("e_score_correction_bias")]
    built = sum(p.numel() for p in model.parameters()) + sum(b.numel() for b in buffers)
    assert ModelSpec.from_config(config.to_dict(), "float32").params == built
