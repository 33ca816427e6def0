"""Measures what the head's sequences and replicas do, a sample an interval; decides nothing.

It listens where the ledger tells of sequences and passes all of that on, and looks at the replicas
with each tick.
"""

from __future__ import annotations

from collections.abc import Mapping

from flexslurm.control.spread import Spread
from flexslurm.control.trends import Sample
from flexslurm.engine.load import SchedulerLoad
from flexslurm.errors import RequestError
from flexslurm.head.observer import Observer, SequenceSummary
from flexslurm.messages import SequenceRequest

_MOST_DURATIONS = 100_000
"""Of one kind in one interval; more say nothing more."""


class Meter:
    """Implements `head.observer.Observer`; `look` is called a few times in each interval."""

    def __init__(self, inner: Observer, interval_s: float) -> None:
        self._inner, self._interval_s = inner, interval_s
        self._next_at: float | None = None
        self._tokens = 0
        self._replica_tokens: dict[str, int] = {}
        self._began_at = 0.0
        self._begin(0.0)

    def _begin(self, now: float) -> None:
        self._began_at = now
        self._looks, self._busy = 0, 0.0
        self._arrived = self._ended = self._ended_tokens = 0
        self._ttft: list[float] = []
        self._tpot: list[float] = []

    # ------------------------------------------------------------------ what the ledger tells

    def accepted(self, request: SequenceRequest) -> None:
        self._arrived += 1
        self._inner.accepted(request)

    def refused(self, error: RequestError) -> None:
        self._inner.refused(error)

    def first_token(self, ttft_s: float) -> None:
        if len(self._ttft) < _MOST_DURATIONS:
            self._ttft.append(ttft_s)
        self._inner.first_token(ttft_s)

    def next_token(self, gap_s: float) -> None:
        self._inner.next_token(gap_s)

    def ended(self, summary: SequenceSummary) -> None:
        self._ended += 1
        self._ended_tokens += summary.output_tokens
        if summary.tpot_s is not None and len(self._tpot) < _MOST_DURATIONS:
            self._tpot.append(summary.tpot_s)
        self._inner.ended(summary)

    # ------------------------------------------------------------------ looking

    def look(
        self, now: float, tokens: int, waiting: int, loads: Mapping[str, SchedulerLoad]
    ) -> Sample | None:
        """See how things are; gives a sample when an interval has passed.

        `tokens`: given out so far; `waiting`: sequences that no replica runs; `loads`: of the
        replicas that serve, by their keys.
        """
        if self._next_at is None:
            self._next_at = now + self._interval_s
            self._start_from(now, tokens, loads)
        self._looks += 1
        if loads:
            self._busy += sum(load.running > 0 for load in loads.values()) / len(loads)
        if now < self._next_at:
            return None
        found = self._sample(now, tokens, waiting, loads)
        self._start_from(now, tokens, loads)
        # on a fixed schedule, so that a window has as many samples as intervals
        self._next_at += self._interval_s
        if self._next_at <= now:
            self._next_at = now + self._interval_s
        return found

    def _start_from(self, now: float, tokens: int, loads: Mapping[str, SchedulerLoad]) -> None:
        self._begin(now)
        self._tokens = tokens
        self._replica_tokens = {key: load.decode_tokens for key, load in loads.items()}

    def _sample(
        self, now: float, tokens: int, waiting: int, loads: Mapping[str, SchedulerLoad]
    ) -> Sample:
        passed_s = max(now - self._began_at, 1e-9)
        places = sum(load.max_batch for load in loads.values())
        running = sum(load.running for load in loads.values())
        each = {
            key: (load.decode_tokens - self._replica_tokens.get(key, 0)) / passed_s
            for key, load in loads.items()
        }
        return Sample(
            at_s=now,
            tokens_per_s=(tokens - self._tokens) / passed_s,
            running=running,
            waiting=waiting,
            busy=self._busy / self._looks,
            full=running / places if places else 0.0,
            arrived=self._arrived,
            ended=self._ended,
            ended_tokens=self._ended_tokens,
            ttft=Spread.of(self._ttft),
            tpot=Spread.of(self._tpot),
            replicas=each,
        )
