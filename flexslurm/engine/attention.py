"""Attention over the paged KV store, registered with transformers; never sees a whole cache.

transformers calls `paged_attention` in place of its own kernels; the step's plan comes along as
the keyword argument `step`. One KV head with its group of query heads is treated as a sequence of
its own (heads are folded into the batch), so a page belongs to one head and TP degrees only change
how many of these sequences a rank has.

On CUDA, where its conditions hold: one variable-length call over the block table (`varlen`).
Elsewhere: decodes of like length are stacked and go through scaled_dot_product_attention over
gathered pages; a prefill from position 0 attends to the keys just computed; a later chunk gathers
its past.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from flexslurm.engine.batch import Batch, Span
from flexslurm.engine.kv_store import KvStore
from flexslurm.engine.varlen import VarlenPlan, varlen_fits

NAME = "flexslurm_paged"

# Decodes are stacked while the padding stays below this share of the work, or is small.
_PAD_RATIO = 1.5
_PAD_TOKENS = 32


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Single-token spans of like context, stacked and padded to the longest."""

    rows: torch.Tensor
    """`[S]`: their rows in the batch."""
    contexts: torch.Tensor
    """`[S]`"""
    longest: int
    even: bool
    pages: torch.Tensor
    """`[layers, S, heads, blocks]`"""


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """A span of several tokens with a past: its pages `[layers, heads, blocks]`."""

    span: Span
    pages: torch.Tensor


class AttentionStep:
    """What every layer's attention needs of one batch; made once per batch and stage."""

    def __init__(self, store: KvStore, batch: Batch) -> None:
        self.store = store
        store.sync()
        store.clear(batch.opened)
        self.slots = store.slots(batch.blocks, batch.offsets)
        self._masks: dict[tuple[str, int, int], torch.Tensor | None] = {}
        self.device = store.pool.device
        self.varlen = VarlenPlan(store, batch) if varlen_fits(store) else None
        if self.varlen is not None:
            return
        self.fresh = [s for s in batch.spans if s.new > 1 and s.new == s.context]
        self.chunks = [
            ChunkPlan(s, store.pages_of(_index(s.blocks, self.device)))
            for s in batch.spans
            if s.new > 1 and s.new < s.context
        ]
        self.groups = [
            _decode_group(store, spans)
            for spans in group_decodes([s for s in batch.spans if s.new == 1])
        ]

    def decode_mask(self, number: int, window: int) -> torch.Tensor | None:
        """Which keys group `number` may see: `[S, 1, 1, longest]` bool, or None for all of them."""
        key = ("decode", number, window)
        if key not in self._masks:
            group = self.groups[number]
            windowed = 0 < window < group.longest
            self._masks[key] = (
                None
                if group.even and not windowed
                else _visible(group.contexts[:, None] - 1, group.longest, window)[:, None, None]
            )
        return self._masks[key]

    def span_mask(self, span: Span, window: int) -> torch.Tensor:
        """Causal mask of a span with a past or a window: `[new, context]` bool."""
        key = ("span", span.start, window)
        if key not in self._masks:
            asking = torch.arange(span.context - span.new, span.context, device=self.device)
            self._masks[key] = _visible(asking[:, None], span.context, window)
        mask = self._masks[key]
        assert mask is not None
        return mask


def group_decodes(spans: list[Span]) -> list[list[Span]]:
    """Split single-token spans into stacks in which padding wastes little."""
    groups: list[list[Span]] = []
    for span in sorted(spans, key=lambda s: s.context):
        if groups:
            shortest = groups[-1][0].context
            if span.context <= max(shortest * _PAD_RATIO, shortest + _PAD_TOKENS):
                groups[-1].append(span)
                continue
        groups.append([span])
    return groups


def _index(values: tuple[int, ...] | list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64).to(device)


def _visible(asking: torch.Tensor, keys: int, window: int) -> torch.Tensor:
    """Whether the query at position `asking[i, 0]` sees key j: causal, and within the window.

    As transformers has it, a window of w shows the last w positions, the query's own included.
    """
    at = torch.arange(keys, device=asking.device)
    seen = at <= asking
    return seen & (at > asking - window) if window > 0 else seen


def _decode_group(store: KvStore, spans: list[Span]) -> DecodeGroup:
    longest, device = max(span.context for span in spans), store.pool.device
    width = max(len(span.blocks) for span in spans)
    # Padding repeats the first block: any page that exists will do, the mask hides it.
    table = [b for s in spans for b in s.blocks + (s.blocks[0],) * (width - len(s.blocks))]
    pages = store.pages_of(_index(table, device).view(len(spans), width))
    return DecodeGroup(
        rows=_index([span.start for span in spans], device),
        contexts=_index([span.context for span in spans], device),
        longest=longest,
        even=all(span.context == longest for span in spans),
        pages=pages.transpose(1, 2),
    )


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    *,
    step: AttentionStep,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Store the new keys and values, and attend to all of each sequence's.

    `query` `[1, heads, T, D]`, `key` and `value` `[1, kv_heads, T, D]`; returns `[1, T, heads, D]`.
    """
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    assert attention_mask is None, "the batch's spans are the mask"
    store, q, k, v = step.store, query[0], key[0], value[0]
    store.write(step.slots[layer], k, v)
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    window = sliding_window or 0
    if step.varlen is not None:
        return step.varlen.attend(layer, q, scale, window)[None], None
    out = q.new_empty(q.shape[1], q.shape[0], q.shape[2])
    for number, group in enumerate(step.groups):
        mask = step.decode_mask(number, window)
        out[group.rows] = _attend_decodes(store, layer, group, mask, q, scale)
    for span in step.fresh:
        rows = slice(span.start, span.stop)
        mask = step.span_mask(span, window) if 0 < window < span.context else None
        out[rows] = _attend_span(q[:, rows], k[:, rows], v[:, rows], mask, scale)
    for chunk in step.chunks:
        rows = slice(chunk.span.start, chunk.span.stop)
        keys, values = store.gather(chunk.pages[layer], chunk.span.context)
        mask = step.span_mask(chunk.span, window)
        out[rows] = _attend_span(q[:, rows], keys, values, mask, scale)
    return out[None], None


def _attend_decodes(
    store: KvStore, layer: int, group: DecodeGroup, mask: torch.Tensor | None, q: torch.Tensor,
    scale: float,
) -> torch.Tensor:  # fmt: skip
    """One query token of each of S sequences: `[S, heads, D]`.

    The query heads of one KV head are laid out as that many queries of one sequence.
    """
    heads, _, size = q.shape
    count, kv_heads = len(group.rows), store.shape.heads
    keys, values = store.gather(group.pages[layer], group.longest)
    asked = q[:, group.rows].view(kv_heads, heads // kv_heads, count, size).permute(2, 0, 1, 3)
    found = scaled_dot_product_attention(asked, keys, values, attn_mask=mask, scale=scale)
    return found.reshape(count, heads, size)


def _attend_span(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Queries `[heads, n, D]` over keys `[kv_heads, c, D]`: `[n, heads, D]`; no mask is causal."""
    heads, new, size = q.shape
    kv_heads, context, _ = k.shape
    folded = (kv_heads, heads // kv_heads)
    found = scaled_dot_product_attention(
        q.reshape(*folded, new, size),
        k[:, None].expand(*folded, context, size),
        v[:, None].expand(*folded, context, size),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
    )
    return found.reshape(heads, new, size).transpose(0, 1)
