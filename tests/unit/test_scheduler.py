"""Continuous batching: what goes into which micro-batch, and what comes out of it."""

from __future__ import annotations

from collections import deque

import pytest
from fake_replica import Answers, FakeReplica, make_replica, make_request, undisturbed

from flexslurm.engine.load import MicroBatch
from flexslurm.engine.scheduler import Scheduler
from flexslurm.engine.sequence import SequenceState
from flexslurm.errors import ContextTooLong, InvalidRequest, ProtocolError
from flexslurm.gear import Replica
from flexslurm.messages import FinishReason, SampledToken, SequenceRequest

BLOCK = 4


class Rig:
    """A scheduler with a fake replica behind it, stepped by hand."""

    def __init__(self, replica: Replica, block_tokens: int = BLOCK) -> None:
        self.scheduler = Scheduler(replica, block_tokens)
        self.engine = FakeReplica(replica, block_tokens)
        self.flying: deque[MicroBatch] = deque()
        self.answers = Answers()

    def add(self, *requests: SequenceRequest) -> None:
        for request in requests:
            self.scheduler.add(request)

    def send(self) -> MicroBatch | None:
        batch = self.scheduler.schedule()
        if batch is not None:
            self.flying.append(batch)
        self.scheduler.check_invariants()
        return batch

    def answer(self) -> None:
        batch = self.flying.popleft()
        for event in self.scheduler.complete(
            batch.step, self.engine.run(batch.chunks, batch.freed)
        ):
            self.answers.take(event)
        self.scheduler.check_invariants()

    def step(self) -> MicroBatch:
        batch = self.send()
        assert batch is not None
        self.answer()
        return batch

    def run(self, limit: int = 2000) -> int:
        """Until nothing is left; returns the number of steps."""
        for count in range(limit):
            while self.send() is not None:
                pass
            if not self.flying:
                assert self.scheduler.empty, self.scheduler.load()
                assert self.scheduler.pool.used_count == 0
                return count
            self.answer()
        raise AssertionError(f"not done after {limit} steps: {self.scheduler.load()}")


def shape(batch: MicroBatch | None) -> dict[str, int]:
    """Sequence to number of new tokens."""
    assert batch is not None
    return {chunk.seq_id: len(chunk.tokens) for chunk in batch.chunks}


def test_one_sequence_goes_through() -> None:
    rig = Rig(make_replica())
    request = make_request(prompt=range(10), max_tokens=5)
    rig.add(request)
    assert rig.run() == 5
    rig.answers.check(request)


def test_steps_rise_by_one_and_figures_count() -> None:
    rig = Rig(make_replica())
    rig.add(make_request("a", range(6), 3), make_request("b", range(5), 3))
    steps = [rig.step() for _ in range(3)]
    assert [batch.step for batch in steps] == [0, 1, 2]
    assert [(b.prefill_tokens, b.decode_tokens) for b in steps] == [(11, 0), (0, 2), (0, 2)]
    load = rig.scheduler.load()
    assert (load.prefill_tokens, load.decode_tokens, load.steps) == (11, 4, 3)
    assert (load.running, load.waiting, load.free_blocks, load.kv_used) == (0, 0, 64, 0.0)


def test_a_long_prompt_is_prefilled_in_chunks_and_samples_with_the_last() -> None:
    rig = Rig(make_replica(max_batch_tokens=8))
    rig.add(make_request("a", range(20), 2))
    batches = [rig.step() for _ in range(3)]
    assert [shape(batch) for batch in batches] == [{"a": 8}, {"a": 8}, {"a": 4}]
    assert [batch.chunks[0].start for batch in batches] == [0, 8, 16]
    assert [batch.chunks[0].sample is None for batch in batches] == [True, True, False]
    assert len(batches[0].chunks[0].blocks) == 5
    assert len(rig.answers.tokens["a"]) == 1


def test_decodes_come_first_and_prefill_fills_the_budget() -> None:
    rig = Rig(make_replica(max_batch_tokens=8))
    rig.add(make_request("a", range(3), 9), make_request("b", range(3), 9))
    rig.step()
    rig.add(make_request("c", range(20), 2))
    batch = rig.step()
    assert list(shape(batch).items()) == [("a", 1), ("b", 1), ("c", 6)]
    assert (batch.decode_tokens, batch.prefill_tokens) == (2, 6)


