"""What a model costs, from its configuration alone: weights, FLOPs and KV; never opens a file.

A model is a run of decoder layers between an embedding and a head. Each layer is a tuple of
weights, and each weight says how DeepSpeed's automatic tensor parallelism cuts it, so the bytes of
a stage on one rank are those the engine takes, uneven cuts and alignment included.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from flexslurm.errors import ModelError

DTYPE_BYTES: Mapping[str, int] = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8": 1,
}
ALIGNMENT_BYTES = 256
"""The engine's arena starts every tensor on this, so each tensor's bytes are rounded up to it."""


GRAIN = 64
"""What is not cut by heads is cut at multiples of this, which the GPUs' matrix units want."""


class TpSplit(StrEnum):
    """How tensor parallelism cuts a weight; KV means in proportion to the rank's KV heads."""

    WHOLE = "whole"
    KV_ROWS = "kv_rows"
    KV_COLS = "kv_cols"
    EVEN_ROWS = "even_rows"
    EVEN_COLS = "even_cols"


class Weight(msgspec.Struct, frozen=True):
    """One matrix (`rows` out, `cols` in) or vector (`cols` 1), or several alike."""

    name: str
    rows: int
    cols: int
    split: TpSplit = TpSplit.WHOLE
    bias: bool = False
    """A bias of `rows` numbers; cut with the rows, whole where the columns are cut."""
    copies: int = 1
    """Equal ones side by side: the experts of a layer."""
    active: int = 1
    """Of `copies`, how many one token uses."""
    looked_up: bool = False
    """An embedding table: read by row, never multiplied."""

    @property
    def params(self) -> int:
        return (self.rows * self.cols + (self.rows if self.bias else 0)) * self.copies

    @property
    def multiplied(self) -> int:
        """Multiply-adds for one token."""
        return 0 if self.looked_up or self.cols == 1 else self.rows * self.cols * self.active

    def shard(self, kv_heads: int, tp: int, tp_rank: int) -> tuple[int, int]:
        """Rows and columns that one rank holds."""
        match self.split:
            case TpSplit.KV_ROWS:
                return kv_shard(self.rows, kv_heads, tp)[tp_rank], self.cols
            case TpSplit.KV_COLS:
                return self.rows, kv_shard(self.cols, kv_heads, tp)[tp_rank]
            case TpSplit.EVEN_ROWS:
                return grained_shard(self.rows, tp)[tp_rank], self.cols
            case TpSplit.EVEN_COLS:
                return self.rows, grained_shard(self.cols, tp)[tp_rank]
            case _:
                return self.rows, self.cols

    def shard_params(self, kv_heads: int, tp: int, tp_rank: int) -> int:
        rows, cols = self.shard(kv_heads, tp, tp_rank)
        return (rows * cols + (rows if self.bias else 0)) * self.copies

    def shard_multiplied(self, kv_heads: int, tp: int, tp_rank: int) -> int:
        if self.multiplied == 0:
            return 0
        rows, cols = self.shard(kv_heads, tp, tp_rank)
        return rows * cols * self.active


def kv_heads_of_ranks(kv_heads: int, tp: int) -> tuple[int, ...]:
    """KV heads of each rank: as even as whole heads allow, the first ranks hold the odd ones."""
    return even_shard(kv_heads, tp)


