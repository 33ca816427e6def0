"""Which tensors a run of layers has and how tensor parallelism cuts them; torch-free, no I/O.

The engine reads the cut off DeepSpeed's layers when it builds a stage (`shard.read_spec`). The
head has no DeepSpeed, and must know memory to the byte before anything is built, so the same rule
is written here once more; `tests/cluster` hold the two together for every family and degree.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from flexslurm.engine.families import ModelInfo
from flexslurm.planner.model_spec import even_shard, grained_shard


class Cut(StrEnum):
    """How a tensor is shared by the ranks of a tensor-parallel group."""

    WHOLE = "whole"
    """Every rank has all of it."""
    ROWS = "rows"
    """Column parallel: each rank has some outputs, a range of dim 0."""
    COLUMNS = "columns"
    """Row parallel: each rank has some inputs, a range of dim 1; stored transposed."""


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """One tensor: its name in the stage, its whole shape, and how it is cut."""

    name: str
    shape: tuple[int, ...]
    cut: Cut = Cut.WHOLE
    by_heads: bool = False
    """Cut at the borders of KV heads; else as evenly as whole grains allow."""

    def local_shape(self, heads: int, tp: int, tp_rank: int) -> tuple[int, ...]:
        """The shape of what one rank holds; `heads`: the model's KV heads."""
        if self.cut is Cut.WHOLE or tp == 1:
            return self.shape
        dim = 0 if self.cut is Cut.ROWS else 1
        total = self.shape[dim]
        if self.by_heads and total % heads == 0:
            own = total * share(heads, tp, tp_rank) // heads
        else:
            own = grained_share(total, tp, tp_rank)
        return (*self.shape[:dim], own, *self.shape[dim + 1 :])


def share(total: int, ranks: int, rank: int) -> int:
    """How many of `total` things fall to `rank`: as even as can be, the first ranks one more."""
    return even_shard(total, ranks)[rank]


def grained_share(total: int, ranks: int, rank: int) -> int:
    """How many of `total` rows fall to `rank` in whole grains, the last rank taking the rest."""
    return grained_shard(total, ranks)[rank]


def _linear(
    name: str, shape: tuple[int, int], bias: bool, cut: Cut, by_heads: bool = False
) -> list[TensorLayout]:
    """A linear layer; the bias of a row-parallel one is added after the sum, so it is whole."""
    found = [TensorLayout(f"{name}.weight", shape, cut, by_heads)]
    if bias:
        own = Cut.ROWS if cut is Cut.ROWS else Cut.WHOLE
        found.append(TensorLayout(f"{name}.bias", shape[:1], own, by_heads))
    return found


def layer_tensors(info: ModelInfo) -> tuple[TensorLayout, ...]:
    """The tensors of one layer, with names below the layer."""
    kind = info.family.model_type
    if kind == "opt":
        return tuple(_opt_layer(info))
    if kind == "gpt_neox":
        return tuple(_neox_layer(info))
    return tuple(_llama_layer(info))


def _llama_layer(info: ModelInfo) -> list[TensorLayout]:
    hidden, kind = info.hidden_size, info.family.model_type
    q, kv = info.num_heads * info.head_dim, info.num_kv_heads * info.head_dim
    qkv_bias = kind == "qwen2" or (info.attention_bias and kind != "mistral")
    out_bias = info.attention_bias and kind in ("llama", "qwen3")
    mlp_bias = info.mlp_bias and kind == "llama"
    found = [
        *_linear("self_attn.q_proj", (q, hidden), qkv_bias, Cut.ROWS, True),
        *_linear("self_attn.k_proj", (kv, hidden), qkv_bias, Cut.ROWS, True),
        *_linear("self_attn.v_proj", (kv, hidden), qkv_bias, Cut.ROWS, True),
        *_linear("self_attn.o_proj", (hidden, q), out_bias, Cut.COLUMNS, True),
        *_linear("mlp.gate_proj", (info.intermediate_size, hidden), mlp_bias, Cut.ROWS),
        *_linear("mlp.up_proj", (info.intermediate_size, hidden), mlp_bias, Cut.ROWS),
        *_linear("mlp.down_proj", (hidden, info.intermediate_size), mlp_bias, Cut.COLUMNS),
        TensorLayout("input_layernorm.weight", (hidden,)),
        TensorLayout("post_attention_layernorm.weight", (hidden,)),
    ]
    if kind == "qwen3":
        found += [
            TensorLayout("self_attn.q_norm.weight", (info.head_dim,)),
            TensorLayout("self_attn.k_norm.weight", (info.head_dim,)),
        ]
    return found


