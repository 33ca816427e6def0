"""A ledger with a clock, a watcher and fake gears; it decides nothing itself."""

from __future__ import annotations

from collections.abc import Sequence

from fake_replica import Answers, FakeGear

from flexslurm.engine.load import LiveSequence
from flexslurm.errors import RequestError
from flexslurm.gear import Replica
from flexslurm.head.ledger import Ledger, LedgerSettings
from flexslurm.head.observer import SequenceSummary
from flexslurm.head.stream import Stream
from flexslurm.messages import SequenceRequest


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Watcher:
    def __init__(self) -> None:
        self.log: list[str] = []
        self.gaps: list[float] = []
        self.summaries: list[SequenceSummary] = []

    def accepted(self, request: SequenceRequest) -> None:
        self.log.append(f"accepted {request.seq_id} as {request.arrival}")

    def refused(self, error: RequestError) -> None:
        self.log.append(f"refused {type(error).__name__}")

    def first_token(self, ttft_s: float) -> None:
        self.log.append(f"first {ttft_s:g}")

    def next_token(self, gap_s: float) -> None:
        self.gaps.append(gap_s)

    def ended(self, summary: SequenceSummary) -> None:
        self.log.append(f"ended {summary.seq_id} {summary.reason}")
        self.summaries.append(summary)


class Rig:
    def __init__(self, *, max_waiting: int = 8, wait_s: float = 30.0, context: int = 100) -> None:
        self.clock, self.watcher = Clock(), Watcher()
        self.journal: list[str] = []
        settings = LedgerSettings(
            model_context=context, max_waiting=max_waiting, wait_for_gpus_s=wait_s
        )
        self.ledger = Ledger(
            settings,
            now=self.clock,
            observer=self.watcher,
            on_accept=lambda request: self.journal.append(f"+{request.seq_id}"),
            on_end=lambda summary: self.journal.append(f"-{summary.seq_id}"),
        )
        self.epoch, self.seats = 0, range(0)

    def attach(self, *replicas: Replica, speeds: Sequence[float] = ()) -> FakeGear:
        self.epoch += 1
        gear = FakeGear(self.epoch, replicas, 4, self.ledger.on_event, self.clock)
        self.seats = range(len(replicas))
        self.ledger.attach(gear.drivers, speeds)
        self.ledger.check_invariants()
        return gear

    def detach_all(self) -> list[LiveSequence]:
        """As when all GPUs are lost."""
        seats, self.seats = self.seats, range(0)
        return self.ledger.detach(seats)

    def submit(self, *requests: SequenceRequest) -> Stream:
        stream = self.ledger.submit(requests)
        self.ledger.check_invariants()
        return stream


def taken(*streams: Stream) -> Answers:
    answers = Answers()
    for stream in streams:
        for event in stream.ready():
            answers.take(event)
    return answers
