"""Which models can be staged, read from config.json alone; never imports torch or reads weights.

A model is *staged* when its layers can be cut into runs for pipeline stages and its weights into
slices for tensor-parallel ranks. The launcher calls `check_model` to refuse early, the engine to
build. Every figure that memory estimates need is in `ModelInfo`.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexslurm.config.bounded import read_text
from flexslurm.errors import ModelError, unreadable
from flexslurm.planner import model_spec


@dataclass(frozen=True, slots=True)
class Family:
    """How the models of one architecture are named, in transformers and in their checkpoints."""

    model_type: str
    causal_lm: str
    """Class in transformers."""
    base: str
    """Attribute of the class that holds the trunk, such as `model`."""
    trunk: str
    """Path below `base` to the module that holds the layers; empty: `base` itself."""
    embed: str
    norm: str
    norm_class: str
    """`rms` (weight) or `layer` (weight and bias)."""
    defaults: Mapping[str, Any]
    """What transformers assumes where config.json says nothing."""
    positions: str | None = None
    """Learned position embeddings, where there are any; else rotary."""
    head_names: tuple[str, ...] = ("lm_head.weight",)
    """Names the head's weight goes by in checkpoints."""

    @property
    def prefix(self) -> str:
        """Where the trunk's tensors are in a checkpoint, with a final dot."""
        return ".".join(part for part in (self.base, self.trunk) if part) + "."


_LLAMA_DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": None,
    "head_dim": None, "max_position_embeddings": 2048, "tie_word_embeddings": False,
    "attention_bias": False, "mlp_bias": False,
}  # fmt: skip


def _llama_like(model_type: str, causal_lm: str, **defaults: Any) -> Family:
    return Family(
        model_type=model_type, causal_lm=causal_lm, base="model", trunk="", embed="embed_tokens",
        norm="norm", norm_class="rms", defaults=_LLAMA_DEFAULTS | defaults,
    )  # fmt: skip


FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        _llama_like("llama", "LlamaForCausalLM"),
        _llama_like(
            "mistral", "MistralForCausalLM",
            intermediate_size=14336, num_key_value_heads=8, max_position_embeddings=131072,
            sliding_window=4096,
        ),
        _llama_like(
            "qwen2", "Qwen2ForCausalLM",
            vocab_size=151936, intermediate_size=22016, num_key_value_heads=32,
            max_position_embeddings=32768, sliding_window=4096, use_sliding_window=False,
            max_window_layers=28,
        ),
        _llama_like(
            "qwen3", "Qwen3ForCausalLM",
            vocab_size=151936, intermediate_size=22016, num_key_value_heads=32, head_dim=128,
            max_position_embeddings=32768, sliding_window=4096, use_sliding_window=False,
            max_window_layers=28,
        ),
        Family(
            model_type="opt", causal_lm="OPTForCausalLM", base="model", trunk="decoder",
            embed="embed_tokens", norm="final_layer_norm", norm_class="layer",
            positions="embed_positions",
            defaults={
                "vocab_size": 50272, "hidden_size": 768, "ffn_dim": 3072, "num_hidden_layers": 12,
                "num_attention_heads": 12, "max_position_embeddings": 2048,
                "tie_word_embeddings": True, "word_embed_proj_dim": None, "enable_bias": True,
                "do_layer_norm_before": True, "_remove_final_layer_norm": False,
                "layer_norm_elementwise_affine": True,
            },
        ),
        Family(
            model_type="gpt_neox", causal_lm="GPTNeoXForCausalLM", base="gpt_neox", trunk="",
            embed="embed_in", norm="final_layer_norm", norm_class="layer",
            head_names=("lm_head.weight", "embed_out.weight"),
            defaults={
                "vocab_size": 50432, "hidden_size": 6144, "intermediate_size": 24576,
                "num_hidden_layers": 44, "num_attention_heads": 64,
                "max_position_embeddings": 2048, "tie_word_embeddings": False,
                "attention_bias": True,
            },
        ),
    )
}  # fmt: skip

DTYPES = ("float64", "float32", "bfloat16", "float16")
"""What the engine computes in; the planner knows more, of published models."""
DTYPE_BYTES = {dtype: model_spec.DTYPE_BYTES[dtype] for dtype in DTYPES}

# Rotary scalings whose angles depend on the longest position in the batch: a sequence would get
# other tokens next to a long neighbour.
_BATCH_DEPENDENT_ROPE = ("dynamic", "longrope", "su")

