"""Every accepted sequence with its tokens, from acceptance to its one end; never computes any.

The ledger stands between the gateway and the drivers. It is what makes a shift invisible: drivers
come and go with their epochs (`attach`, `detach`), the ledger keeps each sequence and the tokens it
has, and gives both to whichever driver serves next. Everything runs on the head's event loop.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from flexslurm.engine.load import LiveSequence
from flexslurm.errors import GenerationFailed, NotServing, RequestAborted, RequestError
from flexslurm.gateway.port import ServedLimits, Serving
from flexslurm.gateway.router import check_queue
from flexslurm.head.acceptance import check_request
from flexslurm.head.dispatch import Dispatch, Live, ReplicaDriver, Totals
from flexslurm.head.observer import Observer, SequenceSummary, SilentObserver
from flexslurm.head.stream import EventChannel, Stream
from flexslurm.head.suspicion import GUILTY_FAILURES, blame
from flexslurm.messages import FinishReason, SequenceRequest, ServiceState, TokenEvent


class LedgerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of what is accepted, and how long it waits."""

    model_context: int
    """Tokens the model itself can take."""
    max_waiting: int = 1024
    """Sequences that may wait beyond those that the gear runs at once."""
    wait_for_gpus_s: float = 600.0
    """How long a sequence waits for a gear that can take it."""


class Adoption(msgspec.Struct, frozen=True):
    """Where a sequence's KV was moved to, and how much of it."""

    seat: int
    """The driver's, which has blocks reserved for it."""
    computed: int
    """Positions whose KV is there."""


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """The ledger's counts, for status and metrics."""

    live: int
    unfit: int
    """Live ones that wait for a gear that is large enough, or for any."""
    accepted: int
    finished: Mapping[FinishReason, int]
    tokens: int
    moves: int
    """Sequences taken from a driver that ended and given to another."""
    longest_gap_s: float
    """The longest time between two tokens of one sequence, so far."""
    replicas: Totals


