"""What a replica's workers compute, one micro-batch at a time, and what they answer; no state."""

from __future__ import annotations

import msgspec

from flexslurm.messages.base import Message
from flexslurm.messages.requests import SamplingParams, TokenLogprobs


class ChunkSampling(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What the sampler needs for one sequence beyond its logits."""

    params: SamplingParams
    position: int
    """Index of the token to be sampled in the answer: 0 for the first."""
    suppress: tuple[int, ...] = ()
    """Tokens that may not be chosen here (end-of-sequence before `min_tokens`)."""
    prompt: tuple[int, ...] = ()
    """Given only where `params.needs_history`."""
    output: tuple[int, ...] = ()


class Chunk(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The new tokens of one sequence in one micro-batch."""

    seq_id: str
    tokens: tuple[int, ...]
    start: int
    """Position of the first of `tokens` in the sequence."""
    blocks: tuple[int, ...]
    """The sequence's block table: block i holds positions [i*block_tokens, (i+1)*block_tokens)."""
    sample: ChunkSampling | None = None
    """None for a prefill chunk that is not the last."""


class Step(Message, frozen=True, tag="head.step"):
    """One micro-batch, sent to all workers of a replica at once; done in order of `step`."""

    epoch: int
    replica: int
    step: int
    chunks: tuple[Chunk, ...]
    freed: tuple[int, ...] = ()
    """Blocks that hold nothing any more; they may be among this step's own, for another use."""


class FreeBlocks(Message, frozen=True, tag="head.free_blocks"):
    """As `Step.freed`, between steps."""

    epoch: int
    replica: int
    blocks: tuple[int, ...]


class SampledToken(msgspec.Struct, frozen=True, array_like=True):
    """The next token of a sequence, with log probabilities where they are wanted."""

    seq_id: str
    token: int
    logprobs: TokenLogprobs | None = None


class StepDone(Message, frozen=True, tag="worker.step_done"):
    """From tp_rank 0 of the last stage: the tokens of one micro-batch."""

    worker: str
    epoch: int
    replica: int
    step: int
    tokens: tuple[SampledToken, ...]
    compute_s: float = 0.0
    """Time the last stage computed."""


class StepFailed(Message, frozen=True, tag="worker.step_failed"):
    """A step could not be done: a peer is gone, or memory ran out. The epoch is broken."""

    worker: str
    epoch: int
    step: int
    reason: str
