"""The ledger: accepted once, ended once, the same tokens whatever drivers come and go."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Sequence

import pytest
from fake_replica import Answers, FakeGear, make_replica, make_request, undisturbed

from flexslurm.errors import ContextTooLong, InvalidRequest, NotServing, Overloaded, RequestError
from flexslurm.gateway.port import Generator
from flexslurm.gear import Replica
from flexslurm.head.ledger import Ledger, LedgerSettings
from flexslurm.head.observer import SequenceSummary
from flexslurm.head.stream import Stream
from flexslurm.messages import FinishReason, SequenceRequest, TokenEvent


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
        self.epoch = 0

    def attach(self, *replicas: Replica, speeds: Sequence[float] = ()) -> FakeGear:
        self.epoch += 1
        gear = FakeGear(self.epoch, replicas, 4, self.ledger.on_event, self.clock)
        self.ledger.attach(gear.drivers, speeds)
        self.ledger.check_invariants()
        return gear

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


def test_the_ledger_is_a_generator_for_the_gateway() -> None:
    generator: Generator = Rig().ledger
    assert generator.limits().max_context is None
    assert generator.limits().model_context == 100


def test_a_request_goes_through_and_is_told_of() -> None:
    rig = Rig()
    gear = rig.attach(make_replica())
    requests = [make_request("r/0", (1, 2), 3, seed=1), make_request("r/1", (1, 2), 3, seed=2)]
    stream = rig.submit(*requests)
    for _ in range(4):
        rig.clock.now += 1.5
        gear.answer()
    answers = taken(stream)
    for request in requests:
        answers.check(request)
    assert rig.journal == ["+r/0", "+r/1", "-r/0", "-r/1"]
    assert rig.watcher.log == [
        "accepted r/0 as 1", "accepted r/1 as 2", "first 1.5", "first 1.5",
        "ended r/0 length", "ended r/1 length",
    ]  # fmt: skip
    assert rig.watcher.gaps == [1.5] * 4
    summary = rig.watcher.summaries[0]
    assert (summary.e2e_s, summary.ttft_s, summary.tpot_s) == (4.5, 1.5, 1.5)
    assert (summary.prompt_tokens, summary.output_tokens, summary.longest_gap_s) == (2, 3, 1.5)
    figures = rig.ledger.figures()
    assert (figures.accepted, figures.tokens, figures.live) == (2, 6, 0)
    assert figures.finished[FinishReason.LENGTH] == 2
    assert rig.ledger.empty


def test_all_or_none_of_a_request_is_accepted() -> None:
    rig = Rig()
    rig.attach(make_replica(max_context=20))
    with pytest.raises(ContextTooLong, match="the 20 tokens that this gear holds"):
        rig.submit(make_request("r/0", (1,), 5), make_request("r/1", range(10), 11))
    assert rig.ledger.empty and rig.journal == []
    assert rig.watcher.log == ["refused ContextTooLong"]


def test_the_models_own_limit_holds_without_a_gear_too() -> None:
    rig = Rig(context=16)
    with pytest.raises(ContextTooLong, match="16 tokens that the model holds"):
        rig.submit(make_request("r/0", range(10), 7))


@pytest.mark.parametrize(("prompt", "answer"), [((), 3), ((1,), 0)])
def test_empty_requests_are_refused(prompt: tuple[int, ...], answer: int) -> None:
    with pytest.raises(InvalidRequest):
        Rig().submit(make_request("r/0", prompt, answer))


def test_the_queue_is_bounded() -> None:
    rig = Rig(max_waiting=2)
    gear = rig.attach(make_replica(max_batch=3))
    streams = [rig.submit(make_request(f"r{n}/0", (n,), 3)) for n in range(5)]
    with pytest.raises(Overloaded, match="2 sequences are waiting, and at most 2 may"):
        rig.submit(make_request("r5/0"))
    rig.ledger.detach_all()
    with pytest.raises(Overloaded):
        rig.submit(make_request("r5/0"))
    gear = rig.attach(make_replica(max_batch=3))
    gear.run()
    assert len(taken(*streams).finish) == 5
    rig.submit(make_request("r5/0"))


def test_before_the_first_gear_requests_wait_within_the_bound() -> None:
    rig = Rig(max_waiting=2)
    streams = [rig.submit(make_request(f"r{n}/0", (n,), 3)) for n in range(2)]
    with pytest.raises(Overloaded):
        rig.submit(make_request("r2/0"))
    assert rig.ledger.serving().waiting == 2
    rig.attach(make_replica()).run()
    assert len(taken(*streams).finish) == 2


def test_held_sequences_go_to_whichever_replica_gets_room() -> None:
    rig = Rig(max_waiting=100)
    gear = rig.attach(make_replica(max_batch=2), make_replica(max_batch=2), speeds=(1.0, 1.0))
    requests = [make_request(f"r{n}/0", (n,), 30 if n % 2 == 0 and n < 8 else 2) for n in range(30)]
    streams = [rig.submit(request) for request in requests]
    assert [load.waiting for load in (d.load() for d in gear.drivers)] == [2, 2]
    gear.run()
    answers = taken(*streams)
    for request in requests:
        answers.check(request)
    steps = [driver.load().steps for driver in gear.drivers]
    assert max(steps) < 90, f"one replica was left idle: {steps}"


def test_a_held_long_one_is_not_overtaken_on_the_replica_it_needs() -> None:
    rig = Rig(max_waiting=100)
    big = make_replica(max_batch=2, kv_blocks=15, max_context=60)
    small = make_replica(max_batch=1, max_context=20)
    gear = rig.attach(small, big)
    rig.submit(make_request("big0/0", range(50), 9))
    rig.submit(make_request("small0/0", (1,), 19))
    for n in range(3):
        rig.submit(make_request(f"long{n}/0", range(30), 9))
    assert gear.drivers[1].load().waiting == 2, "and the third is held, though blocks are free"
    rig.submit(make_request("young0/0", (2,), 9))
    rig.submit(make_request("young1/0", (2,), 9))
    there = {s.request.seq_id for s in gear.drivers[0].scheduler.live()}
    assert there == {"small0/0", "young0/0", "young1/0"}
    gear.run()
    assert rig.ledger.empty


def test_a_held_long_one_is_not_overtaken_by_one_that_could_start() -> None:
    rig = Rig(max_waiting=100)
    sizes = {"a": 30, "b": 3, "c": 30, "d": 1}
    for name, prompt in sizes.items():
        rig.submit(make_request(f"{name}/0", range(prompt), 9))
    gear = rig.attach(make_replica(kv_blocks=15, max_context=60))
    there = {s.request.seq_id for s in gear.drivers[0].scheduler.live()}
    assert there == {"a/0", "b/0"}, "c finds too few blocks and no queue, d is behind it"
    gear.run()
    assert [entry for entry in rig.journal if entry[0] == "-"] == ["-a/0", "-b/0", "-c/0", "-d/0"]


def test_one_behind_a_held_one_goes_to_a_replica_that_is_too_small_for_that() -> None:
    rig = Rig(max_waiting=100)
    for name, prompt, answer in (("a", 30, 9), ("b", 3, 20), ("c", 30, 9), ("d", 1, 9)):
        rig.submit(make_request(f"{name}/0", range(prompt), answer))
    small, big = make_replica(max_context=20), make_replica(kv_blocks=15, max_context=60)
    gear = rig.attach(small, big, speeds=(1.0, 1000.0))
    there = [[s.request.seq_id for s in d.scheduler.live()] for d in gear.drivers]
    assert there == [["d/0"], ["a/0", "b/0"]]


def test_what_waits_is_spread_over_the_new_replicas() -> None:
    rig = Rig()
    for n in range(6):
        rig.submit(make_request(f"r{n}/0", (n,), 9))
    gear = rig.attach(make_replica(), make_replica(), speeds=(10.0, 20.0))
    assert [len(d.scheduler.live()) for d in gear.drivers] == [2, 4]


def test_a_held_long_one_does_not_keep_a_small_replica_idle() -> None:
    rig = Rig(max_waiting=100)
    gear = rig.attach(
        make_replica(max_batch=1, max_context=20), make_replica(max_batch=1, max_context=60)
    )
    for n in range(4):
        rig.submit(make_request(f"long{n}/0", range(30), 9))
    rig.submit(make_request("short/0", (1,), 9))
    assert gear.drivers[0].load().running == 1


def test_detached_sequences_go_on_with_the_tokens_they_have() -> None:
    rig = Rig(max_waiting=50)
    gear = rig.attach(make_replica(pp=2, max_batch=3))
    requests = [make_request(f"r{n}/0", range(n, n + 5), 9, penalty=n % 2) for n in range(6)]
    streams = [rig.submit(request) for request in requests]
    for _ in range(7):
        gear.answer()
    live = rig.ledger.detach_all()
    rig.ledger.check_invariants()
    assert [s.request.arrival for s in live] == sorted(s.request.arrival for s in live)
    assert any(s.output for s in live)
    for workers in gear.workers:
        while workers.answer():  # too late: the driver is closed
            pass
    rig.attach(make_replica(tp=2, max_batch=2), make_replica(max_batch=4)).run()
    answers = taken(*streams)
    for request in requests:
        answers.check(request)
    assert rig.ledger.figures().moves == len(live)
    assert len(rig.journal) == 12


def test_one_replica_can_leave_and_the_other_takes_over() -> None:
    rig = Rig(max_waiting=50)
    gear = rig.attach(make_replica(max_batch=4), make_replica(max_batch=4))
    requests = [make_request(f"r{n}/0", range(n, n + 5), 9) for n in range(8)]
    streams = [rig.submit(request) for request in requests]
    gear.answer()
    moved = rig.ledger.detach([1])
    assert len(moved) == 4
    gear.run()
    answers = taken(*streams)
    for request in requests:
        answers.check(request)


def test_what_does_not_fit_the_new_gear_waits_for_one_that_fits() -> None:
    rig = Rig()
    gear = rig.attach(make_replica(max_context=60))
    long, short = make_request("long/0", range(30), 9), make_request("short/0", (1,), 9)
    streams = [rig.submit(long), rig.submit(short)]
    gear.answer()
    rig.ledger.detach_all()
    rig.attach(make_replica(max_context=20)).run()
    answers = taken(*streams)
    answers.check(short)
    assert "long/0" not in answers.finish
    assert rig.ledger.figures().unfit == 1
    with pytest.raises(ContextTooLong):
        rig.submit(make_request("other/0", range(30), 9))
    rig.ledger.detach_all()
    rig.attach(make_replica(max_context=40)).run()
    for event in streams[0].ready():
        answers.take(event)
    answers.check(long)


def test_one_that_may_outgrow_the_new_gear_runs_as_far_as_that_goes() -> None:
    """As answers whose limit is all that fitted: most of them end much sooner."""
    rig = Rig(wait_s=30)
    rig.attach(make_replica(max_context=60))
    probe = make_request("short/0", (1, 2), 50)
    stop = undisturbed(probe)[0][7]
    short = make_request("short/0", (1, 2), 50, stop=(stop,))
    long, lost = make_request("long/0", (3, 4), 50), make_request("lost/0", (5, 6), 50)
    streams = [rig.submit(request) for request in (short, long, lost)]
    rig.ledger.detach_all()
    gear = rig.attach(make_replica(max_context=12), make_replica(max_context=20))
    gear.run()
    rig.ledger.check_invariants()
    answers = taken(*streams)
    answers.check(short)
    assert [len(answers.tokens[name]) for name in ("long/0", "lost/0")] == [18, 18]
    assert rig.ledger.figures().unfit == 2
    assert gear.drivers[1].load().free_blocks == 64
    with pytest.raises(ContextTooLong):
        rig.submit(make_request("new/0", (3, 4), 50))
    rig.ledger.abort(["lost/0"])
    bigger = FakeGear(99, [make_replica(), make_replica(), make_replica()], 4, rig.ledger.on_event)
    rig.ledger.attach(bigger.drivers[2:])
    bigger.run()
    for event in streams[1].ready():
        answers.take(event)
    answers.check(long)


def test_one_that_fills_the_gear_ends_with_length_when_nothing_larger_comes() -> None:
    rig = Rig(wait_s=30)
    stream = rig.submit(make_request("r/0", (3, 4), 50))
    rig.attach(make_replica(max_context=20)).run()
    rig.clock.now = 29.0
    rig.ledger.tick(29.0)
    assert len(taken(stream).tokens["r/0"]) == 18
    rig.ledger.tick(30.0)
    (last,) = stream.ready()
    assert (last.finish, last.position, last.error) == (FinishReason.LENGTH, 18, None)


def test_one_that_outgrew_a_gear_and_was_served_again_is_not_called_complete() -> None:
    rig = Rig(wait_s=30)
    stream = rig.submit(make_request("r/0", (3, 4), 50))
    rig.attach(make_replica(max_context=20)).run()
    rig.ledger.detach_all()
    gear = rig.attach(make_replica())
    gear.answer()
    rig.ledger.detach_all()
    rig.ledger.tick(30.0)
    assert stream.ready()[-1].finish is FinishReason.ERROR


def test_the_wait_for_gpus_begins_anew_after_serving() -> None:
    rig = Rig(wait_s=30)
    stream = rig.submit(make_request("r/0", (3, 4), 50))
    rig.clock.now = 29.0
    gear = rig.attach(make_replica())
    gear.answer()
    rig.ledger.detach_all()
    rig.ledger.tick(58.0)
    assert not rig.ledger.empty
    rig.ledger.tick(59.0)
    assert rig.ledger.empty
    assert stream.ready()[-1].finish is FinishReason.ERROR


def test_waiting_for_gpus_has_a_limit_and_an_error() -> None:
    rig = Rig(wait_s=30)
    gear = rig.attach(make_replica())
    stream = rig.submit(make_request("r/0", (1,), 9))
    gear.answer()
    rig.clock.now = 100.0
    rig.ledger.detach_all()
    rig.ledger.tick(129.9)
    assert not rig.ledger.empty
    rig.ledger.tick(130.0)
    assert rig.ledger.empty
    *_, last = stream.ready()
    assert (last.finish, last.token, last.position) == (FinishReason.ERROR, None, 1)
    assert (last.error, last.code) == ("no GPUs came within 30 s", "no_capacity")
    assert rig.journal == ["+r/0", "-r/0"]


def test_one_that_fits_no_gear_is_told_what_was_missing() -> None:
    rig = Rig(wait_s=5)
    rig.attach(make_replica(max_context=60))
    stream = rig.submit(make_request("r/0", range(30), 9))
    rig.ledger.detach_all()
    rig.attach(make_replica(max_context=20))
    rig.ledger.tick(6)
    assert stream.ready()[-1].error == (
        "no GPUs that hold more than 30 tokens of a sequence came within 5 s"
    )


def test_a_busy_gear_is_no_reason_to_give_up() -> None:
    rig = Rig(wait_s=5)
    gear = rig.attach(make_replica(max_batch=1))
    streams = [rig.submit(make_request(f"r{n}/0", (n,), 9)) for n in range(5)]
    rig.ledger.tick(50.0)
    gear.run()
    assert set(taken(*streams).finish.values()) == {FinishReason.LENGTH}


def test_without_gpus_and_without_waiting_the_answer_is_at_once() -> None:
    rig = Rig(wait_s=0)
    with pytest.raises(NotServing):
        rig.submit(make_request())


def test_abort_ends_events_without_finish_and_frees() -> None:
    rig = Rig()
    gear = rig.attach(make_replica(max_batch=1))
    stream = rig.submit(make_request("r/0", (1,), 9), make_request("r/1", (2,), 3))
    gear.answer()
    rig.ledger.abort(["r/0", "nobody"])
    rig.ledger.check_invariants()
    gear.run()
    events = stream.ready()
    assert {event.seq_id for event in events} == {"r/1"}, "what was not taken is forgotten too"
    assert events[-1].finish is FinishReason.LENGTH
    assert rig.watcher.summaries[0].reason is FinishReason.ABORT
    assert gear.drivers[0].load().free_blocks == 64


def test_an_abort_lets_the_next_one_start_at_once() -> None:
    rig = Rig()
    gear = rig.attach(make_replica(pp=2, max_batch=1))
    for n in range(5):
        rig.submit(make_request(f"r{n}/0", (n,), 9))
    assert len(gear.workers[0].pending) == 1
    rig.ledger.abort(["r0/0"])
    assert [c.seq_id for s in gear.workers[0].pending for c in s.chunks] == ["r0/0", "r1/0"]


def test_stop_ends_all_with_abort_and_refuses_new_ones() -> None:
    rig = Rig()
    gear = rig.attach(make_replica(max_batch=2, max_context=60))
    streams = [rig.submit(make_request(f"r{n}/0", (n,), 9)) for n in range(4)]
    gear.answer()
    rig.ledger.stop("the service ends")
    answers = taken(*streams)
    assert set(answers.finish.values()) == {FinishReason.ABORT}
    assert len(answers.finish) == 4
    with pytest.raises(NotServing, match="the service ends"):
        rig.submit(make_request("late/0"))
    gear.run()
    assert gear.drivers[0].load().free_blocks == 64


def test_cordon_lets_running_ones_finish() -> None:
    rig = Rig()
    gear = rig.attach(make_replica())
    stream = rig.submit(make_request("r/0", (1,), 3))
    rig.ledger.cordon("the service is stopping")
    with pytest.raises(NotServing):
        rig.submit(make_request("r/1"))
    gear.run()
    taken(stream).check(make_request("r/0", (1,), 3))


def test_serving_shows_the_controllers_view_and_the_load() -> None:
    rig = Rig()
    rig.ledger.announce("serving", 7, 3, "two nodes are here")
    gear = rig.attach(make_replica(max_batch=1, kv_blocks=8, max_context=32), make_replica())
    for n in range(3):
        rig.submit(make_request(f"r{n}/0", range(4), 9))
    gear.answer()
    gear.answer()
    serving = rig.ledger.serving()
    assert (serving.state, serving.epoch, serving.gpus) == ("serving", 7, 3)
    assert (serving.running, serving.waiting, serving.replicas) == (3, 0, 2)
    assert serving.kv_used == pytest.approx(6 / 72)
    assert rig.ledger.limits().max_context == 64


def test_a_broken_driver_gets_nothing_more() -> None:
    rig = Rig()
    gear = rig.attach(make_replica(), make_replica())
    gear.drivers[0].broken_reason = "a worker died"
    streams = [rig.submit(make_request(f"r{n}/0", (n,), 3)) for n in range(4)]
    gear.run()
    assert gear.drivers[0].load().steps == 0
    assert len(taken(*streams).finish) == 4


def test_a_token_out_of_place_is_our_bug() -> None:
    rig = Rig()
    rig.attach(make_replica())
    rig.submit(make_request("r/0"))
    with pytest.raises(AssertionError, match="after 0 tokens"):
        rig.ledger.on_event(TokenEvent(seq_id="r/0", token=1, position=1))


# ------------------------------------------------------------------------------------ streams


async def _serve(gear: FakeGear) -> None:
    while True:
        gear.answer()
        await asyncio.sleep(0)


async def _read(stream: Stream, answers: Answers) -> None:
    async for event in stream:
        answers.take(event)


def test_streams_are_read_as_tokens_come() -> None:
    async def main() -> None:
        rig = Rig()
        gear = rig.attach(make_replica())
        engine = asyncio.create_task(_serve(gear))
        requests = [make_request(f"r{n}/0", (n, 2), 8) for n in range(5)]
        answers = Answers()
        async with asyncio.timeout(10):
            await asyncio.gather(*(_read(rig.submit(r), answers) for r in requests))
        engine.cancel()
        for request in requests:
            answers.check(request)

    asyncio.run(main())


def test_cancelling_a_wait_loses_no_event() -> None:
    async def main() -> None:
        rig = Rig()
        gear = rig.attach(make_replica())
        stream = rig.submit(make_request("r/0", (1,), 2))
        waiting = asyncio.create_task(stream.__anext__())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        gear.run()
        answers = Answers()
        await _read(stream, answers)
        answers.check(make_request("r/0", (1,), 2))

    asyncio.run(main())


def test_a_client_that_closes_frees_its_blocks() -> None:
    async def main() -> None:
        rig = Rig()
        gear = rig.attach(make_replica())
        stream = rig.submit(make_request("r/0", range(9), 20), make_request("r/1", range(9), 20))
        waiting = asyncio.create_task(stream.__anext__())
        await asyncio.sleep(0)
        await stream.aclose()
        with pytest.raises(StopAsyncIteration):
            await waiting
        stream.close()
        gear.run()
        assert rig.ledger.empty
        assert gear.drivers[0].load().free_blocks == 64
        assert rig.journal == ["+r/0", "+r/1", "-r/0", "-r/1"]

    asyncio.run(main())


def test_a_stream_that_is_let_go_of_is_closed_at_the_next_tick() -> None:
    rig = Rig()
    gear = rig.attach(make_replica())
    rig.submit(make_request("r/0", range(9), 20))
    gc.collect()
    assert not rig.ledger.empty
    rig.ledger.tick(1.0)
    assert rig.ledger.empty
    gear.run()
    assert gear.drivers[0].load().free_blocks == 64


def test_200_mixed_streams_all_finish_with_the_right_tokens() -> None:
    async def main() -> None:
        rig = Rig(max_waiting=300)
        chance = random.Random(5)
        replicas = [
            make_replica(pp=2, kv_blocks=40, max_batch=12, max_batch_tokens=24),
            make_replica(kv_blocks=24, max_batch=8, max_batch_tokens=16),
        ]
        gear = rig.attach(*replicas, speeds=(200.0, 90.0))
        requests = [
            make_request(
                f"r{n}/0",
                [chance.randrange(23) for _ in range(chance.randint(1, 40))],
                chance.randint(1, 24),
                seed=n,
                stop=(3,) if n % 3 == 0 else (),
                penalty=0.1 * (n % 5 == 0),
            )
            for n in range(200)
        ]
        answers = Answers()
        engine = asyncio.create_task(_serve(gear))
        async with asyncio.timeout(60):
            await asyncio.gather(*(_read(rig.submit(r), answers) for r in requests))
        engine.cancel()
        for request in requests:
            answers.check(request)
        for driver in gear.drivers:
            driver.scheduler.check_invariants()
            assert driver.load().free_blocks == driver.load().blocks
        figures = rig.ledger.figures()
        assert figures.replicas.evictions > 0, "the pools are meant to be too small"
        assert sum(figures.finished.values()) == 200
        assert figures.tokens == sum(len(undisturbed(r)[0]) for r in requests)

    asyncio.run(main())