def test_prefill_keeps_a_share_when_decodes_would_take_all() -> None:
    rig = Rig(make_replica(max_batch=16, max_batch_tokens=8, max_context=60))
    rig.add(*(make_request(f"d{n}", (n,), 50, arrival=n) for n in range(8)))
    rig.step()
    rig.add(make_request("late", range(12), 2, arrival=99))
    first = rig.step()
    assert (first.decode_tokens, first.prefill_tokens) == (6, 2)
    second = rig.step()
    assert {"d6", "d7"} <= shape(second).keys(), "those left out are the first of the next"
    for _ in range(4):
        rig.step()
    assert "late" in rig.answers.tokens


def test_with_a_budget_of_one_token_decode_and_prefill_take_turns() -> None:
    rig = Rig(make_replica(max_batch=4, max_batch_tokens=1))
    rig.add(make_request("a", (1,), 40))
    rig.step()
    rig.add(make_request("b", range(5), 1, arrival=1))
    kinds = [rig.step().prefill_tokens for _ in range(10)]
    assert kinds in ([1, 0] * 5, [0, 1] * 5)
    assert rig.answers.finish["b"] is FinishReason.LENGTH


def test_a_stream_of_short_prompts_does_not_starve_a_decode_at_budget_one() -> None:
    rig = Rig(make_replica(max_batch=4, max_batch_tokens=1))
    rig.add(make_request("a", (1,), 10))
    rig.step()
    for n in range(40):
        rig.add(make_request(f"s{n}", (n,), 1, arrival=n + 1))
        rig.step()
    assert rig.answers.finish["a"] is FinishReason.LENGTH


def test_as_many_micro_batches_as_stages_are_in_flight() -> None:
    rig = Rig(make_replica(pp=3))
    rig.add(*(make_request(f"s{n}", (n, 1), 20, arrival=n) for n in range(7)))
    assert shape(rig.send()) == {f"s{n}": 2 for n in range(7)}
    assert rig.send() is None, "all sequences are in flight"
    rig.answer()
    sizes = [len(shape(rig.send())) for _ in range(3)]
    assert sizes == [3, 3, 1]
    assert rig.scheduler.schedule() is None, "no more than stages"
    for _ in range(6):
        rig.answer()
        assert rig.send() is not None
        assert rig.scheduler.load().in_flight == 3


def test_decodes_are_balanced_again_when_some_end() -> None:
    rig = Rig(make_replica(pp=2))
    rig.add(*(make_request(f"s{n}", (n, 1), 3 if n < 2 else 30, arrival=n) for n in range(4)))
    rig.send()
    rig.answer()
    for _ in range(8):
        while rig.send():
            pass
        rig.answer()
    while rig.send():
        pass
    assert [sorted(shape(batch)) for batch in rig.flying] in ([["s2"], ["s3"]], [["s3"], ["s2"]])


def test_max_batch_bounds_the_sequences_over_all_micro_batches() -> None:
    rig = Rig(make_replica(pp=2, max_batch=3))
    rig.add(*(make_request(f"s{n}", (n, 1), 5, arrival=n) for n in range(8)))
    while rig.send():
        pass
    load = rig.scheduler.load()
    assert (load.running, load.waiting) == (3, 5)
    rig.run()
    assert len(rig.answers.finish) == 8


def test_admission_is_by_arrival_and_the_head_is_not_overtaken() -> None:
    rig = Rig(make_replica(kv_blocks=8, max_context=32))
    rig.add(make_request("a", range(20), 2, arrival=1))
    rig.send()
    rig.add(make_request("small", (1,), 2, arrival=3), make_request("big", range(28), 2, arrival=2))
    rig.answer()
    assert shape(rig.send()) == {"a": 1}, "3 blocks are free: too few for big, enough for small"
    rig.answer()
    assert shape(rig.send()) == {"big": 28, "small": 1}


