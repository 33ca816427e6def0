"""The values that a scheduler and its driver give out; never rules, only values."""

from __future__ import annotations

import msgspec

from flexslurm.messages import Chunk, SequenceRequest


class MicroBatch(msgspec.Struct, frozen=True):
    """What one step computes; `step` rises by one from one micro-batch to the next."""

    step: int
    chunks: tuple[Chunk, ...]
    decode_tokens: int
    prefill_tokens: int
    freed: tuple[int, ...] = ()
    """Blocks that hold nothing any more, as `messages.Step.freed`."""


class RunningKv(msgspec.Struct, frozen=True):
    """A sequence that owns blocks, and how much of it they hold."""

    seq_id: str
    blocks: tuple[int, ...]
    """In the order of positions."""
    computed: int
    """Positions whose KV is there."""
    arrival: int
    most_tokens: int
    """Tokens of prompt and answer that it may reach."""
    tenure: int
    """Rises when it gets other blocks: what was read before belongs to no one."""


class LiveSequence(msgspec.Struct, frozen=True):
    """A sequence that has not ended, and the tokens of its answer that were given out."""

    request: SequenceRequest
    output: tuple[int, ...] = ()
    in_step: bool = False
    """A step that it takes part in is not answered."""


class SchedulerLoad(msgspec.Struct, frozen=True, kw_only=True):
    """How busy a replica is; counters are since its scheduler began."""

    running: int
    """Sequences that own blocks."""
    waiting: int
    in_flight: int
    """Micro-batches sent and not answered."""
    blocks: int
    used_blocks: int
    free_blocks: int
    """Blocks that may be given out: fewer than are not used while a limit holds."""
    queued_blocks: int
    """Blocks that the waiting sequences will want when they are admitted."""
    block_tokens: int
    max_batch: int
    max_context: int
    """Tokens of prompt and answer that fit: the replica's limit or the pool's."""
    steps: int
    evictions: int
    prefill_tokens: int
    """Tokens computed as prefill, recomputed ones included."""
    decode_tokens: int

    @property
    def kv_used(self) -> float:
        """Share of the pool in use, 0 to 1."""
        return self.used_blocks / self.blocks if self.blocks else 0.0
