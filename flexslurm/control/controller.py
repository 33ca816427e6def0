"""The controller's hands: feeds `Control` with what is heard and performs what it decides.

It never decides. One event at a time, on one event loop. A message that cannot be sent is an event
of its own, taken in when the actions under way are done.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from flexslurm.control.actions import (
    Action,
    Detach,
    ForgetEpoch,
    MeetEpoch,
    OpenEpoch,
    Record,
    Say,
    Send,
)
from flexslurm.control.events import Event, Heard, Unreachable
from flexslurm.control.state import Control
from flexslurm.messages import Message

log = logging.getLogger(__name__)


class Effects(Protocol):
    """What the head lends the controller to act with."""

    def send(self, member: str, message: Message) -> bool: ...

    def record(self, record: dict[str, Any]) -> None:
        """On disk when it returns."""
        ...

    def detach(self, reason: str) -> None:
        """Close all drivers; their sequences wait."""
        ...

    def open_epoch(self, opened: OpenEpoch) -> None: ...

    def meet_epoch(self, epoch: int) -> None: ...

    def forget_epoch(self, epoch: int) -> None: ...


class Controller:
    """Performs the actions of a `Control`, in order."""

    def __init__(self, control: Control, effects: Effects, now: Callable[[], float]) -> None:
        self.control = control
        self._effects = effects
        self._now = now
        self._events: deque[Event] = deque()

    def hear(self, sender: str, message: Message) -> None:
        self.take(Heard(sender, message))

    def take(self, event: Event) -> None:
        """One event in, its actions out; then the events that those made."""
        self._events.append(event)
        if len(self._events) > 1:
            return  # from within an action: the loop below takes it in its turn
        while self._events:
            for action in self.control.handle(self._now(), self._events[0]):
                self._perform(action)
            self._events.popleft()

    def _perform(self, action: Action) -> None:
        match action:
            case Send(to, message):
                if not self._effects.send(to, message):
                    log.debug("%s is not connected: %s not sent", to, type(message).__name__)
                    self.take(Unreachable(to))
            case Record(record):
                self._effects.record(record)
            case Detach(reason):
                self._effects.detach(reason)
            case OpenEpoch():
                self._effects.open_epoch(action)
            case MeetEpoch(epoch):
                self._effects.meet_epoch(epoch)
            case ForgetEpoch(epoch):
                self._effects.forget_epoch(epoch)
            case Say(text, warning):
                log.log(logging.WARNING if warning else logging.INFO, "%s", text)
