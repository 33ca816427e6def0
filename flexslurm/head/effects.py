"""What the controller's actions do in the head: messages, journal, drivers, rendezvous."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from flexslurm.control.actions import PlanShift, SwitchOver
from flexslurm.control.events import Event, ParkedAway, ReplicaBroken, ShiftEvent, Unreachable
from flexslurm.control.installed import ReplicaKey
from flexslurm.engine import faults
from flexslurm.engine.faults import Point
from flexslurm.errors import ProtocolError
from flexslurm.head.away import Away
from flexslurm.head.ledger import Ledger
from flexslurm.head.moves import MovePlanner, Moves
from flexslurm.head.moving import Tickets
from flexslurm.head.replicas import Replicas
from flexslurm.head.storage import Storage
from flexslurm.messages import (
    KvParked,
    KvPulled,
    Message,
    RendezvousAdd,
    RendezvousGet,
    RendezvousSet,
    StepDone,
    StepFailed,
)
from flexslurm.wire.journal import Journal, unwritable
from flexslurm.wire.rendezvous_board import RendezvousBoard
from flexslurm.wire.transport import HeadSocket

log = logging.getLogger(__name__)


class HeadEffects:
    """Implements `control.controller.Effects`; also takes the messages that need no decision."""

    def __init__(
        self,
        ledger: Ledger,
        journal: Journal,
        planner: MovePlanner,
        *,
        tell: Callable[[Event], None],
        tell_now: Callable[[Event], None] | None = None,
        storage: Storage | None = None,
        switched: Callable[[SwitchOver], None] = lambda switch: None,
        now: Callable[[], float] = time.monotonic,
        weights_s: Callable[[int], float] = lambda epoch: 0.0,
    ) -> None:
        """`tell` takes events for the controller, in the loop's next turn; `tell_now` at once.

        A shift's answers go there, which come outside drivers' calls: streams wait for them.
        `switched` is called when a gear serves, after the streams go on.
        """
        self._journal, self._tell, self._switched, self._now = journal, tell, switched, now
        self._socket: HeadSocket | None = None
        self._board = RendezvousBoard()
        self.replicas = Replicas(ledger, send=self._send_many, broken=self._broken, now=now)
        tickets = Tickets()
        self.away = Away(
            self.replicas,
            ledger,
            storage,
            shards=lambda: planner.shards,
            rate_bytes_per_s=planner.file_rate,
            tickets=tickets,
            send=self._send_or_tell,
            now=now,
        )
        self.moves = Moves(
            self.replicas,
            ledger,
            planner,
            send=self._send_or_tell,
            tell=tell if tell_now is None else tell_now,
            broken=self._broken,
            now=now,
            tickets=tickets,
            away=self.away,
            weights_s=weights_s,
        )

    def _broken(self, replica: ReplicaKey, reason: str) -> None:
        self._tell(ReplicaBroken(replica, reason))

    def _send_or_tell(self, worker: str, message: Message) -> None:
        if not self.send(worker, message):
            self._tell(Unreachable(worker))

    def tick(self) -> None:
        """Look at what has a deadline; call it a few times a second."""
        self.replicas.tick(self._now())
        self.moves.advance()
        self._advance_away()
        self.away.tidy()

    def _advance_away(self) -> None:
        answer = self.away.advance()
        if answer is not None:
            self._tell(answer)

    def bind(self, socket: HeadSocket) -> None:
        self._socket = socket

    # ------------------------------------------------------------------ for the controller

    def send(self, member: str, message: Message) -> bool:
        return self._socket is not None and self._socket.send(member, message)

    def record(self, record: dict[str, Any], *, sync: bool = True) -> None:
        """Raises EnvironmentFault: what cannot be recorded must not be done."""
        try:
            self._journal.append({**record, "at": round(time.time(), 3)}, sync=sync)
        except OSError as error:
            raise unwritable(self._journal.path, error) from error

    def detach(self, replicas: Sequence[ReplicaKey], reason: str, *, failed: bool = False) -> None:
        self.moves.before_detach(replicas)
        self.away.before_detach(replicas)
        self.replicas.detach(replicas, reason, failed=failed)

    def meet_epoch(self, epoch: int) -> None:
        faults.reach(Point.INSTALL)
        self._board.open(epoch)

    def forget_epoch(self, epoch: int) -> None:
        self._board.close(epoch)

    # ------------------------------------------------------------------ the moves of a shift

    def plan_shift(self, ask: PlanShift) -> ShiftEvent:
        faults.reach(Point.PREPARE)
        return self.moves.plan(ask)

    def park_all(self, epoch: int) -> ShiftEvent | None:
        faults.reach(Point.PARKING)
        return self.moves.park(epoch)

    def park_ahead(self, epoch: int, deadline_s: float) -> ShiftEvent | None:
        return self.moves.park_ahead(epoch, deadline_s)

    def park_away(self, replicas: Sequence[ReplicaKey], deadline_s: float) -> ParkedAway | None:
        return self.away.park(replicas, deadline_s)

    def drop_away(self) -> None:
        self.away.drop()

    def begin_transfer(self, epoch: int) -> ShiftEvent | None:
        faults.reach(Point.TRANSFER)
        return self.moves.transfer(epoch)

    def begin_cutover(self, epoch: int, deadline_s: float) -> ShiftEvent | None:
        faults.reach(Point.CUTOVER)
        return self.moves.cut_over(epoch, deadline_s)

    def drop_shift(self, epoch: int, reason: str) -> None:
        self.moves.drop(epoch, reason)

    def room_free(self, epoch: int) -> None:
        self.moves.room_free(epoch)

    def switch_over(self, switch: SwitchOver) -> ShiftEvent:
        faults.reach(Point.COMMIT)
        answer = self.moves.switch(switch)
        self._switched(switch)
        faults.reach(Point.CLOSE)
        return answer

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
                if self.moves.awaits_steps:
                    self.moves.advance()
                if self.away.awaits_steps:
                    self._advance_away()
            case KvPulled():
                self.moves.take(message)
            case KvParked():
                self.away.take(message)
                self.moves.take(message)
                self._advance_away()
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
