"""A torch.distributed store whose keys live in the head; never opens a port.

`Rendezvous` is the worker's end: it asks over the link to the head and matches answers to asks.
`HeadStore` is what gloo and NCCL are given; they call it from C++, through a PrefixStore.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as td

from flexslurm.errors import DeadlineExceeded, StaleEpoch
from flexslurm.messages import Message, RendezvousAdd, RendezvousGet, RendezvousSet, RendezvousValue

_REMEMBERED = 256  # cancelled epochs; nothing asks for one that old
_CHECK_S = 0.2  # an answer of the head comes within milliseconds, if the key is set


@dataclass(slots=True)
class _Ask:
    epoch: int
    done: threading.Event = field(default_factory=threading.Event)
    value: bytes | None = None
    refused: str | None = None


class Rendezvous:
    """Asks of all epochs of one worker; every wait ends by answer, deadline or `cancel`."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._asks: dict[int, _Ask] = {}
        self._cancelled: dict[int, str] = {}

    def deliver(self, answer: RendezvousValue) -> None:
        """Take the head's answer; one that nobody waits for any more is dropped."""
        with self._lock:
            ask = self._asks.get(answer.ask)
        if ask is not None and ask.epoch == answer.epoch:
            ask.value = answer.value
            ask.done.set()

    def cancel(self, epoch: int, reason: str) -> None:
        """Wake every wait of an epoch with StaleEpoch, and refuse later ones; idempotent."""
        with self._lock:
            self._cancelled.setdefault(epoch, reason)
            while len(self._cancelled) > _REMEMBERED:
                del self._cancelled[next(iter(self._cancelled))]
            asks = [ask for ask in self._asks.values() if ask.epoch == epoch]
        for ask in asks:
            ask.refused = reason
            ask.done.set()

    def set(self, epoch: int, key: str, value: bytes) -> None:
        self._refuse_cancelled(epoch)
        self._send(RendezvousSet(epoch=epoch, key=key, value=value))

    def get(self, epoch: int, key: str, timeout_s: float) -> bytes:
        """Wait until the key is set; raises DeadlineExceeded or StaleEpoch."""
        return self._ask(
            epoch, key, timeout_s, lambda ask: RendezvousGet(epoch=epoch, key=key, ask=ask)
        )

    def add(self, epoch: int, key: str, amount: int, timeout_s: float) -> int:
        """Add to a counter that starts at 0; returns its new value."""
        return int(
            self._ask(
                epoch,
                key,
                timeout_s,
                lambda ask: RendezvousAdd(epoch=epoch, key=key, amount=amount, ask=ask),
            )
        )

    def meet(self, epoch: int, name: str, members: int, timeout_s: float) -> None:
        """Return when `members` callers have come to this point of the epoch."""
        end = time.monotonic() + timeout_s
        if self.add(epoch, f"{name}/count", 1, timeout_s) == members:
            self.set(epoch, f"{name}/all", b"1")
        self.get(epoch, f"{name}/all", max(0.0, end - time.monotonic()))

    def _ask(self, epoch: int, key: str, timeout_s: float, make: Callable[[int], Message]) -> bytes:
        number, ask = next(self._numbers), _Ask(epoch)
        with self._lock:
            self._asks[number] = ask
        try:
            # registered before the look: a cancel in between finds the ask or is found here
            self._refuse_cancelled(epoch)
            self._send(make(number))
            if not ask.done.wait(timeout_s):
                raise DeadlineExceeded(f"nobody gave {key} of epoch {epoch} in {timeout_s:g} s")
        finally:
            with self._lock:
                del self._asks[number]
        if ask.value is None:
            raise StaleEpoch(f"epoch {epoch} is over: {ask.refused}")
        return ask.value

    def _refuse_cancelled(self, epoch: int) -> None:
        with self._lock:
            reason = self._cancelled.get(epoch)
        if reason is not None:
            raise StaleEpoch(f"epoch {epoch} is over: {reason}")


class HeadStore(td.Store):  # type: ignore[name-defined, misc]
    """One epoch's keys as a torch store; values other than counters never change once set."""

    def __init__(self, rendezvous: Rendezvous, epoch: int, timeout_s: float) -> None:
        super().__init__()
        self._rendezvous = rendezvous
        self._epoch = epoch
        self._timeout_s = timeout_s
        self._known: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._known[key] = data
        self._rendezvous.set(self._epoch, key, data)

    def get(self, key: str) -> bytes:
        return self._value(key, self._timeout_s)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def add(self, key: str, amount: int) -> int:
        return self._rendezvous.add(self._epoch, key, amount, self._timeout_s)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        left_s = self._timeout_s if timeout is None else timeout.total_seconds()
        end = time.monotonic() + left_s
        for key in keys:
            self._value(key, max(0.0, end - time.monotonic()))

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are set; a key that no answer comes for in 0.2 s counts as not set."""
        try:
            for key in keys:
                self._value(key, _CHECK_S)
        except DeadlineExceeded:
            return False
        return True

    def delete_key(self, key: str) -> bool:
        """Nothing is deleted: an epoch's keys end with it. Answers whether the key was known."""
        return self._known.pop(key, None) is not None

    def has_extended_api(self) -> bool:
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    def clone(self) -> HeadStore:
        return HeadStore(self._rendezvous, self._epoch, self._timeout_s)

    def _value(self, key: str, timeout_s: float) -> bytes:
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._rendezvous.get(self._epoch, key, timeout_s)
        return known