def test_stop_token_ends_a_sequence_and_min_tokens_holds_it_back() -> None:
    plain = make_request("plain", (5, 6), 12)
    stop = undisturbed(plain)[0][2]
    stopped = make_request("stopped", (5, 6), 12, stop=(stop,))
    held = make_request("held", (5, 6), 12, stop=(stop,), min_tokens=5)
    rig = Rig(make_replica())
    rig.add(stopped, held)
    chunks = {c.seq_id: c for c in rig.step().chunks}
    assert chunks["held"].sample is not None and chunks["held"].sample.suppress == (stop,)
    assert chunks["stopped"].sample is not None and chunks["stopped"].sample.suppress == ()
    rig.run()
    assert rig.answers.finish["stopped"] is FinishReason.STOP
    assert rig.answers.tokens["stopped"][-1] == stop
    assert stop not in rig.answers.tokens["held"][:5]
    rig.answers.check(stopped)
    rig.answers.check(held)


def test_history_goes_along_only_where_it_is_needed() -> None:
    rig = Rig(make_replica())
    rig.add(make_request("plain", (1, 2), 3), make_request("penalty", (3, 4), 3, penalty=0.5))
    rig.step()
    samples = {c.seq_id: c.sample for c in rig.step().chunks}
    assert samples["plain"] is not None and samples["penalty"] is not None
    assert (samples["plain"].prompt, samples["plain"].output) == ((), ())
    assert samples["penalty"].prompt == (3, 4)
    assert samples["penalty"].output == tuple(rig.answers.tokens["penalty"][:1])
    assert samples["plain"].position == samples["penalty"].position == 1


def test_the_youngest_is_evicted_and_recomputed_without_repeating_a_token() -> None:
    rig = Rig(make_replica(kv_blocks=6, max_context=24))
    old = make_request("old", range(7), 12, arrival=1)
    middle = make_request("middle", range(3), 12, arrival=2)
    young = make_request("young", range(3, 6), 12, arrival=3, penalty=1.0)
    rig.add(young, old, middle)
    while not rig.scheduler.load().evictions:
        rig.step()
    states = {s.seq_id: s.state for s in rig.scheduler._roster.all.values()}
    assert states["young"] is SequenceState.EVICTED
    assert SequenceState.EVICTED not in (states["old"], states["middle"])
    before = len(rig.answers.tokens["young"])
    rig.run()
    assert before < 12
    assert rig.scheduler.load().prefill_tokens >= 7 + 3 + 3 + 3 + before
    for request in (old, middle, young):
        rig.answers.check(request)


def test_one_that_finds_no_younger_to_evict_keeps_its_blocks_and_waits() -> None:
    rig = Rig(make_replica(kv_blocks=4, max_context=16))
    rig.add(make_request("old", range(5), 4, arrival=1))
    rig.add(make_request("young", range(8), 6, arrival=2))
    rig.step()
    assert rig.scheduler.load().free_blocks == 0
    assert shape(rig.step()) == {"old": 1}, "young needs a third block"
    assert rig.scheduler.load().evictions == 0
    rig.run()
    assert rig.answers.finish.keys() == {"old", "young"}


def test_a_pool_that_holds_one_sequence_serves_many_in_turn() -> None:
    rig = Rig(make_replica(pp=2, kv_blocks=5, max_context=20))
    requests = [make_request(f"s{n}", range(n, n + 9), 11, arrival=n) for n in range(12)]
    rig.add(*requests)
    rig.run()
    for request in requests:
        rig.answers.check(request)


def test_a_sequence_goes_on_with_the_answer_it_brings() -> None:
    request = make_request("moved", range(6), 8)
    answer, _ = undisturbed(request)
    rig = Rig(make_replica())
    rig.scheduler.add(request, tuple(answer[:3]))
    rig.answers.tokens["moved"] = answer[:3]
    assert shape(rig.step()) == {"moved": 9}
    rig.run()
    rig.answers.check(request)


@pytest.mark.parametrize(("blocks", "context", "limit"), [(64, 20, 20), (4, 64, 16)])
def test_too_long_is_refused_with_the_limit(blocks: int, context: int, limit: int) -> None:
    scheduler = Scheduler(make_replica(kv_blocks=blocks, max_context=context), BLOCK)
    scheduler.add(make_request("fits", range(limit - 5), 5))
    with pytest.raises(ContextTooLong, match=rf"the {limit} tokens"):
        scheduler.add(make_request("long", range(limit - 5), 6))
    assert scheduler.load().waiting == 1
    assert scheduler.load().max_context == limit


