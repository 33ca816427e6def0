"""What the gateway needs of the rest of the head, as a protocol; the head implements it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple, Protocol

import msgspec

from flexslurm.messages import SequenceRequest, ServiceState, TokenEvent


class ServedLimits(msgspec.Struct, frozen=True):
    """What the installed gear can take; None while none is installed."""

    max_context: int | None
    """Tokens of prompt and answer one sequence may reach."""
    model_context: int
    """The most the model itself can take, whatever the gear."""


class Serving(msgspec.Struct, frozen=True):
    """The service at a glance, for /health and /metrics."""

    state: ServiceState
    epoch: int
    running: int
    waiting: int
    kv_used: float
    replicas: int
    gpus: int
    reason: str = ""


class StepTotals(NamedTuple):
    """Steps of all replicas since the head began, for /metrics."""

    steps: int = 0
    computed_s: float = 0.0
    """Seconds that their last stages computed."""
    last_at_s: float = 0.0
    """When the last of them was answered, on a steady clock."""


class Generator(Protocol):
    """Takes sequences in, gives their tokens out; every sequence ends in exactly one `finish`."""

    def submit(self, requests: Sequence[SequenceRequest]) -> AsyncIterator[TokenEvent]:
        """Accept the sequences of one API request, all or none, and iterate over their events.

        Accepting happens in the call itself and raises a RequestError (Overloaded,
        ContextTooLong, NotServing) before anything is yielded. `arrival` is set by the callee.
        Closing the iterator early aborts what still runs and frees its blocks.
        """
        ...

    def abort(self, seq_ids: Sequence[str]) -> None:
        """End these sequences (a stop string was seen); their events stop without `finish`.

        Unknown ids are ignored: the sequence may have ended by itself a moment before.
        """
        ...

    def limits(self) -> ServedLimits: ...

    def serving(self) -> Serving: ...
