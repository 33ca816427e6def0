"""Model families: from a parsed `config.json` to a ModelSpec; never opens a file."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping

from flexslurm.errors import ModelError
from flexslurm.planner.model_spec import LayerKind, ModelSpec, TpSplit, Weight, item_bytes

_ABSENT = object()


class Config:
    """A configuration with checked access: what is missing or impossible is a ModelError."""

    def __init__(self, values: Mapping[str, object], family: str) -> None:
        self._values, self.family = values, family

    def whole(self, key: str, default: object = _ABSENT, least: int = 1, most: int = 2**30) -> int:
        """A whole number from `least` to `most`. Raises ModelError, as all of these do."""
        value = self._values.get(key)
        if value is None:
            if default is _ABSENT:
                raise ModelError(f"the configuration of this {self.family} model has no '{key}'")
            value = default
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            words = f"must be a whole number from {least} to {most}, not {value!r}"
            raise ModelError(f"'{key}' {words}")
        return value

    def experts(self) -> int:
        """The number of experts, by the older or the newer name of the key."""
        older = self.has("num_experts")
        return self.whole("num_experts" if older else "num_local_experts")

    def flag(self, key: str, default: bool) -> bool:
        value = self._values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ModelError(f"'{key}' must be true or false, not {value!r}")
        return value

    def numbers(self, key: str) -> tuple[int, ...]:
        value = self._values.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
            raise ModelError(f"'{key}' must be a list of whole numbers, not {value!r}")
        return tuple(value)

    def has(self, key: str) -> bool:
        return self._values.get(key) is not None


class _Parts:
    """What a family fills in."""

    def __init__(self, config: Config) -> None:
        self.hidden = config.whole("hidden_size")
        self.heads = config.whole("num_attention_heads")
        self.kv_heads = config.whole("num_key_value_heads", self.heads)
        if self.heads % self.kv_heads:
            raise ModelError(
                f"{self.heads} attention heads cannot share {self.kv_heads} KV heads evenly"
            )
        self.vocab = config.whole("vocab_size")
        self.layers = config.whole("num_hidden_layers", most=4096)
        self.max_context = config.whole("max_position_embeddings", 2048)
        self.head_dim = config.whole("head_dim", max(1, self.hidden // self.heads))
        self.attention_dim = self.heads * self.head_dim
        self.latent = False
        self.tied = config.flag("tie_word_embeddings", False)
        self.kinds: list[LayerKind] = []
        self.layer_kinds: list[int] = []
        self.first: list[Weight] = []
        self.last: list[Weight] = []

    def same_layers(self, *weights: Weight) -> None:
        self.kinds, self.layer_kinds = [LayerKind("dense", weights)], [0] * self.layers

    def ends(self, norm: Weight, *, first: tuple[Weight, ...] = ()) -> None:
        """Embedding and further tables on the first stage; norm and head on the last."""
        table = Weight("embed_tokens", self.vocab, self.hidden, looked_up=True)
        self.first = [table, *first]
        self.last = [norm, Weight("lm_head", self.vocab, self.hidden, TpSplit.EVEN_COLS)]

    def attention(self, bias: bool, out_bias: bool) -> tuple[Weight, ...]:
        q, kv = self.attention_dim, self.kv_heads * self.head_dim
        return (
            Weight("self_attn.q_proj", q, self.hidden, TpSplit.KV_ROWS, bias),
            Weight("self_attn.k_proj", kv, self.hidden, TpSplit.KV_ROWS, bias),
            Weight("self_attn.v_proj", kv, self.hidden, TpSplit.KV_ROWS, bias),
            Weight("self_attn.o_proj", self.hidden, q, TpSplit.KV_COLS, out_bias),
        )

    def gated_mlp(self, inner: int, bias: bool = False, prefix: str = "mlp") -> tuple[Weight, ...]:
        return (
            Weight(f"{prefix}.gate_proj", inner, self.hidden, TpSplit.EVEN_ROWS, bias),
            Weight(f"{prefix}.up_proj", inner, self.hidden, TpSplit.EVEN_ROWS, bias),
            Weight(f"{prefix}.down_proj", self.hidden, inner, TpSplit.EVEN_COLS, bias),
        )

    def experts(self, count: int, active: int, inner: int) -> tuple[Weight, ...]:
        """Router and routed experts: DeepSpeed leaves fused experts whole on every rank."""
        if active > count:
            raise ModelError(f"a token cannot use {active} of {count} experts")
        return (
            Weight("mlp.gate", count, self.hidden),
            Weight("mlp.experts.gate_up_proj", 2 * inner, self.hidden, copies=count, active=active),
            Weight("mlp.experts.down_proj", self.hidden, inner, copies=count, active=active),
        )

    def norms(self, *names: str) -> tuple[Weight, ...]:
        return tuple(Weight(name, self.hidden, 1) for name in names)

    def layer_norms(self, *names: str) -> tuple[Weight, ...]:
        return tuple(Weight(name, self.hidden, 1, bias=True) for name in names)


_RMS = ("input_layernorm", "post_attention_layernorm")


def _llama(config: Config) -> _Parts:
    parts = _Parts(config)
    bias = config.flag("attention_bias", False)
    parts.same_layers(
        *parts.attention(bias, bias),
        *parts.gated_mlp(config.whole("intermediate_size"), config.flag("mlp_bias", False)),
        *parts.norms(*_RMS),
    )
    parts.ends(*parts.norms("norm"))
    return parts


def _mistral(config: Config) -> _Parts:
    parts = _Parts(config)
    parts.same_layers(
        *parts.attention(False, False),
        *parts.gated_mlp(config.whole("intermediate_size")),
        *parts.norms(*_RMS),
    )
    parts.ends(*parts.norms("norm"))
    return parts


def _qwen2(config: Config) -> _Parts:
    parts = _Parts(config)
    parts.same_layers(
        *parts.attention(True, False),
        *parts.gated_mlp(config.whole("intermediate_size")),
        *parts.norms(*_RMS),
    )
    parts.ends(*parts.norms("norm"))
    return parts


def _head_norms(parts: _Parts) -> tuple[Weight, ...]:
    return (
        Weight("self_attn.q_norm", parts.head_dim, 1),
        Weight("self_attn.k_norm", parts.head_dim, 1),
    )


def _qwen3(config: Config) -> _Parts:
    parts = _Parts(config)
    if not config.has("head_dim"):
        parts.head_dim, parts.attention_dim = 128, 128 * parts.heads
    bias = config.flag("attention_bias", False)
    parts.same_layers(
        *parts.attention(bias, bias),
        *_head_norms(parts),
        *parts.gated_mlp(config.whole("intermediate_size")),
        *parts.norms(*_RMS),
    )
    parts.ends(*parts.norms("norm"))
    return parts


def _gemma(config: Config) -> _Parts:
    parts = _Parts(config)
    parts.tied = config.flag("tie_word_embeddings", True)
    bias = config.flag("attention_bias", False)
    extra: tuple[Weight, ...] = ()
    if config.family == "gemma2":
        extra = parts.norms("pre_feedforward_layernorm", "post_feedforward_layernorm")
    parts.same_layers(
        *parts.attention(bias, bias),
        *parts.gated_mlp(config.whole("intermediate_size")),
        *parts.norms(*_RMS),
        *extra,
    )
    parts.ends(*parts.norms("norm"))
    return parts


def _phi3(config: Config) -> _Parts:
    parts = _Parts(config)
    q, kv = parts.attention_dim, parts.kv_heads * parts.head_dim
    inner = config.whole("intermediate_size")
    parts.same_layers(
        Weight("self_attn.qkv_proj", q + 2 * kv, parts.hidden, TpSplit.KV_ROWS),
        Weight("self_attn.o_proj", parts.hidden, q, TpSplit.KV_COLS),
        Weight("mlp.gate_up_proj", 2 * inner, parts.hidden, TpSplit.EVEN_ROWS),
        Weight("mlp.down_proj", parts.hidden, inner, TpSplit.EVEN_COLS),
        *parts.norms(*_RMS),
    )
    parts.ends(*parts.norms("norm"))
    return parts


def _opt(config: Config) -> _Parts:
    parts = _Parts(config)
    parts.tied = config.flag("tie_word_embeddings", True)
    bias, hidden = config.flag("enable_bias", True), parts.hidden
    inner = config.whole("ffn_dim")
    norms = _opt_norms(config, parts, "self_attn_layer_norm", "final_layer_norm")
    parts.same_layers(
        *parts.attention(bias, bias),
        Weight("fc1", inner, hidden, TpSplit.KV_ROWS, bias),
        Weight("fc2", hidden, inner, TpSplit.KV_COLS, bias),
        *norms,
    )
    width = config.whole("word_embed_proj_dim", hidden)
    positions = Weight("embed_positions", parts.max_context + 2, hidden, looked_up=True)
    parts.first = [Weight("embed_tokens", parts.vocab, width, looked_up=True), positions]
    parts.last = [Weight("lm_head", parts.vocab, width, TpSplit.EVEN_COLS)]
    if width != hidden:
        parts.first.append(Weight("project_in", hidden, width))
        parts.last.insert(0, Weight("project_out", width, hidden))
    before = config.flag("do_layer_norm_before", True)
    if before and not config.flag("_remove_final_layer_norm", False):
        parts.last = [*_opt_norms(config, parts, "final_layer_norm"), *parts.last]
    return parts


def _opt_norms(config: Config, parts: _Parts, *names: str) -> tuple[Weight, ...]:
    affine = config.flag("layer_norm_elementwise_affine", True)
    return parts.layer_norms(*names) if affine else ()


def _gpt_neox(config: Config) -> _Parts:
    parts = _Parts(config)
    bias, hidden = config.flag("attention_bias", True), parts.hidden
    inner = config.whole("intermediate_size")
    parts.same_layers(
        Weight("attention.query_key_value", 3 * hidden, hidden, TpSplit.KV_ROWS, bias),
        Weight("attention.dense", hidden, hidden, TpSplit.KV_COLS, bias),
        Weight("mlp.dense_h_to_4h", inner, hidden, TpSplit.EVEN_ROWS, True),
        Weight("mlp.dense_4h_to_h", hidden, inner, TpSplit.EVEN_COLS, True),
        *parts.layer_norms(*_RMS),
    )
    parts.ends(*parts.layer_norms("final_layer_norm"))
    return parts


def _mixtral(config: Config) -> _Parts:
    parts = _Parts(config)
    parts.same_layers(
        *parts.attention(False, False),
        *parts.experts(
            config.experts(),
            config.whole("num_experts_per_tok"),
            config.whole("intermediate_size"),
        ),
        *parts.norms(*_RMS),
    )
    parts.kinds = [LayerKind("moe", parts.kinds[0].weights)]
    parts.ends(*parts.norms("norm"))
    return parts


def _qwen_moe(config: Config) -> _Parts:
    parts = _Parts(config)
    third = config.family == "qwen3_moe"
    bias = config.flag("attention_bias", False) if third else config.flag("qkv_bias", True)
    attention = parts.attention(bias, bias and third) + (_head_norms(parts) if third else ())
    experts = parts.experts(
        config.experts(),
        config.whole("num_experts_per_tok"),
        config.whole("moe_intermediate_size"),
    )
    if not third:
        shared = config.whole("shared_expert_intermediate_size")
        experts += parts.gated_mlp(shared, prefix="mlp.shared_expert")
        experts += (Weight("mlp.shared_expert_gate", 1, parts.hidden),)
    norms = parts.norms(*_RMS)
    dense = parts.gated_mlp(config.whole("intermediate_size"))
    parts.kinds = [
        LayerKind("dense", (*attention, *dense, *norms)),
        LayerKind("moe", (*attention, *experts, *norms)),
    ]
    step, only = config.whole("decoder_sparse_step", 1), set(config.numbers("mlp_only_layers"))
    parts.layer_kinds = [
        int(layer not in only and (layer + 1) % step == 0) for layer in range(parts.layers)
    ]
    parts.ends(*parts.norms("norm"))
    return parts


def _deepseek(config: Config) -> _Parts:
    parts = _Parts(config)
    nope, rope = config.whole("qk_nope_head_dim"), config.whole("qk_rope_head_dim")
    value, rank, heads = config.whole("v_head_dim"), config.whole("kv_lora_rank"), parts.heads
    hidden = parts.hidden
    if config.has("q_lora_rank"):
        low = config.whole("q_lora_rank")
        query: tuple[Weight, ...] = (
            Weight("self_attn.q_a_proj", low, hidden),
            Weight("self_attn.q_a_layernorm", low, 1),
            Weight("self_attn.q_b_proj", heads * (nope + rope), low, TpSplit.KV_ROWS),
        )
    else:
        query = (Weight("self_attn.q_proj", heads * (nope + rope), hidden, TpSplit.KV_ROWS),)
    attention = (
        *query,
        Weight("self_attn.kv_a_proj_with_mqa", rank + rope, hidden),
        Weight("self_attn.kv_a_layernorm", rank, 1),
        Weight("self_attn.kv_b_proj", heads * (nope + value), rank, TpSplit.KV_ROWS),
        Weight("self_attn.o_proj", hidden, heads * value, TpSplit.KV_COLS),
        *parts.norms(*_RMS),
    )
    inner, routed = config.whole("moe_intermediate_size"), config.whole("n_routed_experts")
    experts = parts.experts(routed, config.whole("num_experts_per_tok"), inner)
    if config.family == "deepseek_v3":
        experts += (Weight("mlp.gate.e_score_correction_bias", routed, 1),)
    shared = config.whole("n_shared_experts", 0, least=0) * inner
    if shared:
        experts += parts.gated_mlp(shared, prefix="mlp.shared_experts")
    dense = parts.gated_mlp(config.whole("intermediate_size"))
    parts.kinds = [
        LayerKind("dense", (*attention, *dense)),
        LayerKind("moe", (*attention, *experts)),
    ]
    leading = min(config.whole("first_k_dense_replace", 0, least=0), parts.layers)
    parts.layer_kinds = [0] * leading + [1] * (parts.layers - leading)
    parts.latent, parts.head_dim = True, rank + rope
    # Scores take nope+rope numbers a head and values take v: together what 2*head_dim stands for.
    parts.attention_dim = heads * (nope + rope + value) // 2
    parts.ends(*parts.norms("norm"))
    return parts


FAMILIES: Mapping[str, Callable[[Config], _Parts]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma": _gemma,
    "gemma2": _gemma,
    "phi3": _phi3,
    "opt": _opt,
    "gpt_neox": _gpt_neox,
    "mixtral": _mixtral,
    "qwen2_moe": _qwen_moe,
    "qwen3_moe": _qwen_moe,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
}


def read_config(
    config: Mapping[str, object], dtype: str, kv_dtype: str | None = None, name: str | None = None
) -> ModelSpec:
    """As `ModelSpec.from_config`. Raises ModelError."""
    for item in (dtype, kv_dtype):
        if item is not None:
            item_bytes(item)
    inner = config.get("text_config")
    if isinstance(inner, Mapping):
        config = {**inner, **({"model_type": inner["model_type"]} if "model_type" in inner else {})}
    family = config.get("model_type")
    if not isinstance(family, str):
        raise ModelError("the configuration has no 'model_type'")
    if family not in FAMILIES:
        near = difflib.get_close_matches(family, FAMILIES, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(FAMILIES)}"
        raise ModelError(f"models of type '{family}' cannot be planned for", hint=hint)
    parts = FAMILIES[family](Config(config, family))
    return ModelSpec(
        name=name or str(config.get("_name_or_path") or family),
        family=family,
        dtype=dtype,
        hidden=parts.hidden,
        heads=parts.heads,
        kv_heads=parts.kv_heads,
        head_dim=parts.head_dim,
        attention_dim=parts.attention_dim,
        vocab=parts.vocab,
        max_context=parts.max_context,
        tied=parts.tied,
        kinds=tuple(parts.kinds),
        layer_kinds=tuple(parts.layer_kinds),
        first=tuple(parts.first),
        last=tuple(parts.last),
        latent=parts.latent,
        other_dtype="bfloat16" if dtype == "float8" else None,
        kv_dtype=kv_dtype,
    )
