"""One sequence as the scheduler sees it, with the table of its states; never decides anything.

The life of a sequence in one driver
------------------------------------
A sequence starts out *waiting*: it owns no blocks. When it is admitted it gets the blocks for all
the tokens it has, and is *prefilling*: its tokens go through the model in chunks, over as many
micro-batches as the token budget needs. The chunk with the last of them also samples, and from then
on it is *decoding*: one token in, one token out, one new block now and then.

When the pool has no block left, a decoding sequence may take those of one that arrived later. The
loser is *evicted*: it owns no blocks, keeps its tokens, and waits to be admitted again, ahead of
everything that arrived after it. Being admitted again is prefilling over prompt and answer so far;
the token sampled at its end is the next one, never one that was already given out.

A sequence that comes from another replica with its KV is *adopted*: it is prefilling, or decoding
at once, without having been computed here.

`finished` is the end, reached from everywhere: by the stop rules or by an abort. Nothing leaves it.

Being in flight is not a state but a mark (`step`): the sequence is part of a micro-batch that the
workers have not answered. While it is, it is neither evicted nor scheduled again, and its blocks
are not given out, even if it was aborted meanwhile.
"""

from __future__ import annotations

from collections import deque
from enum import StrEnum

from flexslurm.messages import ChunkSampling, FinishReason, SequenceRequest


class SequenceState(StrEnum):
    """Where a sequence is; what may follow is in TRANSITIONS."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    EVICTED = "evicted"
    FINISHED = "finished"


_S = SequenceState
TRANSITIONS: dict[SequenceState, frozenset[SequenceState]] = {
    _S.WAITING: frozenset({_S.PREFILLING, _S.FINISHED}),
    _S.PREFILLING: frozenset({_S.DECODING, _S.EVICTED, _S.FINISHED}),
    _S.DECODING: frozenset({_S.EVICTED, _S.FINISHED}),
    _S.EVICTED: frozenset({_S.PREFILLING, _S.FINISHED}),
    _S.FINISHED: frozenset(),
}

QUEUED = frozenset({_S.WAITING, _S.EVICTED})
RUNNING = frozenset({_S.PREFILLING, _S.DECODING})
_STORY_LENGTH = 8


class IllegalTransition(AssertionError):
    """A sequence was moved between states in a way the table does not have: a bug of ours."""


class Sequence:
    """A request with the tokens it has so far and how far they are computed.

    Invariants: `computed <= len(prompt) + len(output)`; a queued sequence has `computed == 0`; a
    decoding one that is not in flight has exactly one token that is not computed.
    """

    __slots__ = (
        "_story",
        "computed",
        "needs_history",
        "output",
        "prompt",
        "rank",
        "request",
        "seq_id",
        "state",
        "step",
        "stop_ids",
        "tenure",
    )

    def __init__(self, request: SequenceRequest, output: tuple[int, ...] = ()) -> None:
        self.request = request
        self.seq_id = request.seq_id
        self.prompt = request.prompt
        self.output = list(output)
        self.rank = (request.arrival, request.seq_id)
        """Older is smaller; total even where arrivals are equal."""
        self.stop_ids = frozenset(request.stop.stop_token_ids)
        self.needs_history = request.sampling.needs_history
        self.state = SequenceState.WAITING
        self.computed = 0
        """Positions whose KV is in the cache."""
        self.step: int | None = None
        """The micro-batch in flight that it is part of."""
        self.tenure = 0
        """How often it was given blocks anew."""
        self._story: deque[SequenceState] = deque((self.state,), maxlen=_STORY_LENGTH)

    @property
    def length(self) -> int:
        """Tokens it has: prompt and answer so far."""
        return len(self.prompt) + len(self.output)

    def tokens(self, start: int, end: int) -> tuple[int, ...]:
        """Its tokens at positions `[start, end)`; copies no more than these."""
        prompt_length = len(self.prompt)
        if end <= prompt_length:
            return self.prompt[start:end]
        answer = tuple(self.output[max(start - prompt_length, 0) : end - prompt_length])
        return answer if start >= prompt_length else self.prompt[start:] + answer

    def sampling(self) -> ChunkSampling:
        """What the sampler needs for the next token of the answer."""
        position, rules = len(self.output), self.request.stop
        return ChunkSampling(
            params=self.request.sampling,
            position=position,
            suppress=rules.stop_token_ids if position < rules.min_tokens else (),
            prompt=self.prompt if self.needs_history else (),
            output=tuple(self.output) if self.needs_history else (),
        )

    def append(self, token: int) -> FinishReason | None:
        """Take the next token of the answer; returns whether and why it is the last."""
        self.output.append(token)
        count, rules = len(self.output), self.request.stop
        if token in self.stop_ids and count > rules.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if count >= rules.max_tokens else None

    def move(self, to: SequenceState) -> None:
        """Go to another state; raises IllegalTransition with the sequence's story."""
        if to not in TRANSITIONS[self.state]:
            story = " → ".join(self._story)
            raise IllegalTransition(
                f"sequence {self.seq_id} cannot go from {self.state} to {to} ({story}); it has "
                f"{len(self.output)} tokens of answer, {self.computed} of {self.length} computed, "
                + ("not in flight" if self.step is None else f"in flight in step {self.step}")
            )
        self.state = to
        self._story.append(to)

    def __repr__(self) -> str:
        return f"<Sequence {self.seq_id} {self.state} {self.computed}/{self.length}>"
