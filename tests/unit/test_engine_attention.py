"""Paged attention over scattered pages equals plain attention over whole sequences."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from flexslurm.engine import varlen
from flexslurm.engine.arena import Arena
from flexslurm.engine.attention import AttentionStep, group_decodes, paged_attention
from flexslurm.engine.batch import Batch, Span
from flexslurm.engine.kv_store import NOWHERE, KvShape, KvStore
from flexslurm.messages import Chunk, ChunkSampling, SamplingParams

SAMPLE = ChunkSampling(params=SamplingParams(), position=0)
LAYERS, KV_HEADS, GROUP, SIZE, BLOCK = 2, 3, 2, 8, 4


@pytest.fixture
def arena() -> Iterator[Arena]:
    one = Arena(8 << 20)
    yield one
    one.close()


def store_of(arena: Arena, blocks: int = 40, block_tokens: int = BLOCK) -> KvStore:
    shape = KvShape(LAYERS, KV_HEADS, blocks, block_tokens, SIZE)
    return KvStore(shape, torch.float64, arena)


def plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, past: int, window: int
) -> torch.Tensor:
    """Attention written out: queries `[heads, n, D]` from position `past`, keys `[kv, c, D]`."""
    out = torch.empty_like(q)
    for head in range(q.shape[0]):
        keys, values = k[head // GROUP], v[head // GROUP]
        for row in range(q.shape[1]):
            at = past + row
            first = max(0, at + 1 - window) if window else 0
            scores = keys[first : at + 1] @ q[head, row] * SIZE**-0.5
            out[head, row] = scores.softmax(0) @ values[first : at + 1]
    return out.transpose(0, 1)


class World:
    """Sequences with known keys and values, fed to the store chunk by chunk."""

    def __init__(self, store: KvStore, lengths: list[int], seed: int) -> None:
        stream = torch.Generator().manual_seed(seed)
        draw = random.Random(seed)
        free = list(range(store.shape.blocks))
        draw.shuffle(free)
        self.store = store
        self.block = store.shape.block_tokens
        self.q, self.k, self.v = (
            [
                torch.randn(LAYERS, heads, length, SIZE, generator=stream, dtype=torch.float64)
                for length in lengths
            ]
            for heads in (KV_HEADS * GROUP, KV_HEADS, KV_HEADS)
        )
        self.blocks = []
        for length in lengths:
            count = -(-length // self.block)
            self.blocks.append(tuple(free[:count]))
            free = free[count:]
        self.done = [0] * len(lengths)

    def feed(self, sizes: dict[int, int], window: int = 0) -> None:
        """Give `sizes[sequence]` new tokens of each sequence, and check every layer's output."""
        chunks = [
            Chunk(
                seq_id=str(s), tokens=(1,) * new, start=self.done[s], blocks=self.blocks[s],
                sample=SAMPLE,
            )
            for s, new in sizes.items()
        ]  # fmt: skip
        batch = Batch.from_chunks(chunks, self.block)
        self.store.prepare(batch.opened_blocks, batch.continued_blocks, batch.read_blocks)
        step = AttentionStep(self.store, batch)
        for layer in range(LAYERS):
            rows = [
                torch.cat(
                    [part[s][layer, :, self.done[s] : self.done[s] + n] for s, n in sizes.items()],
                    dim=1,
                )[None]
                for part in (self.q, self.k, self.v)
            ]
            module = nn.Module()
            module.layer_idx = layer
            found, _ = paged_attention(
                module, *rows, None, sliding_window=window or None, step=step
            )
            at = 0
            for s, new in sizes.items():
                past = self.done[s]
                q = self.q[s][layer, :, past : past + new]
                wanted = plain(q, self.k[s][layer], self.v[s][layer], past, window)
                torch.testing.assert_close(found[0, at : at + new], wanted)
                at += new
        for s, new in sizes.items():
            self.done[s] += new


