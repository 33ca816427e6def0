"""Published model configurations, by name: the figures of their `config.json`; only values.

Each is as its authors published it with the weights; `parameters` is the size they or the model's
page give for it (a tied head counted once), which the tests hold against what `ModelSpec` computes.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import msgspec

from flexslurm.errors import ModelError


class Published(msgspec.Struct, frozen=True):
    """A configuration and where its parameter count is published."""

    config: dict[str, Any]
    parameters: int
    source: str


def _llama(
    hidden: int, inner: int, layers: int, heads: int, kv: int, vocab: int, context: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv,
        "vocab_size": vocab, "max_position_embeddings": context, "tie_word_embeddings": False,
    } | more  # fmt: skip


def _opt(hidden: int, inner: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "opt", "hidden_size": hidden, "ffn_dim": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "vocab_size": 50272, "max_position_embeddings": 2048,
    } | more  # fmt: skip


def _neox(
    hidden: int, inner: int, layers: int, heads: int, vocab: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": "gpt_neox", "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": heads, "vocab_size": vocab,
        "max_position_embeddings": 2048,
    } | more  # fmt: skip


_CARD = "model page: parameters of the safetensors"

PUBLISHED: Mapping[str, Published] = {
    "llama-2-7b": Published(
        _llama(4096, 11008, 32, 32, 32, 32000, 4096), 6_738_415_616, _CARD),
    "llama-2-13b": Published(
        _llama(5120, 13824, 40, 40, 40, 32000, 4096), 13_015_864_320, _CARD),
    "llama-2-70b": Published(
        _llama(8192, 28672, 80, 64, 8, 32000, 4096), 68_976_648_192, _CARD),
    "llama-3.1-8b": Published(
        _llama(4096, 14336, 32, 32, 8, 128256, 131072), 8_030_261_248, _CARD),
    "llama-3.1-70b": Published(
        _llama(8192, 28672, 80, 64, 8, 128256, 131072), 70_553_706_496, _CARD),
    "llama-3.1-405b": Published(
        _llama(16384, 53248, 126, 128, 8, 128256, 131072), 405_853_388_800, _CARD),
    "llama-3.2-1b": Published(
        _llama(2048, 8192, 16, 32, 8, 128256, 131072, head_dim=64, tie_word_embeddings=True),
        1_235_814_400, _CARD),
    "llama-3.2-3b": Published(
        _llama(3072, 8192, 28, 24, 8, 128256, 131072, head_dim=128, tie_word_embeddings=True),
        3_212_749_824, _CARD),
    "smollm2-135m": Published(
        _llama(576, 1536, 30, 9, 3, 49152, 8192, tie_word_embeddings=True),
        134_515_008, _CARD),
    "smollm2-1.7b": Published(
        _llama(2048, 8192, 24, 32, 32, 49152, 8192, tie_word_embeddings=True),
        1_711_376_384, _CARD),
    "mistral-7b": Published(
        _llama(4096, 14336, 32, 32, 8, 32000, 32768, model_type="mistral"),
        7_241_732_096, _CARD),
    "mixtral-8x7b": Published(
        _llama(4096, 14336, 32, 32, 8, 32000, 32768, model_type="mixtral", num_local_experts=8,
               num_experts_per_tok=2),
        46_702_792_704, _CARD),
    "mixtral-8x22b": Published(
        _llama(6144, 16384, 56, 48, 8, 32000, 65536, model_type="mixtral", num_local_experts=8,
               num_experts_per_tok=2),
        140_620_634_112, _CARD),
    "qwen2.5-0.5b": Published(
        _llama(896, 4864, 24, 14, 2, 151936, 32768, model_type="qwen2", tie_word_embeddings=True),
        494_032_768, _CARD),
    "qwen2.5-7b": Published(
        _llama(3584, 18944, 28, 28, 4, 152064, 131072, model_type="qwen2"),
        7_615_616_512, _CARD),
    "qwen2.5-72b": Published(
        _llama(8192, 29568, 80, 64, 8, 152064, 131072, model_type="qwen2"),
        72_706_203_648, _CARD),
    "qwen3-0.6b": Published(
        _llama(1024, 3072, 28, 16, 8, 151936, 40960, model_type="qwen3", head_dim=128,
               tie_word_embeddings=True),
        596_049_920, "Qwen3 technical report, 0.6B, 0.44B without the embedding"),
    "qwen3-8b": Published(
        _llama(4096, 12288, 36, 32, 8, 151936, 40960, model_type="qwen3", head_dim=128),
        8_190_735_360, _CARD),
    "qwen3-32b": Published(
        _llama(5120, 25600, 64, 64, 8, 151936, 40960, model_type="qwen3", head_dim=128),
        32_762_123_264, _CARD),
    "qwen3-30b-a3b": Published(
        _llama(2048, 6144, 48, 32, 4, 151936, 40960, model_type="qwen3_moe", head_dim=128,
               num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
               decoder_sparse_step=1, mlp_only_layers=[]),
        30_532_122_624, _CARD),
    "qwen3-235b-a22b": Published(
        _llama(4096, 12288, 94, 64, 4, 151936, 40960, model_type="qwen3_moe", head_dim=128,
               num_experts=128, num_experts_per_tok=8, moe_intermediate_size=1536,
               decoder_sparse_step=1, mlp_only_layers=[]),
        235_093_634_560, _CARD),
    "deepseek-v2-lite": Published(
        {"model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10944,
         "moe_intermediate_size": 1408, "num_hidden_layers": 27, "num_attention_heads": 16,
         "num_key_value_heads": 16, "n_shared_experts": 2, "n_routed_experts": 64,
         "kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64, "v_head_dim": 128,
         "qk_nope_head_dim": 128, "num_experts_per_tok": 6, "first_k_dense_replace": 1,
         "vocab_size": 102400, "max_position_embeddings": 163840},
        15_706_484_224, _CARD),
    "deepseek-v3": Published(
        {"model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432,
         "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
         "num_key_value_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256,
         "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128,
         "qk_nope_head_dim": 128, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
         "vocab_size": 129280, "max_position_embeddings": 163840},
        671_026_419_200, "DeepSeek-V3 report, 671B without multi-token prediction"),
    "gemma-2b": Published(
        _llama(2048, 16384, 18, 8, 1, 256000, 8192, model_type="gemma", head_dim=256,
               tie_word_embeddings=True),
        2_506_172_416, _CARD),
    "gemma-7b": Published(
        _llama(3072, 24576, 28, 16, 16, 256000, 8192, model_type="gemma", head_dim=256,
               tie_word_embeddings=True),
        8_537_680_896, _CARD),
    "gemma-2-9b": Published(
        _llama(3584, 14336, 42, 16, 8, 256000, 8192, model_type="gemma2", head_dim=256,
               tie_word_embeddings=True),
        9_241_705_984, _CARD),
    "phi-3-mini": Published(
        _llama(3072, 8192, 32, 32, 32, 32064, 4096, model_type="phi3"),
        3_821_079_552, _CARD),
    "opt-125m": Published(_opt(768, 3072, 12, 12), 125_239_296, "OPT paper, 125M; its checkpoint"),
    "opt-350m": Published(
        _opt(1024, 4096, 24, 16, word_embed_proj_dim=512, do_layer_norm_before=False),
        331_196_416, "OPT paper, 350M; its checkpoint"),
    "opt-6.7b": Published(
        _opt(4096, 16384, 32, 32), 6_658_473_984, "OPT paper, 6.7B; its checkpoint"),
    "gpt-neox-20b": Published(
        _neox(6144, 24576, 44, 64, 50432), 20_554_567_680, "GPT-NeoX-20B paper, 20,554,567,680"),
    "pythia-70m": Published(
        _neox(512, 2048, 6, 8, 50304), 70_426_624, "Pythia paper, 70,426,624"),
    "pythia-6.9b": Published(
        _neox(4096, 16384, 32, 32, 50432), 6_857_302_016, "Pythia paper, 6,857,302,016"),
}  # fmt: skip


def config_of(name: str) -> dict[str, Any]:
    """The configuration of a published model; raises ModelError naming the nearest."""
    found = PUBLISHED.get(name.lower())
    if found is not None:
        return dict(found.config)
    near = difflib.get_close_matches(name.lower(), PUBLISHED, n=1, cutoff=0.5)
    hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(PUBLISHED)}"
    raise ModelError(f"no published configuration is called '{name}'", hint=hint)
