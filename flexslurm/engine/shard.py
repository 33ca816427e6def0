"""What one tensor-parallel rank of a stage owns, read off DeepSpeed's layers; reads no weights.

A shard knows itself: loading, memory figures, the moves of a shift and tests all ask the spec.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from torch import nn

from flexslurm.engine.checkpoint import stored_names
from flexslurm.engine.families import ModelInfo
from flexslurm.engine.layout import TensorLayout
from flexslurm.engine.ownership import Piece
from flexslurm.planner.model_spec import aligned


@dataclass(frozen=True, slots=True)
class Part:
    """One parameter of a stage, and which range of the whole tensor each rank has.

    Row-parallel weights (`transposed`) lie in memory as `[in, out]`, so that the range along dim 1
    of the tensor is a contiguous range of bytes like every other.
    """

    param: str
    """Name in the stage's module: `layers.0.self_attn.q_proj.weight`, layers counted from 0."""
    layer: int | None
    """Number of the layer in the whole model, or None."""
    name: str
    """Name below the layer, or of the edge tensor."""
    shape: tuple[int, ...]
    """Of the whole tensor, as in the checkpoint."""
    dim: int | None = None
    """The dim that ranks share; None: every rank has all."""
    sizes: tuple[int, ...] = ()
    """Along `dim`, by rank."""
    transposed: bool = False
    view_of: str | None = None
    """The parameter whose bytes this one uses: a tied head on the stage with the embedding."""

    def range(self, tp_rank: int) -> tuple[int, int]:
        """`[start, stop)` along `dim`; along dim 0 for a tensor that is not shared."""
        if self.dim is None:
            return 0, self.shape[0]
        start = sum(self.sizes[:tp_rank])
        return start, start + self.sizes[tp_rank]

    def local_shape(self, tp_rank: int) -> tuple[int, ...]:
        if self.dim is None:
            return self.shape
        return (*self.shape[: self.dim], self.sizes[tp_rank], *self.shape[self.dim + 1 :])

    def stored_shape(self, tp_rank: int) -> tuple[int, ...]:
        """The shape of the bytes in the arena."""
        shape = self.local_shape(tp_rank)
        return shape[::-1] if self.transposed else shape

    def nbytes(self, tp_rank: int, item_bytes: int) -> int:
        """Bytes it takes of the arena before alignment; 0 for a view."""
        return 0 if self.view_of is not None else prod(self.local_shape(tp_rank)) * item_bytes

    def piece(self, tp_rank: int, info: ModelInfo, item_bytes: int) -> Piece:
        """What a rank has of the checkpoint's tensor, as one run of bytes."""
        dim = 1 if self.transposed else 0
        lo, hi = (0, self.shape[dim]) if self.dim is None else self.range(tp_rank)
        return Piece(
            tensor=stored_names(info, self.name, self.layer)[0],
            dim=dim,
            lo=lo,
            hi=hi,
            size=self.shape[dim],
            unit_bytes=prod(self.shape) // self.shape[dim] * item_bytes,
        )

    @property
    def layout(self) -> TensorLayout:
        return TensorLayout(self.name, self.shape)


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """All parts of one rank of a stage with the layers `[lo, hi)`."""

    lo: int
    hi: int
    tp: int
    tp_rank: int
    parts: tuple[Part, ...]

    def weights_bytes(self, item_bytes: int) -> int:
        """What the parts take of an arena, alignment included."""
        return sum(aligned(part.nbytes(self.tp_rank, item_bytes)) for part in self.parts)

    def kv_heads(self, head_dim: int) -> tuple[int, int]:
        """This rank's KV heads `[first, last)` among the model's: whose pages its pool holds.

        Read off the rows of a key projection, or of a fused query-key-value one.
        """
        for part in self.parts:
            rows_per_head = _ROWS_PER_HEAD.get(part.name)
            if rows_per_head is not None:
                start, stop = part.range(self.tp_rank)
                return start // (rows_per_head * head_dim), stop // (rows_per_head * head_dim)
        raise AssertionError("a stage has at least one layer")


_ROWS_PER_HEAD = {"self_attn.k_proj.weight": 1, "attention.query_key_value.weight": 3}
"""By the weight whose rows tell a rank's KV heads: how many times the head size each head has."""


def read_spec(
    stage: nn.Module, lo: int, hi: int, tp: int, tp_rank: int, row_parallel: frozenset[str]
) -> ShardSpec:
    """Ask each parameter of a stage that DeepSpeed has gone over how it is cut.

    `row_parallel`: names below the layer of the linears DeepSpeed makes row-parallel; with one rank
    it replaces nothing, yet these are stored transposed all the same.
    """
    parts = []
    for path, module in stage.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            param = f"{path}.{name}"
            layer, below = _layer_of(param, lo)
            dim, sizes, whole = _cut(module, name, tuple(parameter.shape))
            by_columns = name == "weight" and (
                dim == 1 or (layer is not None and below.removesuffix(".weight") in row_parallel)
            )
            by_columns = by_columns or below == "lm_head.weight"
            parts.append(Part(param, layer, below, whole, dim, sizes, by_columns))
    return ShardSpec(lo, hi, tp, tp_rank, tuple(parts))


def _layer_of(param: str, lo: int) -> tuple[int | None, str]:
    if not param.startswith("layers."):
        return None, param
    _, number, below = param.split(".", 2)
    return lo + int(number), below


def _cut(
    module: nn.Module, name: str, local: tuple[int, ...]
) -> tuple[int | None, tuple[int, ...], tuple[int, ...]]:
    """`(dim, sizes by rank, whole shape)` of one parameter, from DeepSpeed's own record of it."""
    from deepspeed.module_inject.layers import LinearAllreduce, LinearLayer

    if isinstance(module, LinearAllreduce):
        if name != "weight":
            return None, (), local
        sizes = tuple(int(n) for n in module._partition_sizes)
        return 1, sizes, (local[0], sum(sizes))
    if isinstance(module, LinearLayer):
        sizes = tuple(int(n) for n in module._partition_sizes)
        return 0, sizes, (sum(sizes), *local[1:])
    return None, (), local


def tie_head(spec: ShardSpec) -> ShardSpec:
    """The spec of a stage that has both a tied head and its embedding: the head takes no bytes."""

    def tied(parts: tuple[Part, ...]) -> Iterator[Part]:
        for part in parts:
            if part.name == "lm_head.weight":
                yield Part(
                    part.param, None, part.name, part.shape, part.dim, part.sizes,
                    transposed=False, view_of="embed.weight",
                )  # fmt: skip
            else:
                yield part

    return ShardSpec(spec.lo, spec.hi, spec.tp, spec.tp_rank, tuple(tied(spec.parts)))
