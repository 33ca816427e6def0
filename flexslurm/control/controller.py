"""The controller's hands: feeds `Control` with what is heard and performs what it decides.

It never decides. One event at a time, on one event loop. A message that cannot be sent is an event
of its own, taken in when the actions under way are done.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from flexslurm.control.actions import (
    Action,
    BeginCutover,
    BeginTransfer,
    Detach,
    DropAway,
    DropShift,
    ForgetEpoch,
    MeetEpoch,
    MoveAction,
    ParkAhead,
    ParkAll,
    ParkAway,
    PlanShift,
    Record,
    RoomFree,
    Say,
    Send,
    SwitchOver,
)
from flexslurm.control.events import Event, Heard, ParkedAway, ShiftEvent, Unreachable
from flexslurm.control.installed import ReplicaKey
from flexslurm.control.state import Control
from flexslurm.messages import Message

log = logging.getLogger(__name__)


class Effects(Protocol):
    """What the head lends the controller to act with."""

    def send(self, member: str, message: Message) -> bool:
        """To an agent or worker, by incarnation; False where it is not connected."""
        ...

    def record(self, record: dict[str, Any], *, sync: bool = True) -> None:
        """On disk when it returns, with `sync`."""
        ...

    def detach(self, replicas: Sequence[ReplicaKey], reason: str, *, failed: bool = False) -> None:
        """Close these replicas' drivers, which `failed` or not; their sequences wait."""
        ...

    def meet_epoch(self, epoch: int) -> None: ...

    def forget_epoch(self, epoch: int) -> None: ...

    # A shift's moves. Answers that are known at once are returned, later ones come as events.

    def plan_shift(self, ask: PlanShift) -> ShiftEvent: ...

    def park_ahead(self, epoch: int, deadline_s: float) -> ShiftEvent | None: ...

    def park_all(self, epoch: int) -> ShiftEvent | None: ...

    def park_away(self, replicas: Sequence[ReplicaKey], deadline_s: float) -> ParkedAway | None: ...

    def drop_away(self) -> None: ...

    def begin_transfer(self, epoch: int) -> ShiftEvent | None: ...

    def begin_cutover(self, epoch: int, deadline_s: float) -> ShiftEvent | None: ...

    def switch_over(self, switch: SwitchOver) -> ShiftEvent: ...

    def drop_shift(self, epoch: int, reason: str) -> None: ...

    def room_free(self, epoch: int) -> None: ...


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
            case Record(record, sync):
                self._effects.record(record, sync=sync)
            case Detach(replicas, reason, failed):
                self._effects.detach(replicas, reason, failed=failed)
            case MeetEpoch(epoch):
                self._effects.meet_epoch(epoch)
            case ForgetEpoch(epoch):
                self._effects.forget_epoch(epoch)
            case RoomFree(epoch):
                self._effects.room_free(epoch)
            case DropShift(epoch, reason):
                self._effects.drop_shift(epoch, reason)
            case Say(text, warning):
                log.log(logging.WARNING if warning else logging.INFO, "%s", text)
            case _:
                self._move(action)

    def _move(self, action: MoveAction) -> None:
        answer: Event | None
        match action:
            case PlanShift():
                answer = self._effects.plan_shift(action)
            case ParkAhead(epoch, deadline_s):
                answer = self._effects.park_ahead(epoch, deadline_s)
            case ParkAll(epoch):
                answer = self._effects.park_all(epoch)
            case ParkAway(replicas, deadline_s):
                answer = self._effects.park_away(replicas, deadline_s)
            case DropAway():
                self._effects.drop_away()
                answer = None
            case BeginTransfer(epoch):
                answer = self._effects.begin_transfer(epoch)
            case BeginCutover(epoch, deadline_s):
                answer = self._effects.begin_cutover(epoch, deadline_s)
            case SwitchOver():
                answer = self._effects.switch_over(action)
        if answer is not None:
            self.take(answer)
