"""The KV cache of one stage on one GPU: a pool of pages and the table that finds them; no model.

A page holds keys and values of one KV head of one layer for one block of tokens, the same size
whatever the pipeline and tensor degrees, and is one contiguous run of bytes. So a later change of
degrees moves pages and edits tables; nothing is reshaped.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from flexslurm.engine.arena import Arena


@dataclass(frozen=True, slots=True)
class KvShape:
    """Sizes of a stage's KV cache on one rank."""

    layers: int
    heads: int
    """KV heads of this rank."""
    blocks: int
    block_tokens: int
    head_dim: int

    @property
    def pages(self) -> int:
        return self.layers * self.heads * self.blocks


class KvStore:
    """Pages in an arena, found by `(local layer, local KV head, block)`.

    Invariant: `table` maps to distinct pages of `pool`.
    """

    def __init__(self, shape: KvShape, dtype: torch.dtype, arena: Arena, owner: str) -> None:
        """Take the pool from the arena's high end; raises CapacityError where it does not fit."""
        self.shape = shape
        size = (shape.pages, 2, shape.block_tokens, shape.head_dim)
        self.nbytes = prod(size) * dtype.itemsize
        raw = arena.take_high(owner, self.nbytes, f"the KV pool of {shape.blocks} blocks")
        self.pool = raw.view(dtype).view(size)
        """`[pages, 2 (K, V), block_tokens, head_dim]`."""
        # Block by block: the pages of the blocks in use lie close together, and stay few.
        table = torch.arange(shape.pages, device=arena.device)
        self.table = table.view(shape.blocks, shape.layers, shape.heads).permute(1, 2, 0)
        """`[layers, heads, blocks] -> page`, int64."""
        # Rows of one token: K of page p at offset o is row 2 * p * block_tokens + o.
        self.rows = self.pool.view(-1, shape.head_dim)

    @property
    def page_bytes(self) -> int:
        return self.nbytes // max(self.shape.pages, 1)

    def page_run(self, layer: int, head: int, block: int) -> torch.Tensor:
        """The bytes of one page, as a contiguous uint8 view: what a live move sends or receives."""
        page = int(self.table[layer, head, block])
        return self.pool[page].view(-1).view(torch.uint8)

    def slots(self, blocks: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Rows of K for tokens at `offsets` in `blocks` (both `[T]`): `[layers, heads, T]`.

        The row of V is `block_tokens` further.
        """
        pages = self.table[:, :, blocks]
        return pages * (2 * self.shape.block_tokens) + offsets

    def pages_of(self, blocks: torch.Tensor) -> torch.Tensor:
        """Pages of `blocks` (any shape): `[layers, heads, *blocks.shape]`."""
        return self.table[:, :, blocks]

    def clear(self, blocks: torch.Tensor) -> None:
        """Zero all pages of these blocks.

        Attention reads whole blocks and masks what is beyond a sequence's end, and a mask does not
        stop a NaN: arena memory may hold any bits, and a block the leavings of another sequence.
        """
        if blocks.numel():
            self.pool.index_fill_(0, self.table[:, :, blocks].reshape(-1), 0)

    def write(self, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store one layer's new tokens: `slots` `[heads, T]`, keys and values `[heads, T, D]`."""
        at = slots.reshape(-1)
        self.rows.index_copy_(0, at, keys.reshape(-1, self.shape.head_dim))
        at = at + self.shape.block_tokens
        self.rows.index_copy_(0, at, values.reshape(-1, self.shape.head_dim))

    def gather(self, pages: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy the first `tokens` tokens of runs of pages: `[..., n] -> 2 of [..., tokens, D]`."""
        size = self.shape.block_tokens
        # Copying whole pages is one straight run each; only short contexts gain by a part.
        within = tokens if 2 * tokens < size else size
        halves = self.pool.view(-1, size, self.shape.head_dim).narrow(1, 0, within)
        flat = pages.reshape(-1) * 2
        runs = (*pages.shape[:-1], pages.shape[-1] * within, self.shape.head_dim)
        keys = halves.index_select(0, flat).view(runs)
        values = halves.index_select(0, flat + 1).view(runs)
        return keys.narrow(-2, 0, tokens), values.narrow(-2, 0, tokens)
