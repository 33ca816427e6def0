"""Gears that come and go at any moment give the tokens of an undisturbed run."""

from __future__ import annotations

from fake_replica import Answers, FakeGear, make_replica, make_request
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from flexslurm.errors import ContextTooLong, NotServing, Overloaded
from flexslurm.gear import Replica
from flexslurm.head.ledger import Ledger, LedgerSettings
from flexslurm.head.observer import SequenceSummary
from flexslurm.head.stream import Stream
from flexslurm.messages import FinishReason, SequenceRequest

WAIT_S = 50.0

REPLICAS = st.builds(
    make_replica,
    pp=st.integers(1, 3),
    kv_blocks=st.integers(5, 20),
    max_batch=st.integers(1, 5),
    max_batch_tokens=st.integers(1, 12),
    max_context=st.integers(12, 40),
)


class LedgerWalk(RuleBasedStateMachine):
    @initialize(max_waiting=st.integers(0, 20))
    def begin(self, max_waiting: int) -> None:
        self.now = 0.0
        self.ends: dict[str, SequenceSummary] = {}
        settings = LedgerSettings(model_context=48, max_waiting=max_waiting, wait_for_gpus_s=WAIT_S)
        self.ledger = Ledger(settings, now=lambda: self.now, on_end=self._end)
        self.gears: list[FakeGear] = []
        self.epoch, self.seats = 0, range(0)
        self.streams: dict[str, Stream] = {}
        self.requests: dict[str, SequenceRequest] = {}
        self.answers = Answers()
        self.aborted: set[str] = set()
        self.overdue: set[str] = set()

    def _end(self, summary: SequenceSummary) -> None:
        assert summary.seq_id not in self.ends, "ended twice"
        self.ends[summary.seq_id] = summary

    @rule(
        prompt=st.lists(st.integers(0, 22), min_size=1, max_size=20),
        choices=st.integers(1, 3),
        max_tokens=st.integers(1, 20),
        stop=st.sets(st.integers(0, 22), max_size=2),
    )
    def submit(self, prompt: list[int], choices: int, max_tokens: int, stop: set[int]) -> None:
        name = f"r{len(self.streams)}"
        requests = [
            make_request(f"{name}/{n}", prompt, max_tokens, seed=n, stop=tuple(sorted(stop)))
            for n in range(choices)
        ]
        try:
            self.streams[name] = self.ledger.submit(requests)
        except (Overloaded, ContextTooLong, NotServing):
            return
        self.requests |= {request.seq_id: request for request in requests}

    @rule(replicas=st.lists(REPLICAS, min_size=1, max_size=3), block_tokens=st.integers(2, 5))
    def shift(self, replicas: list[Replica], block_tokens: int) -> None:
        self.detach()
        self.epoch += 1
        gear = FakeGear(self.epoch, replicas, block_tokens, self.ledger.on_event, lambda: self.now)
        self.ledger.attach(gear.drivers, [float(n + 1) for n in range(len(replicas))])
        self.seats = range(len(replicas))
        self.gears.append(gear)

    @rule()
    def detach(self) -> None:
        seats, self.seats = self.seats, range(0)
        for sequence in self.ledger.detach(seats):
            answer = self.answers.tokens.get(sequence.request.seq_id, [])
            assert list(sequence.output[: len(answer)]) == answer

    @rule(times=st.integers(1, 6))
    def answer(self, times: int) -> None:
        """Workers of epochs that are over answer too."""
        for _ in range(times):
            for gear in self.gears:
                gear.answer()

    @rule(number=st.integers(0, 8))
    def close(self, number: int) -> None:
        stream = self.streams.get(f"r{number}")
        if stream is not None:
            self._read()
            stream.close()
            mine = {i for i in self.requests if i.startswith(f"r{number}/")}
            self.aborted |= mine - self.answers.finish.keys()

    @rule(passed_s=st.floats(0.1, 20.0))
    def wait(self, passed_s: float) -> None:
        self.now += passed_s
        before = set(self.ends)
        self.ledger.tick(self.now)
        self.overdue |= self.ends.keys() - before

    def _read(self) -> None:
        for stream in self.streams.values():
            for event in stream.ready():
                self.answers.take(event)

    @invariant()
    def tokens_are_right_so_far(self) -> None:
        self.ledger.check_invariants()
        self._read()
        for seq_id, request in self.requests.items():
            self.answers.check_begun(request)
            ended = seq_id in self.answers.finish or seq_id in self.aborted
            assert (seq_id in self.ends) == ended

    def teardown(self) -> None:
        if not hasattr(self, "ledger"):
            return
        self.shift([make_replica(pp=2, kv_blocks=24, max_context=48)], 2)
        while self.gears[-1].answer():
            self.ledger.tick(self.now)
        self._read()
        assert self.ledger.empty
        load = self.gears[-1].drivers[0].load()
        assert load.free_blocks == load.blocks
        for seq_id, request in self.requests.items():
            if seq_id in self.aborted:
                assert self.ends[seq_id].reason is FinishReason.ABORT
            elif seq_id in self.overdue:
                assert self.ends[seq_id].reason in (FinishReason.ERROR, FinishReason.LENGTH)
                self.answers.check_begun(request)
            else:
                self.answers.check(request)


TestLedgerWalk = LedgerWalk.TestCase