class Ledger:
    """Implements `gateway.port.Generator`.

    Invariants (`check_invariants`): a live sequence is placed with one driver, held or unfit; the
    positions of its events rise by one from 0; when it ends it leaves the ledger, once.
    `on_accept` is called before a sequence starts, `on_end` when it has left.
    """

    def __init__(
        self,
        settings: LedgerSettings,
        *,
        now: Callable[[], float] = time.monotonic,
        observer: Observer | None = None,
        on_accept: Callable[[SequenceRequest], None] | None = None,
        on_end: Callable[[SequenceSummary], None] | None = None,
        first_arrival: int = 1,
    ) -> None:
        self.settings = settings
        self._now = now
        self._observer: Observer = observer or SilentObserver()
        self._on_accept = on_accept
        self._on_end = on_end
        self._next_arrival = first_arrival
        self._live: dict[str, Live] = {}
        self._dispatch = Dispatch()
        self._abandoned: deque[str] = deque()
        self._refusing: str | None = None
        self._view = Serving(ServiceState.STARTING, 0, 0, 0, 0.0, 0, 0)
        self._accepted = self._tokens = self._moves = 0
        self._longest_gap_s = 0.0
        self._finished: Counter[FinishReason] = Counter()

    # --------------------------------------------------------------------------- gateway

    def submit(self, requests: Sequence[SequenceRequest]) -> Stream:
        """Accept all of these sequences or none; see `Generator.submit`."""
        try:
            self._check(requests)
        except RequestError as error:
            self._observer.refused(error)
            raise
        now = self._now()
        bound = sum(request.stop.max_tokens + 1 for request in requests)
        channel = EventChannel([request.seq_id for request in requests], bound)
        try:
            for request in requests:
                arrival = self._next_arrival
                self._accept(msgspec.structs.replace(request, arrival=arrival), channel, now)
            self._dispatch.place()
        except Exception:
            self._take_all_back(requests)
            raise
        return Stream(channel, self.abort, self._abandoned)

    def _check(self, requests: Sequence[SequenceRequest]) -> None:
        if self._refusing is not None:
            raise NotServing(self._refusing)
        if self._dispatch.largest is None and self.settings.wait_for_gpus_s <= 0:
            raise NotServing("no GPUs serve the model now")
        ids = [request.seq_id for request in requests]
        assert len(set(ids)) == len(ids), f"a sequence is given twice: {ids}"
        for request in requests:
            assert request.seq_id not in self._live, f"{request.seq_id} is live already"
            check_request(request, self.settings.model_context, self._dispatch.largest)
        new, live = len(requests), len(self._live)
        check_queue(new, live, self._dispatch.places, self.settings.max_waiting)

    def _accept(self, request: SequenceRequest, channel: EventChannel, now: float) -> None:
        if self._on_accept is not None:
            self._on_accept(request)
        self._next_arrival += 1
        self._accepted += 1
        live = self._live[request.seq_id] = Live(request, channel, now)
        self._dispatch.queue(live, now)
        self._observer.accepted(request)

    def _take_all_back(self, requests: Sequence[SequenceRequest]) -> None:
        """No stream is given out for them: what was accepted of them ends here."""
        lives = [self._live[r.seq_id] for r in requests if r.seq_id in self._live]
        for live in lives:
            self._dispatch.release(live)
        for live in lives:
            self._end(live, FinishReason.ERROR)

    def abort(self, seq_ids: Sequence[str]) -> None:
        """End these sequences without an event; see `Generator.abort`."""
        ended = [self._live[seq_id] for seq_id in seq_ids if seq_id in self._live]
        for live in ended:
            self._dispatch.release(live)
            live.channel.drop(live.request.seq_id)
            self._end(live, FinishReason.ABORT)
        if ended:
            self._dispatch.place()
            self._dispatch.pump()

    def limits(self) -> ServedLimits:
        gear, model = self._dispatch.largest, self.settings.model_context
        return ServedLimits(None if gear is None else min(gear, model), model)

    def serving(self) -> Serving:
        totals, view = self._dispatch.totals(), self._view
        return Serving(
            view.state,
            view.epoch,
            running=totals.running,
            waiting=totals.waiting,
            kv_used=totals.kv_used,
            replicas=totals.replicas,
            gpus=view.gpus,
            reason=view.reason,
        )

    # ------------------------------------------------------------------------ controller

    def announce(self, state: ServiceState, epoch: int, gpus: int, reason: str) -> None:
        """What the controller knows and `serving` passes on."""
        self._view = Serving(state, epoch, 0, 0, 0.0, 0, gpus, reason)

    def attach(
        self, drivers: Iterable[ReplicaDriver], speeds: Sequence[float] = (), ramp: float = 1.0
    ) -> None:
        """Serve with these drivers too, and give them the sequences that wait, by arrival.

        Their `emit` must be `on_event`. `speeds` are their output tokens per second by estimate.
        """
        self._dispatch.attach(drivers, speeds, ramp)
        self._dispatch.requeue((), self._now())
        self._dispatch.place()

    def weigh(self, replica: int, *, ramp: float | None = None, speed: float | None = None) -> None:
        """Change how much of the traffic a replica gets: its ramp weight or its estimated speed."""
        self._dispatch.weigh(replica, ramp=ramp, speed=speed)
        self._dispatch.place()

    def detach(self, replicas: Iterable[int], *, failed: bool = False) -> list[LiveSequence]:
        """Close these replicas' drivers; what they had waits, and goes to others if they fit.

        Returns it, by arrival. `failed`: these could not go on. What fails by itself again and
        again is ended.
        """
        moved: list[LiveSequence] = []
        for replica in replicas:
            had = self._dispatch.detach(replica)
            moved += had
            if failed:
                blame([self._live[one.request.seq_id].suspicion for one in had if one.in_step])
        lives = [self._live[sequence.request.seq_id] for sequence in moved]
        for live, sequence in zip(lives, moved, strict=True):
            assert tuple(live.output) == sequence.output, f"{sequence} is not what was given out"
            live.placed = None
            live.moves += 1
        self._moves += len(moved)
        guilty = [live for live in lives if live.suspicion.guilty]
        self._dispatch.requeue([live for live in lives if live not in guilty], self._now())
        for live in guilty:
            error = f"steps with it failed, {GUILTY_FAILURES} times in a row with no other suspect"
            self._end_with(live, FinishReason.ERROR, error, GenerationFailed.code)
        self._dispatch.place()
        return sorted(moved, key=lambda sequence: sequence.request.arrival)

    def switch(
        self,
        opened: Sequence[ReplicaDriver],
        closed: Iterable[int],
        adoptions: Mapping[str, Adoption],
        speeds: Sequence[float] = (),
        ramp: float = 1.0,
    ) -> frozenset[str]:
        """Serve with the opened drivers instead of those on the closed seats, all at once.

        Sequences with an adoption go on where their KV is, if they are live and were with a closed
        driver or waiting, and if that driver has room; returns them. The others wait as after
        `detach`.
        """
        moved = [sequence for seat in closed for sequence in self._dispatch.detach(seat)]
        loose = {sequence.request.seq_id for sequence in moved}
        for seq_id in loose:
            self._live[seq_id].placed = None
            self._live[seq_id].moves += 1
        self._moves += len(loose)
        loose |= {s for s in adoptions if s in self._live and self._dispatch.take_waiting(s)}
        self._dispatch.attach(opened, speeds, ramp)
        lives = [self._live[seq_id] for seq_id in loose]
        lives.sort(key=lambda live: live.request.arrival)
        adopted = set()
        for live in lives:
            found = adoptions.get(live.request.seq_id)
            if found is not None and self._dispatch.adopt(live, found.seat, found.computed):
                adopted.add(live.request.seq_id)
        rest = [live for live in lives if live.request.seq_id not in adopted]
        self._dispatch.requeue(rest, self._now())
        self._dispatch.place()
        self._dispatch.pump()
        return frozenset(adopted)

    def has(self, seq_id: str) -> bool:
        """Whether a sequence is live."""
        return seq_id in self._live

    def waits(self, seq_id: str) -> bool:
        """Whether a sequence is live and no driver has it."""
        live = self._live.get(seq_id)
        return live is not None and live.placed is None

    def cordon(self, reason: str) -> None:
        """Accept nothing more: requests are refused with this reason; running ones go on."""
        self._refusing = reason

    def stop(self, reason: str) -> None:
        """Accept nothing more and end everything with `abort`."""
        self.cordon(reason)
        for live in tuple(self._live.values()):
            self._dispatch.release(live)
            self._end_with(live, FinishReason.ABORT, reason, RequestAborted.code)

    def tick(self, now: float) -> None:
        """Look at everything that has a limit in time; call it a few times a second."""
        abandoned = list(self._abandoned)
        for _ in abandoned:
            self._abandoned.popleft()
        self.abort(abandoned)
        self._dispatch.tick(now)
        limit_s = self.settings.wait_for_gpus_s
        for live in self._dispatch.overdue(now, limit_s):
            self._dispatch.release(live)
            if live.outgrown:  # it is as long as what serves, like any answer that fills a context
                self._end_with(live, FinishReason.LENGTH)
                continue
            anything = self._dispatch.largest is None
            what = "" if anything else f" that hold more than {live.tokens} tokens of a sequence"
            error = f"no GPUs{what} came within {limit_s:g} s"
            self._end_with(live, FinishReason.ERROR, error, NotServing.code)
        self._dispatch.place()

    def figures(self) -> Figures:
        return Figures(
            live=len(self._live),
            unfit=self._dispatch.unfit,
            accepted=self._accepted,
            finished={reason: self._finished[reason] for reason in FinishReason},
            tokens=self._tokens,
            moves=self._moves,
            longest_gap_s=self._longest_gap_s,
            replicas=self._dispatch.totals(),
        )

    @property
    def empty(self) -> bool:
        """No sequence is live."""
        return not self._live

    # --------------------------------------------------------------------------- drivers

    def on_event(self, event: TokenEvent) -> None:
        """Take a token from a driver and pass it on; the drivers' `emit`."""
        live = self._live[event.seq_id]
        assert live.placed is not None, f"{event} of a sequence that no driver has"
        assert event.position == len(live.output), f"{event} after {len(live.output)} tokens"
        if event.token is not None:
            live.output.append(event.token)
            self._time_token(live)
        cleared = live.suspicion.suspect
        live.suspicion.clear()
        live.channel.put(event)
        if event.finish is not None:
            self._end(live, event.finish)
            self._dispatch.place()
        elif live.cap_output is not None and len(live.output) >= live.cap_output:
            self._take_back(live)
        elif cleared:  # others may join it
            self._dispatch.place()

    def _take_back(self, live: Live) -> None:
        """It has outgrown its replica: let it wait for a larger one."""
        self._dispatch.release(live)
        live.outgrown = True
        self._dispatch.requeue((live,), self._now())
        self._dispatch.place()

    def _time_token(self, live: Live) -> None:
        now = self._now()
        self._tokens += 1
        if live.first_s is None:
            live.first_s = now
            self._observer.first_token(now - live.accepted_s)
        else:
            gap_s = now - live.last_s
            if gap_s > live.longest_gap_s:
                live.longest_gap_s = gap_s
                self._longest_gap_s = max(self._longest_gap_s, gap_s)
            self._observer.next_token(gap_s)
        live.last_s = now

    # ------------------------------------------------------------------------------- end

    def _end_with(
        self, live: Live, finish: FinishReason, error: str | None = None, code: str | None = None
    ) -> None:
        """End a sequence from our side; its driver has it no more."""
        event = TokenEvent(
            seq_id=live.request.seq_id,
            token=None,
            position=len(live.output),
            finish=finish,
            error=error,
            code=code,
        )
        live.channel.put(event)
        self._end(live, finish)

    def _end(self, live: Live, reason: FinishReason) -> None:
        """The one place where a sequence leaves."""
        del self._live[live.request.seq_id]
        self._finished[reason] += 1
        summary = SequenceSummary(
            seq_id=live.request.seq_id,
            reason=reason,
            prompt_tokens=len(live.request.prompt),
            output_tokens=len(live.output),
            e2e_s=self._now() - live.accepted_s,
            ttft_s=None if live.first_s is None else live.first_s - live.accepted_s,
            longest_gap_s=live.longest_gap_s,
            moves=live.moves,
        )
        self._observer.ended(summary)
        if self._on_end is not None:
            self._on_end(summary)

    def check_invariants(self) -> None:
        """Raise AssertionError if the books do not agree."""
        self._dispatch.check_invariants(self._live.values())
        for seq_id, live in self._live.items():
            assert seq_id in live.channel.open, f"{seq_id} has no open channel"
            assert len(live.output) < live.request.stop.max_tokens, f"{seq_id} should have ended"