_FUSED_QKV = (
    "phi3", "falcon", "bloom", "gpt2", "gpt_bigcode", "mpt", "codegen", "qwen", "baichuan",
    "chatglm", "gptj", "starcoder",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The sizes of a model that can be staged."""

    path: str
    family: Family
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_context: int
    """Positions the model itself can take."""
    embed_dim: int
    """Width of the embedding table; equals `hidden_size` but for OPT with projections."""
    tied: bool
    attention_bias: bool
    mlp_bias: bool
    final_norm: bool = True
    norm_weights: bool = True
    """Whether layer norms have weights (OPT can be without)."""

    @property
    def architecture(self) -> str:
        return self.family.causal_lm


_MOST, _MOST_LAYERS = 2**31, 4096
"""Beyond these a number is a slip, and checking what it asks for would take hours."""


def supported() -> str:
    """The architectures that can be staged, for messages."""
    return ", ".join(family.causal_lm for family in FAMILIES.values())


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The model's config.json as a dict; `path` is the directory or the file itself.

    Raises ModelError where there is none or it is no JSON object.
    """
    place = Path(path)
    file = place if place.is_file() else place / "config.json"
    if not place.exists():
        raise ModelError(f"{place}: no such directory", hint="give a checkpoint directory")
    try:
        config = json.loads(read_text(file))
    except FileNotFoundError:
        raise ModelError(
            f"{file}: no such file",
            hint="a checkpoint directory holds config.json, *.safetensors and a tokenizer",
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{file}: cannot be read as JSON: {unreadable(error)}") from None
    if not isinstance(config, dict):
        raise ModelError(f"{file}: a JSON object is expected, not {type(config).__name__}")
    return config


def check_model(path: str | os.PathLike[str]) -> ModelInfo:
    """Read config.json and tell the sizes of the model, or why it cannot be staged.

    Raises ModelError naming the file, the reason and, for an unknown architecture, what there is.
    """
    config = read_config(path)
    file = Path(path) if Path(path).is_file() else Path(path) / "config.json"
    reason = _why_not(config)
    if reason is not None:
        raise ModelError(f"{file}: {reason}", hint=f"these can be staged: {supported()}")
    family = FAMILIES[str(config["model_type"])]
    values = {key: config.get(key, default) for key, default in family.defaults.items()}
    info = _info(str(path), family, values, file)
    _check_sizes(info, file)
    return info


def _architectures(config: Mapping[str, Any]) -> list[object]:
    """What the configuration says it is; a word where a list belongs is taken for its only one."""
    named = config.get("architectures") or []
    return named if isinstance(named, list) else [named]


def _why_not(config: Mapping[str, Any]) -> str | None:
    """Why a configuration cannot be staged, in words; None where it can."""
    kind = str(config.get("model_type", "?"))
    architectures = _architectures(config)
    name = str(architectures[0]) if architectures else kind
    if config.get("is_encoder_decoder"):
        return f"{name} is an encoder-decoder model; only decoders can be cut into stages"
    if config.get("quantization_config"):
        quantization = config["quantization_config"]
        method = quantization.get("quant_method", "?") if isinstance(quantization, dict) else "?"
        return f"the checkpoint is quantised ({method}); plain floating-point weights are needed"
    experts = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    if any(isinstance(config.get(key), int) and config[key] > 0 for key in experts):
        return f"{name} is a mixture of experts, which cannot be staged yet"
    if kind in _FUSED_QKV:
        return f"{name} keeps query, key and value in one weight in a form that cannot be cut"
    if kind not in FAMILIES or (architectures and name != FAMILIES[kind].causal_lm):
        return f"the architecture {name} (model_type {kind}) cannot be staged"
    return _why_not_rope(config)


def _why_not_rope(config: Mapping[str, Any]) -> str | None:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    scaling = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else "?"
    if any(word in str(scaling) for word in _BATCH_DEPENDENT_ROPE):
        return (
            f"rotary scaling '{scaling}' depends on the longest sequence of a batch, so answers "
            "would depend on their neighbours"
        )
    return None


def _whole(values: Mapping[str, Any], key: str, file: Path) -> int:
    value = values[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"{file}: {key} must be a whole number above 0, not {value!r}")
    if value > _MOST:
        raise ModelError(f"{file}: {key} is {value}, more than any model has")
    return value


def _info(path: str, family: Family, values: Mapping[str, Any], file: Path) -> ModelInfo:
    number = functools.partial(_whole, values, file=file)
    hidden, heads = number("hidden_size"), number("num_attention_heads")
    layers = number("num_hidden_layers")
    if layers > _MOST_LAYERS:
        raise ModelError(f"{file}: num_hidden_layers is {layers}, more than any model has")
    opt = family.model_type == "opt"
    has_kv = values.get("num_key_value_heads") is not None
    has_dim = values.get("head_dim") is not None
    return ModelInfo(
        path=path,
        family=family,
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=number("ffn_dim" if opt else "intermediate_size"),
        num_heads=heads,
        num_kv_heads=number("num_key_value_heads") if has_kv else heads,
        head_dim=number("head_dim") if has_dim else hidden // heads,
        vocab_size=number("vocab_size"),
        max_context=number("max_position_embeddings"),
        embed_dim=number("word_embed_proj_dim") if values.get("word_embed_proj_dim") else hidden,
        tied=bool(values["tie_word_embeddings"]),
        attention_bias=bool(values["enable_bias" if opt else "attention_bias"]),
        mlp_bias=bool(values.get("enable_bias", values.get("mlp_bias", True))),
        final_norm=not opt
        or bool(values["do_layer_norm_before"] and not values["_remove_final_layer_norm"]),
        norm_weights=bool(values.get("layer_norm_elementwise_affine", True)),
    )


def _check_sizes(info: ModelInfo, file: Path) -> None:
    if info.num_heads % info.num_kv_heads:
        raise ModelError(
            f"{file}: {info.num_heads} attention heads cannot be shared by "
            f"{info.num_kv_heads} key/value heads"
        )
    own_dim = info.family.model_type in ("opt", "gpt_neox")
    if own_dim and info.hidden_size % info.num_heads:
        raise ModelError(
            f"{file}: hidden_size {info.hidden_size} is not a multiple of the "
            f"{info.num_heads} attention heads"
        )


def tp_degrees(info: ModelInfo, max_tp: int) -> tuple[int, ...]:
    """The tensor-parallel degrees up to `max_tp` that leave every rank at least one KV head.

    DeepSpeed cuts attention by whole KV heads, the first ranks taking one more where they do not
    divide; beyond one rank per KV head it would leave ranks without any, and it does not
    replicate heads.
    """
    return tuple(range(1, min(max_tp, info.num_kv_heads) + 1))