def kv_shard(total: int, kv_heads: int, tp: int) -> tuple[int, ...]:
    """Sizes of `total` cut in proportion to KV heads; evenly where heads do not divide it."""
    if total % kv_heads:
        return grained_shard(total, tp)
    return tuple(total * heads // kv_heads for heads in kv_heads_of_ranks(kv_heads, tp))


def even_shard(total: int, tp: int) -> tuple[int, ...]:
    """Sizes as even as whole numbers allow, the first ranks one more."""
    return tuple(total // tp + (rank < total % tp) for rank in range(tp))


def grained_shard(total: int, tp: int) -> tuple[int, ...]:
    """Sizes in whole grains as DeepSpeed cuts what has no heads, the last rank taking the rest."""
    if total < GRAIN:
        return even_shard(total, tp)
    sizes = [grains * GRAIN for grains in even_shard(total // GRAIN, tp)]
    sizes[-1] += total % GRAIN
    return tuple(sizes)


class LayerKind(msgspec.Struct, frozen=True):
    """One kind of decoder layer: `dense` or `moe`."""

    name: str
    weights: tuple[Weight, ...]


class ModelSpec(msgspec.Struct, frozen=True):
    """A decoder model as the planner sees it; built by `ModelSpec.from_config`."""

    name: str
    family: str
    dtype: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    """Of K and V; for multi-head latent attention the numbers stored per token."""
    attention_dim: int
    """Query numbers of a layer over all heads, for the arithmetic of attention."""
    vocab: int
    max_context: int
    tied: bool
    kinds: tuple[LayerKind, ...]
    layer_kinds: tuple[int, ...]
    """For each layer its index into `kinds`."""
    first: tuple[Weight, ...]
    """Held by the first stage: embeddings."""
    last: tuple[Weight, ...]
    """Held by the last stage: final norm and head. Of a tied head this is the second copy."""
    latent: bool = False
    """Multi-head latent attention: one shared KV entry of `head_dim` numbers, on every rank."""
    other_dtype: str | None = None
    """Of embeddings, norms and the head, where it differs (fp8 checkpoints keep them in bf16)."""
    kv_dtype: str | None = None
    """Of the KV cache; default: the weights' (for fp8 weights, `other_dtype`)."""

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, object],
        dtype: str = "bfloat16",
        *,
        kv_dtype: str | None = None,
        name: str | None = None,
    ) -> ModelSpec:
        """Read the parsed `config.json` of a checkpoint.

        Raises ModelError where the architecture is unknown or a figure is missing or impossible.
        """
        from flexslurm.planner.families import read_config

        return read_config(config, dtype, kv_dtype, name)

    # ----------------------------------------------------------------------------- whole model

    @property
    def num_layers(self) -> int:
        return len(self.layer_kinds)

    @property
    def params(self) -> int:
        """Parameters as published: a tied head is counted once."""
        outside = sum(w.params for w in (*self.first, *self.last))
        if self.tied:
            outside -= sum(w.params for w in self.last if w.name == "lm_head")
        return outside + sum(w.params for kind in self.layers() for w in kind.weights)

    def layers(self) -> tuple[LayerKind, ...]:
        return tuple(self.kinds[index] for index in self.layer_kinds)

    def weight_bytes(self) -> int:
        """Bytes of all weights in the serving dtype, tensors aligned; a tied head counts once."""
        last = sum(self._bytes(w, 1, 0) for w in self.last)
        if self.tied:
            last -= sum(self._bytes(w, 1, 0) for w in self.last if w.name == "lm_head")
        first = sum(self._bytes(w, 1, 0) for w in self.first)
        return first + last + sum(self.layer_bytes(i) for i in range(self.num_layers))

    # --------------------------------------------------------------------------- layers, stages

    def layer_bytes(self, layer: int, tp: int = 1, tp_rank: int = 0) -> int:
        """Weight bytes of one layer on one rank."""
        kind = self.kinds[self.layer_kinds[layer]]
        return sum(self._bytes(w, tp, tp_rank) for w in kind.weights)

    def stage_weight_bytes(self, lo: int, hi: int, tp: int = 1, tp_rank: int = 0) -> int:
        """Weight bytes of the stage `[lo, hi)` on one rank: what the engine's arena holds."""
        total = sum(self.layer_bytes(layer, tp, tp_rank) for layer in range(lo, hi))
        if lo == 0:
            total += self.first_bytes(tp, tp_rank)
        if hi == self.num_layers:
            total += self.last_bytes(tp, tp_rank, alone=lo == 0)
        return total

    def first_bytes(self, tp: int = 1, tp_rank: int = 0) -> int:
        return sum(self._bytes(w, tp, tp_rank) for w in self.first)

    def last_bytes(self, tp: int = 1, tp_rank: int = 0, *, alone: bool = False) -> int:
        """Final norm and head; `alone`: the stage holds the embedding too.

        A tied head on the stage of the embedding is a view of it, over several ranks too, since
        each holds the whole embedding.
        """
        shared = alone and self.tied
        return sum(
            self._bytes(w, tp, tp_rank) for w in self.last if not (shared and w.name == "lm_head")
        )

    def kv_heads_on(self, tp: int, tp_rank: int) -> int:
        """KV heads one rank stores; latent KV is on every rank."""
        return 1 if self.latent else kv_heads_of_ranks(self.kv_heads, tp)[tp_rank]

    @property
    def kv_item_bytes(self) -> int:
        return DTYPE_BYTES[self.kv_dtype or self.other_dtype or self.dtype]

    @property
    def activation_bytes(self) -> int:
        """What one token is between two stages."""
        return self.hidden * DTYPE_BYTES[self.other_dtype or self.dtype]

    @property
    def page_numbers(self) -> int:
        """Numbers of one KV head of one layer for one token: K and V, or the latent entry."""
        return self.head_dim if self.latent else 2 * self.head_dim

    def page_bytes(self, block_tokens: int) -> int:
        """One page: one KV head of one layer for one block of tokens."""
        return self.page_numbers * self.kv_item_bytes * block_tokens

    def kv_bytes_per_token_layer(self, tp: int = 1, tp_rank: int = 0) -> int:
        return self.kv_heads_on(tp, tp_rank) * self.page_numbers * self.kv_item_bytes

    def kv_bytes_per_token(self) -> int:
        """KV bytes of one token over all layers, on one GPU."""
        return self.num_layers * self.kv_bytes_per_token_layer()

    def layer_multiplied(self, layer: int, tp: int = 1, tp_rank: int = 0) -> int:
        """Multiply-adds of one token in one layer's weights; FLOPs are twice that."""
        kind = self.kinds[self.layer_kinds[layer]]
        return sum(w.shard_multiplied(self.kv_heads, tp, tp_rank) for w in kind.weights)

    def last_multiplied(self, tp: int = 1, tp_rank: int = 0) -> int:
        return sum(w.shard_multiplied(self.kv_heads, tp, tp_rank) for w in self.last)

    def max_tp(self) -> int:
        """Most ranks of a group: each holds at least one KV head (latent: one query head)."""
        return self.heads if self.latent else self.kv_heads

    def _bytes(self, weight: Weight, tp: int, tp_rank: int) -> int:
        matrix = weight.cols > 1 and not weight.looked_up and weight.name not in _KEPT
        dtype = self.dtype if matrix or self.other_dtype is None else self.other_dtype
        rows, cols = weight.shard(self.kv_heads, tp, tp_rank)
        size = DTYPE_BYTES[dtype]
        bias = aligned(weight.copies * rows * size) if weight.bias else 0
        return aligned(weight.copies * rows * cols * size) + bias


_KEPT = frozenset({"lm_head", "mlp.gate"})
"""Matrices that fp8 checkpoints keep in the wider type."""


def aligned(size_bytes: int) -> int:
    """Rounded up to the arena's alignment."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def item_bytes(dtype: str) -> int:
    """Bytes of one number; raises ModelError for a dtype that is not served."""
    if dtype not in DTYPE_BYTES:
        raise ModelError(f"unknown dtype '{dtype}'", hint=f"legal: {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]