@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=5),
    block=st.sampled_from([1, 3, 4, 16]),
    window=st.sampled_from([0, 1, 3, 7, 100]),
    seed=st.integers(0, 1000),
)
def test_any_mix_of_chunks_and_decodes(
    lengths: list[int], block: int, window: int, seed: int
) -> None:
    arena = Arena(8 << 20)
    world = World(store_of(arena, 120, block), lengths, seed)
    draw = random.Random(seed)
    while left := [s for s, length in enumerate(lengths) if world.done[s] < length]:
        chosen = draw.sample(left, draw.randint(1, len(left)))
        world.feed(
            {s: draw.choice([1, draw.randint(1, lengths[s] - world.done[s])]) for s in chosen},
            window,
        )
    arena.close()


def test_many_decodes_of_unlike_lengths(arena: Arena) -> None:
    lengths = [2, 3, 40, 41, 90, 5]
    world = World(store_of(arena, 60), lengths, 0)
    for s, length in enumerate(lengths):
        world.feed({s: length - 1})
    world.feed(dict.fromkeys(range(len(lengths)), 1))


def test_old_contents_of_a_page_do_not_show(arena: Arena) -> None:
    store = store_of(arena)
    store.pool.fill_(float("nan"))
    world = World(store, [6, 9, 2], 0)
    world.feed({0: 5, 1: 3})
    world.feed({0: 1, 1: 1, 2: 1})
    world.feed({1: 5, 2: 1})


def test_pages_may_be_anywhere(arena: Arena) -> None:
    """A live move rewrites the table and nothing else."""
    store = store_of(arena)
    order = torch.randperm(len(store.pool), generator=torch.Generator().manual_seed(5))
    world = World(store, [11, 7], 0)
    world.feed({0: 6, 1: 3})
    moved = torch.empty_like(store.pool)
    moved[order] = store.pool.clone()
    store.pool.copy_(moved)
    there = store.cells != NOWHERE
    store.cells[there] = order.numpy()[store.cells[there]]
    world.feed({0: 1, 1: 1})
    world.feed({0: 1})


def test_a_page_is_one_run_of_bytes_that_can_be_sent(arena: Arena) -> None:
    store = store_of(arena)
    assert store.page_bytes == 2 * BLOCK * SIZE * 8
    assert store.pool.is_contiguous()
    world = World(store, [9], 0)
    world.feed({0: 9})
    block = world.blocks[0][1]
    for layer in range(LAYERS):
        for head in range(KV_HEADS):
            page = store.pool[int(store.cells[block, layer, head])]
            assert page.nbytes == store.page_bytes
            assert page.is_contiguous()
            page = page.view(2, BLOCK, SIZE)
            assert torch.equal(page[0], world.k[0][layer, head, BLOCK : 2 * BLOCK])
            assert torch.equal(page[1], world.v[0][layer, head, BLOCK : 2 * BLOCK])
    store.prepare(range(store.shape.blocks), [], [])
    places = product(range(LAYERS), range(KV_HEADS), range(store.shape.blocks))
    pages = {int(store.cells[block, layer, head]) for layer, head, block in places}
    assert len(pages) == store.shape.pages


def test_decodes_are_stacked_where_padding_is_cheap() -> None:
    def spans(*contexts: int) -> list[Span]:
        return [Span(i, i + 1, c, (0,)) for i, c in enumerate(contexts)]

    def sizes(*contexts: int) -> list[list[int]]:
        return [[s.context for s in group] for group in group_decodes(spans(*contexts))]

    assert sizes(10, 30, 20) == [[10, 20, 30]]
    assert sizes(1000, 10) == [[10], [1000]]
    assert sizes(1000, 1400, 1600) == [[1000, 1400], [1600]]
    assert sizes() == []


# ------------------------------------------------------------------- the CUDA way, on paper


