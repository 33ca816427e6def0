"""Which sequences wait and for what, and which driver has the others; never sees a token's client.

Where a live sequence is
------------------------
- *placed*: a driver has it, running or in the driver's own short queue;
- *held*: some attached replica is large enough, but all of those are busy. It waits without limit,
  since what is ahead of it ends;
- *unfit*: no attached replica holds one token more of it, or none is attached. It waits for a gear
  that does, and the ledger ends it when it has waited too long.

A placed sequence that may outgrow its replica (`cap_tokens`) is taken back when it has: it becomes
unfit, unless something larger was attached meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from flexslurm.engine.load import LiveSequence, SchedulerLoad
from flexslurm.gateway.router import ReplicaLoad, RoutingDecision, RoutingVerdict, choose
from flexslurm.head.stream import EventChannel
from flexslurm.head.suspicion import Suspicion
from flexslurm.messages import SequenceRequest

_MOST = 2**62  # more tokens than any context


class ReplicaDriver(Protocol):
    """What the head needs of an `engine.driver.Driver`."""

    @property
    def seat(self) -> int:
        """Tells it from all other drivers that are attached."""
        ...

    @property
    def serving(self) -> bool: ...
    def submit(
        self, request: SequenceRequest, output: tuple[int, ...] = (), *, partly: bool = False
    ) -> None: ...
    def adopt(
        self,
        request: SequenceRequest,
        output: tuple[int, ...],
        computed: int,
        *,
        partly: bool = False,
    ) -> bool: ...
    def release(self, seq_id: str) -> None: ...
    def abort(self, seq_id: str) -> bool: ...
    def pump(self) -> int: ...
    def load(self) -> SchedulerLoad: ...
    def tick(self, now: float) -> None: ...
    def close(self) -> list[LiveSequence]: ...


class Live:
    """A sequence that has not ended, and the tokens that were given out."""

    __slots__ = (
        "accepted_s", "cap_output", "channel", "first_s", "last_s", "longest_gap_s", "most_tokens",
        "moves", "outgrown", "output", "placed", "request", "suspicion", "unfit_since_s",
    )  # fmt: skip

    def __init__(self, request: SequenceRequest, channel: EventChannel, now: float) -> None:
        self.request = request
        self.channel = channel
        self.output: list[int] = []
        self.most_tokens = len(request.prompt) + request.stop.max_tokens
        """Tokens it may reach."""
        self.placed: RoutingDecision | None = None
        """Which replica has it, and why that one."""
        self.accepted_s = now
        self.first_s: float | None = None
        self.last_s = now
        """When its last token came."""
        self.longest_gap_s = 0.0
        self.moves = 0
        self.cap_output: int | None = None
        """Tokens of answer at which it has outgrown the replica it is placed with."""
        self.outgrown = False
        """It has tokens up to the limit of a gear, and waits since."""
        self.unfit_since_s: float | None = None
        self.suspicion = Suspicion()

    @property
    def tokens(self) -> int:
        """Tokens it has: prompt and answer so far."""
        return len(self.request.prompt) + len(self.output)


class Totals(msgspec.Struct, frozen=True):
    """The loads of all attached replicas together."""

    replicas: int
    running: int
    waiting: int
    blocks: int
    used_blocks: int
    evictions: int
    """Those of replicas that are detached again included."""
    prefill_tokens: int
    decode_tokens: int

    @property
    def kv_used(self) -> float:
        return self.used_blocks / self.blocks if self.blocks else 0.0


class _Seat:
    """An attached driver, with what the router weighs it by."""

    __slots__ = ("driver", "ramp", "speed", "tried")

    def __init__(self, driver: ReplicaDriver, speed: float, ramp: float) -> None:
        self.driver, self.speed, self.ramp = driver, speed, ramp
        self.tried: Live | None = None
        """The last suspect that was placed here."""

    @property
    def tries_one(self) -> bool:
        """Whether it runs a suspect now."""
        live = self.tried
        if live is None or live.placed is None or not live.suspicion.suspect:
            return False
        return live.placed.replica == self.driver.seat

    def load(self) -> ReplicaLoad:
        load = self.driver.load()
        return ReplicaLoad(
            replica=self.driver.seat,
            running=load.running,
            waiting=load.waiting,
            max_batch=load.max_batch,
            free_blocks=load.free_blocks - load.queued_blocks,
            block_tokens=load.block_tokens,
            max_context=load.max_context,
            speed=self.speed,
            ramp=self.ramp,
        )


class Dispatch:
    """The attached drivers, and the sequences that none of them has.

    Invariant: both waiting collections are ordered by arrival.
    """

    def __init__(self) -> None:
        self.places = 0
        """Sequences the last gear ran at once; kept during a shift, so the queue's bound is."""
        self.largest: int | None = None
        """Tokens the largest attached replica holds for one sequence; None: none is attached."""
        self._held: dict[str, Live] = {}
        self._unfit: dict[str, Live] = {}
        self._seats: dict[int, _Seat] = {}
        self._past = Totals(0, 0, 0, 0, 0, 0, 0, 0)

    # --------------------------------------------------------------------------- drivers

    def attach(
        self, drivers: Iterable[ReplicaDriver], speeds: Sequence[float], ramp: float
    ) -> None:
        """Take these drivers, and give them what waits."""
        drivers = tuple(drivers)
        assert not speeds or len(speeds) == len(drivers), f"{speeds} for {len(drivers)} drivers"
        for number, driver in enumerate(drivers):
            assert driver.seat not in self._seats, f"seat {driver.seat} is taken already"
            self._seats[driver.seat] = _Seat(driver, speeds[number] if speeds else 1.0, ramp)
        self.places = sum(seat.driver.load().max_batch for seat in self._seats.values())

    def detach(self, replica: int) -> list[LiveSequence]:
        """Close a replica's driver; returns what it had, which is now nowhere."""
        driver = self._seats.pop(replica).driver
        load, past = driver.load(), self._past
        self._past = msgspec.structs.replace(
            past,
            evictions=past.evictions + load.evictions,
            prefill_tokens=past.prefill_tokens + load.prefill_tokens,
            decode_tokens=past.decode_tokens + load.decode_tokens,
        )
        return driver.close()

    def weigh(self, replica: int, *, ramp: float | None = None, speed: float | None = None) -> None:
        """Change how much traffic a replica gets."""
        seat = self._seats[replica]
        seat.ramp = seat.ramp if ramp is None else ramp
        seat.speed = seat.speed if speed is None else speed

    def tick(self, now: float) -> None:
        for seat in tuple(self._seats.values()):
            seat.driver.tick(now)

    def pump(self) -> None:
        for seat in self._seats.values():
            seat.driver.pump()

    def totals(self) -> Totals:
        loads, past = [seat.driver.load() for seat in self._seats.values()], self._past
        return Totals(
            replicas=len(loads),
            running=sum(load.running for load in loads),
            waiting=sum(load.waiting for load in loads) + len(self._held) + len(self._unfit),
            blocks=sum(load.blocks for load in loads),
            used_blocks=sum(load.used_blocks for load in loads),
            evictions=past.evictions + sum(load.evictions for load in loads),
            prefill_tokens=past.prefill_tokens + sum(load.prefill_tokens for load in loads),
            decode_tokens=past.decode_tokens + sum(load.decode_tokens for load in loads),
        )

    # ------------------------------------------------------------------------- sequences

    def queue(self, live: Live, now: float) -> None:
        """Put a new sequence, younger than all others, among those that wait."""
        if self.largest is not None and live.tokens < self.largest:
            live.unfit_since_s = None
            self._held[live.request.seq_id] = live
            return
        if live.unfit_since_s is None:
            live.unfit_since_s = now
        self._unfit[live.request.seq_id] = live

    def requeue(self, more: Iterable[Live], now: float) -> None:
        """Sort all that wait, and these, by what is attached now."""
        loads = (seat.driver.load() for seat in self._seats.values())
        self.largest = max((load.max_context for load in loads), default=None)
        everything = [*more, *self._held.values(), *self._unfit.values()]
        self._held.clear()
        self._unfit.clear()
        for live in sorted(everything, key=lambda live: live.request.arrival):
            self.queue(live, now)

    def place(self) -> None:
        """Give held sequences to replicas, by arrival, as far as there is room.

        One that finds no room keeps younger ones off every replica that it fits itself, so it is
        not overtaken; replicas too small for it may still take them. Suspects go one to a replica
        at a time, and one that waits for its turn is overtaken.
        """
        seats = {number: seat for number, seat in self._seats.items() if seat.driver.serving}
        if not self._held or not seats:
            return
        loads = {number: seat.load() for number, seat in seats.items()}
        smallest, largest = min(load.max_context for load in loads.values()), self.largest or 0
        below = _MOST
        touched: set[int] = set()
        for live in tuple(self._held.values()):
            if below <= smallest:
                break
            wanted = min(live.most_tokens, largest)
            fit = [load for load in loads.values() if wanted <= load.max_context < below]
            if live.suspicion.suspect:
                fit = [load for load in fit if not seats[load.replica].tries_one]
                if not fit:
                    continue
            placement = choose(fit, live.tokens, live.most_tokens) if fit else None
            if placement is None or placement.replica is None:
                below = min(below, wanted)
                continue
            replica = placement.replica
            self._seat(live, placement, replica)
            loads[replica] = seats[replica].load()
            touched.add(replica)
        for replica in touched:
            seats[replica].driver.pump()

    def _seat(self, live: Live, placement: RoutingDecision, replica: int) -> None:
        del self._held[live.request.seq_id]
        cap = placement.cap_tokens
        live.placed, live.outgrown = placement, False
        live.cap_output = None if cap is None else cap - len(live.request.prompt)
        if live.suspicion.suspect:
            self._seats[replica].tried = live
        driver = self._seats[replica].driver
        driver.submit(live.request, tuple(live.output), partly=cap is not None)

    def adopt(self, live: Live, seat: int, computed: int) -> bool:
        """Give a sequence that is nowhere to the replica that has its KV; whether that took it."""
        driver, tokens = self._seats[seat].driver, live.tokens
        limit = driver.load().max_context
        if tokens >= limit:
            driver.release(live.request.seq_id)
            return False
        cap = None if live.most_tokens <= limit else limit
        if not driver.adopt(live.request, tuple(live.output), computed, partly=cap is not None):
            return False
        live.placed = RoutingDecision(RoutingVerdict.PLACED, seat, "its KV was moved there", cap)
        live.outgrown, live.unfit_since_s = False, None
        live.cap_output = None if cap is None else cap - len(live.request.prompt)
        return True

    def take_waiting(self, seq_id: str) -> bool:
        """Take a sequence out of those that wait; whether it was among them."""
        held = self._held.pop(seq_id, None)
        return (held or self._unfit.pop(seq_id, None)) is not None

    def release(self, live: Live) -> None:
        """Take a sequence from where it is; its driver gives nothing more of it."""
        seq_id = live.request.seq_id
        if live.placed is not None and live.placed.replica is not None:
            self._seats[live.placed.replica].driver.abort(seq_id)
            live.placed = None
        self._held.pop(seq_id, None)
        self._unfit.pop(seq_id, None)

    def overdue(self, now: float, limit_s: float) -> list[Live]:
        """The sequences that have waited for a gear that fits for so long, by arrival."""
        waits = ((live, live.unfit_since_s) for live in self._unfit.values())
        return [live for live, since in waits if since is not None and now - since >= limit_s]

    @property
    def unfit(self) -> int:
        return len(self._unfit)

    def check_invariants(self, all_live: Iterable[Live]) -> None:
        """Raise AssertionError unless each of these is in one place, and nothing else is."""
        waiting = self._held.keys() | self._unfit.keys()
        for live in all_live:
            seq_id = live.request.seq_id
            places = (live.placed is not None) + (seq_id in self._held) + (seq_id in self._unfit)
            assert places == 1, f"{seq_id} is in {places} places"
            waiting -= {seq_id}
        assert not waiting, f"ended sequences still wait: {waiting}"
        for waits in (self._held, self._unfit):
            order = [live.request.arrival for live in waits.values()]
            assert order == sorted(order), f"out of order: {order}"
