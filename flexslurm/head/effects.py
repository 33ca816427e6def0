"""What the controller's actions do in the head: messages, journal, drivers, rendezvous."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flexslurm.control.actions import PlanShift, SwitchOver
from flexslurm.control.events import MoveFigures, ShiftEvent, ShiftPlanned, Switched
from flexslurm.control.installed import ReplicaKey
from flexslurm.control.phases import Mode, ShiftOrder
from flexslurm.errors import EnvironmentFault, ProtocolError
from flexslurm.gear import Gear
from flexslurm.head.ledger import Ledger
from flexslurm.head.replicas import Replicas
from flexslurm.messages import (
    Message,
    RendezvousAdd,
    RendezvousGet,
    RendezvousSet,
    StepDone,
    StepFailed,
)
from flexslurm.wire.journal import Journal
from flexslurm.wire.rendezvous_board import RendezvousBoard
from flexslurm.wire.transport import HeadSocket

log = logging.getLogger(__name__)


class HeadEffects:
    """Implements `control.controller.Effects`; also takes the messages that need no decision."""

    def __init__(
        self,
        ledger: Ledger,
        journal: Journal,
        broken: Callable[[ReplicaKey, str], None],
        speeds: Callable[[Gear], Mapping[int, float]] = lambda gear: {},
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._journal, self._speeds = journal, speeds
        self._socket: HeadSocket | None = None
        self._board = RendezvousBoard()
        self.replicas = Replicas(
            ledger, send=self.send, send_many=self._send_many, broken=broken, now=now
        )
        self.shifts = 0

    def bind(self, socket: HeadSocket) -> None:
        self._socket = socket

    # ------------------------------------------------------------------ for the controller

    def send(self, member: str, message: Message) -> bool:
        return self._socket is not None and self._socket.send(member, message)

    def record(self, record: dict[str, Any]) -> None:
        """Raises EnvironmentFault: what cannot be recorded must not be done."""
        try:
            self._journal.append({**record, "at": round(time.time(), 3)})
        except OSError as error:
            raise EnvironmentFault(
                f"cannot write the journal {self._journal.path}: {error.strerror}",
                hint="free space on the shared file system; the head goes on from its journal",
            ) from error

    def detach(self, replicas: Sequence[ReplicaKey], reason: str) -> None:
        self.replicas.detach(replicas, reason)

    def meet_epoch(self, epoch: int) -> None:
        self._board.open(epoch)

    def forget_epoch(self, epoch: int) -> None:
        self._board.close(epoch)

    # ------------------------------------------------------------------ the moves of a shift

    def plan_shift(self, ask: PlanShift) -> ShiftEvent:
        return ShiftPlanned(ask.epoch, ShiftOrder(Mode.RECOMPUTE))

    def park_all(self, epoch: int) -> ShiftEvent | None:
        raise NotImplementedError

    def begin_transfer(self, epoch: int) -> ShiftEvent | None:
        raise NotImplementedError

    def begin_cutover(self, epoch: int, deadline_s: float) -> ShiftEvent | None:
        raise NotImplementedError

    def drop_shift(self, epoch: int, reason: str) -> None:
        self.replicas.forget_arriving()

    def room_free(self, epoch: int) -> None:
        pass

    def switch_over(self, switch: SwitchOver) -> ShiftEvent:
        """Open the new replicas' drivers, then close those that go."""
        gear = switch.gear.gear
        for one in switch.opened.values():
            self.replicas.arrive(one, gear.block_tokens)
        by_number = self._speeds(gear)
        speeds = {
            one.key: by_number[number]
            for number, one in switch.gear.replicas.items()
            if number in by_number
        }
        opened = [one.key for _, one in sorted(switch.opened.items())]
        self.replicas.switch(opened, switch.closed, {}, speeds)
        self.shifts += 1
        return Switched(switch.epoch, MoveFigures())

    def _send_many(self, workers: tuple[str, ...], message: Message) -> None:
        if self._socket is not None:
            absent = self._socket.send_many(workers, message)
            if absent:
                log.info("%s not connected", ", ".join(absent))

    # ------------------------------------------------------------------ without the controller

    def take(self, sender: str, message: Message) -> bool:
        """Handle a message of the data path; False when it is the controller's."""
        match message:
            case StepDone():
                self.replicas.on_step_done(message)
            case StepFailed():
                self.replicas.on_step_failed(message)
            case RendezvousSet() | RendezvousGet() | RendezvousAdd():
                self._meet(sender, message)
            case _:
                return False
        return True

    def _meet(self, sender: str, message: RendezvousSet | RendezvousGet | RendezvousAdd) -> None:
        try:
            answers = self._board.handle(sender, message)
        except ProtocolError as error:
            log.info("rendezvous: %s", error)
            return
        for member, value in answers:
            self.send(member, value)
