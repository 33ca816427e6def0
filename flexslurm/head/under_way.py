"""The state of the shift that is under way, as far as its moves go; never sends anything."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from flexslurm.control.events import (
    CutOver,
    MoveFailed,
    MoveFigures,
    Parked,
    ParkedAhead,
    ShiftEvent,
    Transferred,
)
from flexslurm.control.installed import ReplicaKey
from flexslurm.engine.routing import LiveKv
from flexslurm.head.move_plan import MovePlan
from flexslurm.head.mover import Mover
from flexslurm.head.moving import MoverPhase, OldEnd, Tickets
from flexslurm.head.parking import Parking
from flexslurm.messages import Message

_PARK_S = 30.0


@dataclass(slots=True)
class UnderWay:
    """One shift: first perhaps its parking, then its mover."""

    plan: MovePlan
    old: tuple[OldEnd, ...]
    keys: tuple[ReplicaKey, ...]
    """Of `old`."""
    stored: tuple[OldEnd, ...] = ()
    """What waits in files; the mover has them after `old`."""
    mover: Mover | None = None
    parking: Parking | None = None
    ahead_until: float = 0.0
    """Until then answers about blocks that are copied ahead may be missing."""
    began_at: float | None = None
    """When TRANSFER began; None: there is none."""
    paused_at: float | None = None
    idle_at: float | None = None
    """When the old drivers were at a step boundary."""
    moved_at: float | None = None
    """When everything was where it will be."""
    came: tuple[tuple[int, int], ...] = ()
    """Of each sequence that moved: its old replica's number in the gear, and tokens with KV."""
    speeds: Mapping[ReplicaKey, float] = field(default_factory=dict)
    """Of the new gear's replicas, worked out before the pause."""
    stayed: tuple[tuple[int, int], ...] = ()
    """The same of sequences that go on where they are."""
    running: set[str] = field(default_factory=set)
    """Sequences that had KV when they were paused."""
    _steps: dict[ReplicaKey, int] = field(default_factory=dict)
    _told: set[type[ShiftEvent]] = field(default_factory=set)

    @property
    def epoch(self) -> int:
        return self.plan.ask.epoch

    @property
    def awaits_steps(self) -> bool:
        """Whether the answer to a step may be what it waits for: a boundary."""
        return self.paused_at is not None

    def begin_parking(self, block_tokens: int, tickets: Tickets) -> Parking:
        """Its parking; begun before where full blocks were copied ahead."""
        if self.parking is None:
            self.parking = Parking(self.old, block_tokens, tickets, deadline_s=_PARK_S)
        return self.parking

    def pause(self, now: float, steps: Mapping[ReplicaKey, int]) -> None:
        """The old drivers send no further steps; `steps`: how many each has done."""
        if self.paused_at is None:
            self.paused_at = now
            self._steps.update(steps)
        ends = (*self.old, *self.stored)
        self.running |= {seq_id for end in ends for seq_id in end.view()}

    def close_end(self, now: float, number: int) -> None:
        """An old driver is about to be closed."""
        end, parking = self.old[number], self.parking
        if self.paused_at is None:
            self.paused_at = now
        self.running |= end.view().keys()
        if self.mover is not None:
            self.mover.lose(number)
        elif parking is not None and Parked in self._told:
            end.frozen = parking.kept(number)
        else:
            end.frozen, end.pullable = {}, False
            if parking is not None:
                parking.lose(number)

    def progress(self, now: float) -> ShiftEvent | None:
        """Go on; what the controller is to hear of it, each thing once."""
        if self.paused_at is not None and self.idle_at is None:
            self.idle_at = now if all(end.idle for end in self.old) else None
        event = self._parking_event() if self.mover is None else self._mover_event(now)
        if event is None or type(event) in self._told:
            return None
        self._told.add(type(event))
        return event

    def _parking_event(self) -> ShiftEvent | None:
        if self.parking is None:
            return None
        self.parking.advance()
        if self.parking.is_ahead:
            return ParkedAhead(self.epoch)
        return Parked(self.epoch) if self.parking.done else None

    def _mover_event(self, now: float) -> ShiftEvent | None:
        mover = self.mover
        assert mover is not None
        # Where it is settled nothing more is begun: it would be awaited in the pause.
        to_tell = mover.settled and self.began_at is not None and Transferred not in self._told
        if not to_tell:
            mover.advance(now)
        if mover.phase is MoverPhase.DONE and self.moved_at is None:
            self.moved_at = now
        match mover.phase:
            case MoverPhase.FAILED:
                return MoveFailed(self.epoch, mover.failure)
            case MoverPhase.DONE:
                return CutOver(self.epoch)
            case MoverPhase.ROUNDS if mover.settled and self.began_at is not None:
                return Transferred(self.epoch)
        return None

    def take_outbox(self) -> list[tuple[str, Message]]:
        """Messages to send, by worker."""
        found: list[tuple[str, Message]] = []
        for maker in (self.parking, self.mover):
            if maker is not None:
                found += maker.outbox
                maker.outbox.clear()
        return found

    def figures(
        self,
        now: float,
        adopted: frozenset[str],
        steps: Mapping[ReplicaKey, int],
        alive: Callable[[str], bool],
    ) -> MoveFigures:
        """What came of it; `steps`: how many each old driver had done at its end."""
        again = [seq_id for seq_id in self.running if seq_id not in adopted and alive(seq_id)]
        paused_at = now if self.paused_at is None else self.paused_at
        idle_at = paused_at if self.idle_at is None else self.idle_at
        moved_at = idle_at if self.moved_at is None else self.moved_at
        return MoveFigures(
            moved=len(adopted),
            recomputed=len(again),
            moved_bytes=self.mover.pulls.moved_bytes if self.mover is not None else 0,
            transfer_s=paused_at - self.began_at if self.began_at is not None else 0.0,
            move_s=self.mover.pulls.longest_s if self.mover is not None else 0.0,
            pause_s=now - paused_at,
            drain_s=idle_at - paused_at,
            last_move_s=moved_at - idle_at,
            pause_steps=max((n - self._steps.get(key, n) for key, n in steps.items()), default=0),
            kv=(*self.stayed, *self.came),
        )

    def stay(self, live: Iterable[LiveKv], but: Collection[str]) -> None:
        """What goes on where it is, in the new gear's replicas that were there before."""
        old, new = self.plan.ask.old, self.plan.ask.new
        before = {one.key: n for n, one in old.replicas.items()} if old is not None else {}
        self.stayed = tuple(
            (before[key], kv.tokens)
            for kv in live
            if kv.seq_id not in but and (key := new.replicas[kv.replica].key) in before
        )

    def adoptions(self) -> dict[str, tuple[int, int]]:
        """See `Mover.adoptions`; notes where these come from, by numbers of the old gear."""
        mover, old = self.mover, self.plan.ask.old
        if mover is None or mover.phase is not MoverPhase.DONE:
            return {}
        found = mover.adoptions()
        numbers = {one.key: n for n, one in old.replicas.items()} if old is not None else {}
        origins = [(mover.origin(seq_id), computed) for seq_id, (_, computed) in found.items()]
        self.came = tuple(
            (numbers[self.keys[end]], computed)
            for end, computed in origins
            if end < len(self.keys)  # else it waited in files
        )
        return found
