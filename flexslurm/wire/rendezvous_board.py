"""The keys through which the workers of an epoch find each other; never waits and never sends.

The head keeps one board. Process groups are formed by values that members publish and others ask
for; here they pass over the authenticated link, so no worker opens a store port that anybody on
the machine could write to.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from flexslurm.errors import ProtocolError, StaleEpoch
from flexslurm.messages import RendezvousAdd, RendezvousGet, RendezvousSet, RendezvousValue

MAX_VALUE_BYTES = 64 * 1024
MAX_KEYS = 65_536
MAX_ASKS_PER_KEY = 1024

Answer = tuple[str, RendezvousValue]
"""Whom to send it to, and what."""


@dataclass(slots=True)
class _Page:
    """One epoch's values, and who waits for a value that is not there yet."""

    values: dict[str, bytes] = field(default_factory=dict)
    asks: dict[str, list[tuple[str, int]]] = field(default_factory=dict)


class RendezvousBoard:
    """Values by epoch and key; an epoch's keys live from `open` to `close`."""

    def __init__(self) -> None:
        self._pages: dict[int, _Page] = {}

    def open(self, epoch: int) -> None:
        """Accept keys of this epoch from now on; idempotent."""
        self._pages.setdefault(epoch, _Page())

    def close(self, epoch: int) -> None:
        """Forget the epoch's keys and the asks for them; idempotent."""
        self._pages.pop(epoch, None)

    def forget(self, member: str) -> None:
        """Drop what a lost member still waits for; what it has published stays true."""
        for page in self._pages.values():
            for key in list(page.asks):
                left = [ask for ask in page.asks[key] if ask[0] != member]
                if left:
                    page.asks[key] = left
                else:
                    del page.asks[key]

    def handle(
        self, member: str, message: RendezvousSet | RendezvousGet | RendezvousAdd
    ) -> list[Answer]:
        """Take one message and return the answers it makes due.

        Raises StaleEpoch when the epoch is not open, ProtocolError when a bound is passed or a
        counter is kept under a key that holds something else.
        """
        page = self._pages.get(message.epoch)
        if page is None:
            raise StaleEpoch(f"no rendezvous is open for epoch {message.epoch} ({message.key})")
        if isinstance(message, RendezvousSet):
            return self._set(page, message.epoch, message.key, message.value)
        if isinstance(message, RendezvousAdd):
            return self._add(page, member, message)
        return self._get(page, member, message)

    @property
    def waiting(self) -> int:
        """Asks without an answer, over all epochs."""
        return sum(len(asks) for page in self._pages.values() for asks in page.asks.values())

    def _set(self, page: _Page, epoch: int, key: str, value: bytes) -> list[Answer]:
        if len(value) > MAX_VALUE_BYTES:
            raise ProtocolError(f"the value of {key} has {len(value)} bytes of {MAX_VALUE_BYTES}")
        if key not in page.values and len(page.values) >= MAX_KEYS:
            raise ProtocolError(f"epoch {epoch} has more than {MAX_KEYS} rendezvous keys")
        page.values[key] = value
        return [
            (member, RendezvousValue(epoch=epoch, key=key, ask=ask, value=value))
            for member, ask in page.asks.pop(key, ())
        ]

    def _get(self, page: _Page, member: str, message: RendezvousGet) -> list[Answer]:
        value = page.values.get(message.key)
        if value is not None:
            return [(member, _value(message, value))]
        asks = page.asks.setdefault(message.key, [])
        if len(asks) >= MAX_ASKS_PER_KEY:
            raise ProtocolError(f"more than {MAX_ASKS_PER_KEY} asks wait for {message.key}")
        asks.append((member, message.ask))
        return []

    def _add(self, page: _Page, member: str, message: RendezvousAdd) -> list[Answer]:
        try:
            number = int(page.values.get(message.key, b"0")) + message.amount
        except ValueError as error:
            raise ProtocolError(f"the key {message.key} holds no counter") from error
        text = b"%d" % number
        answers = self._set(page, message.epoch, message.key, text)
        return [*answers, (member, _value(message, text))]


def _value(message: RendezvousGet | RendezvousAdd, value: bytes) -> RendezvousValue:
    return RendezvousValue(epoch=message.epoch, key=message.key, ask=message.ask, value=value)