def varlen_by_the_book(
    query, key, value, starts, ends, most_new, most_context, *, scale, window_size, enable_gqa,
    seqused_k, block_table,
):  # fmt: skip
    """What torch documents for variable-length attention over a block table, written out."""
    assert enable_gqa
    assert key.shape[2] == 1
    assert starts[-1] == len(query)
    assert len(ends) == len(starts) == len(seqused_k) + 1 == len(block_table) + 1
    assert block_table.dtype == starts.dtype == ends.dtype == seqused_k.dtype == torch.int32
    assert window_size[1] == 0, "causal"
    out = torch.empty_like(query)
    for i, context in enumerate(seqused_k.tolist()):
        first, last = int(starts[i]), int(starts[i + 1])
        assert last - first <= most_new
        assert context <= most_context
        k, v = (x[block_table[i].long()].reshape(-1, x.shape[-1])[:context] for x in (key, value))
        for row in range(first, last):
            at = context - (last - row)
            left = max(0, at - window_size[0]) if window_size[0] >= 0 else 0
            for head in range(query.shape[1]):
                scores = k[left : at + 1] @ query[row, head] * scale
                out[row, head] = scores.softmax(0) @ v[left : at + 1]
    return out


@pytest.mark.parametrize("window", [0, 1, 5])
def test_the_plan_for_torchs_kernel_is_right(
    window: int, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Kernel:
        varlen_attn = staticmethod(varlen_by_the_book)

    monkeypatch.setattr(varlen, "varlen", Kernel)
    monkeypatch.setattr("flexslurm.engine.attention.varlen_fits", lambda store: True)
    world = World(store_of(arena), [11, 7, 20, 1], 3)
    world.feed({0: 4, 2: 9}, window)
    world.feed({2: 1, 1: 3, 0: 1, 3: 1}, window)
    world.feed({0: 6, 1: 1, 2: 10}, window)


def test_the_kernel_is_left_alone_where_it_cannot_be_used(arena: Arena) -> None:
    assert not varlen.varlen_fits(store_of(arena))


def test_torch_still_has_the_kernel_as_we_call_it() -> None:
    import inspect

    from torch.nn.attention.varlen import varlen_attn

    names = inspect.signature(varlen_attn).parameters
    assert list(names)[:7] == [
        "query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k",
    ]  # fmt: skip
    assert {"scale", "window_size", "enable_gqa", "seqused_k", "block_table"} <= set(names)


# ------------------------------------------------------------------- batches


def test_chunks_are_laid_out_one_after_another() -> None:
    chunks = [
        Chunk(seq_id="a", tokens=(7, 8, 9), start=3, blocks=(5, 2, 6), sample=None),
        Chunk(seq_id="b", tokens=(4,), start=8, blocks=(1, 9, 3), sample=SAMPLE),
        Chunk(seq_id="c", tokens=(1, 2), start=0, blocks=(0,), sample=SAMPLE),
    ]
    batch = Batch.from_chunks(chunks, 4)
    assert batch.tokens.tolist() == [7, 8, 9, 4, 1, 2]
    assert batch.positions.tolist() == [3, 4, 5, 8, 0, 1]
    assert batch.blocks.tolist() == [5, 2, 2, 3, 0, 0]
    assert batch.offsets.tolist() == [3, 0, 1, 0, 0, 1]
    assert batch.opened.tolist() == [2, 3, 0]
    assert batch.spans == (
        Span(0, 3, 6, (5, 2)), Span(3, 4, 9, (1, 9, 3)), Span(4, 6, 2, (0,))
    )  # fmt: skip
    assert batch.sample_rows.tolist() == [3, 5]
    assert [name for name, _ in batch.sampled] == ["b", "c"]
    assert batch.tokens_count == 6


def test_a_chunk_without_room_is_our_bug() -> None:
    with pytest.raises(AssertionError, match="2 blocks are needed"):
        Batch.from_chunks([Chunk(seq_id="a", tokens=(1,), start=4, blocks=(0,))], 4)
    with pytest.raises(AssertionError, match="without tokens"):
        Batch.from_chunks([Chunk(seq_id="a", tokens=(), start=4, blocks=(0, 1))], 4)
