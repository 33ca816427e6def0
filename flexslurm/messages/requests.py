"""What is to be generated and the tokens of it, between gateway and driver; nothing of how."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """How the tokens of one sequence are chosen; the defaults are greedy."""

    temperature: float = 0.0
    """0 is greedy."""
    top_k: int = 0
    """0 is off."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    seed: int = 0
    """With the position, all that a token's random number depends on."""
    logprobs: int = -1
    """-1: none; n: the chosen token's log probability and the n best."""

    @property
    def needs_history(self) -> bool:
        """Whether the sampler must know the tokens so far."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


class StopRules(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """When a sequence ends by its tokens; stop strings are the gateway's."""

    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    """End-of-sequence tokens included, unless the request ignores them."""


class SequenceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate; a request with n choices is n of these."""

    seq_id: str
    """`REQUEST_ID/CHOICE`; unique in the life of the service."""
    prompt: tuple[int, ...]
    sampling: SamplingParams
    stop: StopRules
    arrival: int = 0
    """Order of acceptance: older first, everywhere. Given by the head."""


class FinishReason(StrEnum):
    """How a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log probabilities at one position: the chosen token's, and the best `(token, logprob)`."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class TokenEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One token of a sequence, or its end, or both; the last event has `finish`."""

    seq_id: str
    token: int | None
    position: int
    """0 for the first generated token: strictly rising by one, whatever happens below."""
    logprobs: TokenLogprobs | None = None
    finish: FinishReason | None = None
    error: str | None = None
    code: str | None = None
    """With `error`: the `code` of the RequestError it stands for, such as `no_capacity`."""
