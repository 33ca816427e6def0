"""Attention of a ragged batch in one call of torch's variable-length kernel; CUDA only.

Needs flash attention's dtypes and pages of a multiple of 256 tokens; `varlen_fits` says whether a
store qualifies, and `attention` has the general way for those that do not.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch

from flexslurm.engine.batch import Batch
from flexslurm.engine.kv_store import KvStore

varlen: Any
try:
    from torch.nn.attention import varlen
except ImportError:  # before torch 2.10
    varlen = None

_PAGE_TOKENS = 256
_MOST_HEAD_DIM = 256


def varlen_fits(store: KvStore) -> bool:
    """Whether torch's variable-length attention can read this store's pages."""
    shape = store.shape
    return (
        varlen is not None
        and store.pool.is_cuda
        and store.pool.dtype in (torch.bfloat16, torch.float16)
        and shape.block_tokens % _PAGE_TOKENS == 0
        and shape.head_dim % 8 == 0
        and shape.head_dim <= _MOST_HEAD_DIM
    )


class VarlenPlan:
    """The batch as torch's variable-length attention takes it, heads folded into the batch.

    Sequence h * S + s is span s of KV head h: `group` query heads over one KV head, whose block
    table is that head's pages. Flash attention wants pages of a multiple of 256 tokens.
    """

    def __init__(self, store: KvStore, batch: Batch) -> None:
        device, heads, spans = store.pool.device, store.shape.heads, batch.spans
        self.store = store
        width = max(len(span.blocks) for span in spans)
        table = [span.blocks + (span.blocks[0],) * (width - len(span.blocks)) for span in spans]
        pages = store.pages_of(torch.tensor(table, dtype=torch.int64).to(device))
        self.pages = pages.to(torch.int32).reshape(store.shape.layers, heads * len(spans), width)
        total = batch.tokens_count
        starts = [h * total + span.start for h in range(heads) for span in spans]
        self.starts = torch.tensor([*starts, heads * total], dtype=torch.int32).to(device)
        contexts = [span.context for span in spans] * heads
        self.contexts = torch.tensor(contexts, dtype=torch.int32).to(device)
        # Flash attention 2 wants these even where the block table makes them moot.
        self.ends = torch.tensor([0, *accumulate(contexts)], dtype=torch.int32).to(device)
        self.most_new = max(span.new for span in spans)
        self.most_context = max(span.context for span in spans)

    def attend(self, layer: int, q: torch.Tensor, scale: float, window: int) -> torch.Tensor:
        """Queries `[heads, T, D]` of one layer: `[T, heads, D]`."""
        heads, total, size = q.shape
        kv_heads = self.store.shape.heads
        group = heads // kv_heads
        asked = q.view(kv_heads, group, total, size).transpose(1, 2).reshape(-1, group, size)
        found = varlen.varlen_attn(
            asked,
            self.store.pool[:, 0].unsqueeze(2),
            self.store.pool[:, 1].unsqueeze(2),
            self.starts,
            self.ends,
            self.most_new,
            self.most_context,
            scale=scale,
            window_size=(window - 1 if window > 0 else -1, 0),
            enable_gqa=True,
            seqused_k=self.contexts,
            block_table=self.pages[layer],
        )
        assert isinstance(found, torch.Tensor)
        return found.view(kv_heads, total, group, size).transpose(0, 1).reshape(total, heads, size)
