"""What the ledger tells about the life of sequences, for metrics; the default does nothing."""

from __future__ import annotations

from typing import Protocol

import msgspec

from flexslurm.errors import RequestError
from flexslurm.messages import FinishReason, SequenceRequest


class SequenceSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence that ended. Times are in seconds since it was accepted."""

    seq_id: str
    reason: FinishReason
    prompt_tokens: int
    output_tokens: int
    e2e_s: float
    ttft_s: float | None
    """None if it ended without a token."""
    longest_gap_s: float
    """Between two of its tokens."""
    moves: int
    """How often it was taken from a driver that ended and given to another."""

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first: (E2E - TTFT) / (n - 1)."""
        if self.ttft_s is None or self.output_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1)


class Observer(Protocol):
    """Is told of what happens to sequences; must not block, raise, or call the ledger."""

    def accepted(self, request: SequenceRequest) -> None: ...

    def refused(self, error: RequestError) -> None: ...

    def first_token(self, ttft_s: float) -> None: ...

    def next_token(self, gap_s: float) -> None: ...

    def ended(self, summary: SequenceSummary) -> None: ...


class SilentObserver:
    """The Observer that does nothing."""

    def accepted(self, request: SequenceRequest) -> None:
        pass

    def refused(self, error: RequestError) -> None:
        pass

    def first_token(self, ttft_s: float) -> None:
        pass

    def next_token(self, gap_s: float) -> None:
        pass

    def ended(self, summary: SequenceSummary) -> None:
        pass
