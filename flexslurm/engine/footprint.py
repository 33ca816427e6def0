"""Exact bytes a stage takes from its arena, computed without torch; allocates nothing.

Weights are what `layout` lists, each tensor rounded up to the arena's alignment. KV is one page
per layer, KV head and block. Both equal, to the byte, what `build_stage` takes.
"""

from __future__ import annotations

from math import prod

from flexslurm.engine.families import DTYPE_BYTES, ModelInfo
from flexslurm.engine.layout import edge_tensors, layer_tensors, share
from flexslurm.planner.model_spec import aligned


def stage_bytes(info: ModelInfo, lo: int, hi: int, tp: int, tp_rank: int, dtype: str) -> int:
    """Bytes of weights of one rank of a stage with the layers `[lo, hi)`."""
    item = DTYPE_BYTES[dtype]

    def size(shape: tuple[int, ...]) -> int:
        return aligned(prod(shape) * item)

    heads = info.num_kv_heads
    layer = sum(size(t.local_shape(heads, tp, tp_rank)) for t in layer_tensors(info))
    edges = edge_tensors(info, lo == 0, hi == info.num_layers)
    return (hi - lo) * layer + sum(size(t.local_shape(heads, tp, tp_rank)) for t in edges)


def page_bytes(info: ModelInfo, dtype: str, block_tokens: int) -> int:
    """Bytes of one page: keys and values of one KV head of one layer for one block."""
    return 2 * block_tokens * info.head_dim * DTYPE_BYTES[dtype]


def block_bytes(
    info: ModelInfo, lo: int, hi: int, tp: int, tp_rank: int, dtype: str, block_tokens: int
) -> int:
    """Bytes that one more block of KV takes on one rank of a stage."""
    pages = (hi - lo) * share(info.num_kv_heads, tp, tp_rank)
    return pages * page_bytes(info, dtype, block_tokens)


def kv_bytes(
    info: ModelInfo, lo: int, hi: int, tp: int, tp_rank: int, dtype: str, block_tokens: int,
    kv_blocks: int,
) -> int:  # fmt: skip
    """Bytes of the whole pool of one rank, alignment included."""
    return aligned(kv_blocks * block_bytes(info, lo, hi, tp, tp_rank, dtype, block_tokens))
