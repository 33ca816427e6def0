"""A ragged batch: all sequences' new tokens in one row, and where they go; no model, no arithmetic.

Every stage of a replica builds the same batch from the same step message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flexslurm.messages import Chunk, ChunkSampling


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence's rows in the batch, `[start, stop)`, and what they may look at."""

    start: int
    stop: int
    context: int
    """Tokens of the sequence up to and with the span's last."""
    blocks: tuple[int, ...]
    """The blocks that hold `context` tokens."""

    @property
    def new(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch, the same for all layers and ranks. T: new tokens, S: sampled rows."""

    tokens: torch.Tensor
    """`[T]` int64 token ids."""
    positions: torch.Tensor
    """`[T]` int64 positions in the sequences."""
    blocks: torch.Tensor
    """`[T]` int64: the block each new token is written to."""
    offsets: torch.Tensor
    """`[T]` int64: and its place in the block."""
    opened: torch.Tensor
    """Blocks that get their first token: what is in them is somebody else's and is cleared."""
    opened_blocks: tuple[int, ...]
    """The same, for the host."""
    continued_blocks: tuple[int, ...]
    """Blocks that hold some tokens of their sequence and get more."""
    read_blocks: tuple[int, ...]
    """Blocks that hold tokens already; `continued_blocks` among them."""
    spans: tuple[Span, ...]
    sample_rows: torch.Tensor
    """`[S]` int64: rows whose logits are wanted."""
    sampled: tuple[tuple[str, ChunkSampling], ...]
    """`(seq_id, sampling)` in the order of `sample_rows`."""

    @property
    def tokens_count(self) -> int:
        return self.tokens.shape[0]

    @classmethod
    def from_chunks(
        cls, chunks: Sequence[Chunk], block_tokens: int, device: torch.device | str = "cpu"
    ) -> Batch:
        """Lay the chunks out one after another.

        A chunk needs tokens and enough blocks for them: the scheduler's promise, so asserted.
        """
        assert chunks, "a batch has at least one chunk"
        tokens: list[int] = []
        positions: list[int] = []
        spans: list[Span] = []
        rows: list[int] = []
        sampled: list[tuple[str, ChunkSampling]] = []
        written: list[int] = []
        opened: list[int] = []
        continued: list[int] = []
        read: list[int] = []
        for chunk in chunks:
            start, context = len(tokens), chunk.start + len(chunk.tokens)
            needed = -(-context // block_tokens)
            assert chunk.tokens, f"{chunk.seq_id}: a chunk without tokens"
            assert len(chunk.blocks) >= needed, f"{chunk.seq_id}: {needed} blocks are needed"
            tokens += chunk.tokens
            positions += range(chunk.start, context)
            written += (chunk.blocks[at // block_tokens] for at in range(chunk.start, context))
            first = -(-chunk.start // block_tokens)
            opened += chunk.blocks[first:needed]
            read += chunk.blocks[:first]
            if chunk.start % block_tokens:
                continued.append(chunk.blocks[first - 1])
            spans.append(Span(start, len(tokens), context, chunk.blocks[:needed]))
            if chunk.sample is not None:
                rows.append(len(tokens) - 1)
                sampled.append((chunk.seq_id, chunk.sample))
        table = torch.tensor([tokens, positions, written], dtype=torch.int64).to(device)
        return cls(
            tokens=table[0],
            positions=table[1],
            blocks=table[2],
            offsets=table[1] % block_tokens,
            opened=torch.tensor(opened, dtype=torch.int64).to(device),
            opened_blocks=tuple(opened),
            continued_blocks=tuple(continued),
            read_blocks=tuple(read),
            spans=tuple(spans),
            sample_rows=torch.tensor(rows, dtype=torch.int64).to(device),
            sampled=tuple(sampled),
        )
