"""The key-value store through which groups of workers find each other; never data."""

from __future__ import annotations

from flexslurm.messages.base import Message


class RendezvousSet(Message, frozen=True, tag="rdv.set"):
    """Publish a value under a key of an epoch's store; keys are `EPOCH/GROUP/…`."""

    epoch: int
    key: str
    value: bytes


class RendezvousGet(Message, frozen=True, tag="rdv.get"):
    """Ask for the value of a key; answered at once if set, else when it is."""

    epoch: int
    key: str
    ask: int


class RendezvousAdd(Message, frozen=True, tag="rdv.add"):
    """Add to the number under a key; answered by `RendezvousValue` with the sum."""

    epoch: int
    key: str
    amount: int
    ask: int


class RendezvousValue(Message, frozen=True, tag="rdv.value"):
    """The head's answer to `RendezvousGet` and `RendezvousAdd` (a decimal number)."""

    epoch: int
    key: str
    ask: int
    value: bytes