def test_empty_requests_are_refused() -> None:
    scheduler = Scheduler(make_replica(), BLOCK)
    with pytest.raises(InvalidRequest, match="no tokens"):
        scheduler.add(make_request("a", ()))
    with pytest.raises(InvalidRequest, match="at least one token"):
        scheduler.add(make_request("a", (1,), 0))
    assert scheduler.empty


def test_abort_frees_at_once_or_with_the_answer() -> None:
    rig = Rig(make_replica(max_batch=2))
    rig.add(*(make_request(f"s{n}", range(8), 8, arrival=n) for n in range(3)))
    rig.step()
    assert rig.scheduler.abort("s0") and not rig.scheduler.abort("s0")
    assert rig.scheduler.pool.used_count == 2, "it was not in flight"
    rig.send()
    assert rig.scheduler.abort("s1")
    assert rig.scheduler.pool.used_count == 5, "it is in flight, and so is s2 now"
    rig.scheduler.check_invariants()
    rig.answer()
    assert rig.scheduler.pool.used_count == 2
    assert len(rig.answers.tokens["s1"]) == 1, (
        "the token that came after the abort is not given out"
    )
    assert rig.scheduler.abort("s2")
    assert rig.scheduler.empty and rig.scheduler.pool.used_count == 0
    assert rig.send() is None


def test_abort_in_the_queue_keeps_the_order_of_the_others() -> None:
    rig = Rig(make_replica(max_batch=1))
    rig.add(*(make_request(f"s{n}", range(4), 2, arrival=n) for n in range(4)))
    rig.step()
    assert rig.scheduler.abort("s2")
    rig.run()
    assert list(rig.answers.finish) == ["s0", "s1", "s3"]


@pytest.mark.parametrize(
    ("step", "tokens", "story"),
    [
        (7, [], "not in flight"),
        (0, [], "not so for a, b"),
        (0, [SampledToken("a", 1)], "not so for b"),
        (0, [SampledToken("a", 1), SampledToken("b", 1), SampledToken("c", 1)], "not so for c"),
    ],
)
def test_wrong_answers_change_nothing(step: int, tokens: list[SampledToken], story: str) -> None:
    rig = Rig(make_replica())
    rig.add(make_request("a"), make_request("b"))
    rig.send()
    with pytest.raises(ProtocolError, match=story):
        rig.scheduler.complete(step, tokens)
    rig.answer()
    assert rig.answers.tokens.keys() == {"a", "b"}


def test_an_answer_is_taken_once() -> None:
    rig = Rig(make_replica())
    rig.add(make_request("a"))
    batch = rig.step()
    with pytest.raises(ProtocolError):
        rig.scheduler.complete(batch.step, [SampledToken("a", 1)])


def test_live_sequences_are_given_by_arrival_with_their_tokens() -> None:
    rig = Rig(make_replica(max_batch=2))
    requests = [make_request(f"s{n}", (n, 1), 6, arrival=9 - n) for n in range(4)]
    rig.add(*requests)
    rig.step()
    live = rig.scheduler.live()
    assert [s.request.seq_id for s in live] == ["s3", "s2", "s1", "s0"]
    assert [s.output for s in live] == [
        *(tuple(rig.answers.tokens[name]) for name in ("s3", "s2")),
        (),
        (),
    ]


def test_one_taken_partly_rests_at_the_limit_until_it_is_taken_away() -> None:
    request = make_request("moved", range(6), 30)
    other = make_request("other", range(4), 8, arrival=1)
    rig = Rig(make_replica(max_context=12))
    with pytest.raises(ContextTooLong):
        rig.add(request)
    with pytest.raises(ContextTooLong):
        rig.scheduler.add(request, tuple(range(6)), partly=True)
    rig.scheduler.add(request, partly=True)
    rig.add(other)
    for _ in range(20):
        if rig.send() is not None:
            rig.answer()
    assert len(rig.answers.tokens["moved"]) == 6
    rig.answers.check_begun(request)
    rig.answers.check(other)
    assert rig.scheduler.live()[0].output == tuple(rig.answers.tokens["moved"])
    assert rig.scheduler.abort("moved")
    assert rig.scheduler.empty and rig.scheduler.pool.used_count == 0
