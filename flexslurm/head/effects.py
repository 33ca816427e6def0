"""What the controller's actions do in the head: messages, journal, drivers, rendezvous."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from flexslurm.control.actions import OpenEpoch
from flexslurm.engine.driver import Driver
from flexslurm.errors import EnvironmentFault, ProtocolError
from flexslurm.head.ledger import Ledger
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
        broken: Callable[[int, str], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ledger, self._journal, self._broken, self._now = ledger, journal, broken, now
        self._socket: HeadSocket | None = None
        self._board = RendezvousBoard()
        self._drivers: dict[int, Driver] = {}
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

    def detach(self, reason: str) -> None:
        moved = self._ledger.detach_all()
        self._drivers.clear()
        log.info("paused with %d sequences: %s", len(moved), reason)

    def meet_epoch(self, epoch: int) -> None:
        self._board.open(epoch)

    def forget_epoch(self, epoch: int) -> None:
        self._board.close(epoch)

    def open_epoch(self, opened: OpenEpoch) -> None:
        """Start a driver for each replica and give them what waits."""
        assert not self._drivers, f"epoch {opened.epoch} opens over open drivers"
        for index, replica in enumerate(opened.gear.replicas):
            self._drivers[index] = Driver(
                opened.epoch,
                index,
                replica,
                opened.gear.block_tokens,
                tuple(peer.worker for peer in opened.peers[index]),
                send=self.send,
                send_many=self._send_many,
                emit=self._ledger.on_event,
                broken=lambda reason: self._broken(opened.epoch, reason),
                now=self._now,
            )
        self.shifts += 1
        self._ledger.attach(self._drivers.values())

    def _send_many(self, workers: tuple[str, ...], message: Message) -> None:
        if self._socket is not None:
            absent = self._socket.send_many(workers, message)
            if absent:
                log.info("%s not connected", ", ".join(absent))

    # ------------------------------------------------------------------ without the controller

    def take(self, sender: str, message: Message) -> bool:
        """Handle a message of the data path; False when it is the controller's."""
        match message:
            case StepDone(replica=replica):
                driver = self._drivers.get(replica)
                if driver is not None:
                    driver.on_step_done(message)
            case StepFailed():
                self._on_step_failed(message)
            case RendezvousSet() | RendezvousGet() | RendezvousAdd():
                self._meet(sender, message)
            case _:
                return False
        return True

    def _on_step_failed(self, failed: StepFailed) -> None:
        for driver in list(self._drivers.values()):
            if failed.worker in driver.workers:
                driver.on_step_failed(failed)

    def _meet(self, sender: str, message: RendezvousSet | RendezvousGet | RendezvousAdd) -> None:
        try:
            answers = self._board.handle(sender, message)
        except ProtocolError as error:
            log.info("rendezvous: %s", error)
            return
        for member, value in answers:
            self.send(member, value)
