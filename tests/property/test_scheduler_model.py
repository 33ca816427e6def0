"""Any interleaving of arrivals, aborts, steps and answers keeps the books and the tokens."""

from __future__ import annotations

from collections import deque

from fake_replica import Answers, FakeReplica, make_replica, make_request, undisturbed
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from flexslurm.engine.load import MicroBatch
from flexslurm.engine.scheduler import Scheduler
from flexslurm.errors import ContextTooLong
from flexslurm.messages import SequenceRequest

MAX_CONTEXT = 24


class SchedulerWalk(RuleBasedStateMachine):
    @initialize(
        pp=st.integers(1, 3),
        block_tokens=st.integers(1, 5),
        kv_tokens=st.integers(6, 60),
        max_batch=st.integers(1, 6),
        max_batch_tokens=st.integers(1, 12),
    )
    def begin(
        self, pp: int, block_tokens: int, kv_tokens: int, max_batch: int, max_batch_tokens: int
    ) -> None:
        replica = make_replica(
            pp=pp,
            kv_blocks=-(-kv_tokens // block_tokens),
            max_batch=max_batch,
            max_batch_tokens=max_batch_tokens,
            max_context=MAX_CONTEXT,
        )
        self.scheduler = Scheduler(replica, block_tokens)
        self.engine = FakeReplica(replica, block_tokens)
        self.flying: deque[MicroBatch] = deque()
        self.answers = Answers()
        self.requests: dict[str, SequenceRequest] = {}
        self.aborted: set[str] = set()

    @rule(
        prompt=st.lists(st.integers(0, 22), min_size=1, max_size=MAX_CONTEXT),
        max_tokens=st.integers(1, MAX_CONTEXT),
        stop=st.sets(st.integers(0, 22), max_size=3),
        min_tokens=st.integers(0, 4),
        arrival=st.integers(0, 50),
        penalty=st.sampled_from([0.0, 0.5]),
        brings=st.integers(0, 10),
    )
    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        stop: set[int],
        min_tokens: int,
        arrival: int,
        penalty: float,
        brings: int,
    ) -> None:
        request = make_request(
            f"s{len(self.requests)}",
            prompt,
            max_tokens,
            arrival=arrival,
            stop=tuple(sorted(stop)),
            min_tokens=min_tokens,
            penalty=penalty,
        )
        answer, _ = undisturbed(request)
        output = tuple(answer[: min(brings, len(answer) - 1)])
        fits = len(prompt) + max_tokens <= self.scheduler.max_context
        try:
            self.scheduler.add(request, output)
        except ContextTooLong:
            assert not fits
            return
        assert fits
        self.requests[request.seq_id] = request
        self.answers.tokens[request.seq_id] = list(output)

    @rule(number=st.integers(0, 30))
    def abort(self, number: int) -> None:
        seq_id = f"s{number}"
        live = seq_id in self.requests and seq_id not in self.answers.finish
        assert self.scheduler.abort(seq_id) == (live and seq_id not in self.aborted)
        if live:
            self.aborted.add(seq_id)

    @rule()
    def send(self) -> None:
        batch = self.scheduler.schedule()
        if batch is not None:
            self.flying.append(batch)

    @rule(number=st.integers(0, 2))
    def answer(self, number: int) -> None:
        """Answers come in any order, though workers do the steps in theirs."""
        if not self.flying:
            return
        batch = self.flying[min(number, len(self.flying) - 1)]
        while batch in self.flying:
            self._take(self.flying.popleft())

    def _take(self, batch: MicroBatch) -> None:
        for event in self.scheduler.complete(
            batch.step, self.engine.run(batch.chunks, batch.freed)
        ):
            assert event.seq_id not in self.aborted
            self.answers.take(event)

    @invariant()
    def books_agree(self) -> None:
        self.scheduler.check_invariants()
        for request in self.requests.values():
            self.answers.check_begun(request)

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        rest = len(self.requests) * (MAX_CONTEXT + 1) * MAX_CONTEXT * 4 + 10
        for _ in range(rest):
            while (batch := self.scheduler.schedule()) is not None:
                self.flying.append(batch)
            if not self.flying:
                break
            self._take(self.flying.popleft())
            self.scheduler.check_invariants()
        assert self.scheduler.empty, f"stuck: {self.scheduler.load()}"
        assert self.scheduler.pool.free_count == self.scheduler.pool.num_blocks
        for seq_id, request in self.requests.items():
            assert (seq_id in self.answers.finish) != (seq_id in self.aborted)
            if seq_id not in self.aborted:
                self.answers.check(request)


TestSchedulerWalk = SchedulerWalk.TestCase