def _layer_norm(name: str, size: int, weights: bool) -> list[TensorLayout]:
    parts = ("weight", "bias") if weights else ()
    return [TensorLayout(f"{name}.{part}", (size,)) for part in parts]


def _opt_layer(info: ModelInfo) -> list[TensorLayout]:
    hidden, inner, bias = info.hidden_size, info.intermediate_size, info.attention_bias
    found = [
        tensor
        for name in ("q_proj", "k_proj", "v_proj")
        for tensor in _linear(f"self_attn.{name}", (hidden, hidden), bias, Cut.ROWS, True)
    ]
    found += _linear("self_attn.out_proj", (hidden, hidden), bias, Cut.COLUMNS, True)
    # The feed-forward layers are not called mlp, so DeepSpeed cuts them by heads where it can.
    found += _linear("fc1", (inner, hidden), bias, Cut.ROWS, True)
    found += _linear("fc2", (hidden, inner), bias, Cut.COLUMNS, True)
    found += _layer_norm("self_attn_layer_norm", hidden, info.norm_weights)
    found += _layer_norm("final_layer_norm", hidden, info.norm_weights)
    return found


def _neox_layer(info: ModelInfo) -> list[TensorLayout]:
    hidden, inner, bias = info.hidden_size, info.intermediate_size, info.attention_bias
    # Query, key and value lie head by head in one weight, so a cut at heads is one range of rows.
    return [
        *_linear("attention.query_key_value", (3 * hidden, hidden), bias, Cut.ROWS, True),
        *_linear("attention.dense", (hidden, hidden), bias, Cut.COLUMNS, True),
        *_linear("mlp.dense_h_to_4h", (inner, hidden), True, Cut.ROWS),
        *_linear("mlp.dense_4h_to_h", (hidden, inner), True, Cut.COLUMNS),
        *_layer_norm("input_layernorm", hidden, True),
        *_layer_norm("post_attention_layernorm", hidden, True),
    ]


def edge_tensors(info: ModelInfo, first: bool, last: bool) -> tuple[TensorLayout, ...]:
    """What the first stage has before its layers and the last one after; `embed`, `lm_head`, …

    A tied head on the stage that has the embedding is a view of it and not listed.
    """
    found: list[TensorLayout] = []
    hidden, projected = info.hidden_size, info.embed_dim != info.hidden_size
    if first:
        found.append(TensorLayout("embed.weight", (info.vocab_size, info.embed_dim)))
        if info.family.positions is not None:
            # OPT numbers positions from 2.
            found.append(TensorLayout("positions.weight", (info.max_context + 2, hidden)))
        if projected:
            found.append(TensorLayout("project_in.weight", (hidden, info.embed_dim)))
    if last:
        if info.final_norm:
            parts = ("weight",) if info.family.norm_class == "rms" else ("weight", "bias")
            found += [
                TensorLayout(f"norm.{part}", (hidden,)) for part in parts if info.norm_weights
            ]
        if projected:
            found.append(TensorLayout("project_out.weight", (info.embed_dim, hidden)))
        if not (info.tied and first):
            found.append(
                TensorLayout("lm_head.weight", (info.vocab_size, info.embed_dim), Cut.COLUMNS)
            )
    return tuple(found)
