"""The ledger: accepted once, ended once; places are given in order, ends are told."""

from __future__ import annotations

import pytest
from fake_replica import make_replica, make_request
from ledger_rig import Rig, taken

from flexslurm.errors import ContextTooLong, InvalidRequest, NotServing, Overloaded
from flexslurm.gateway.port import Generator
from flexslurm.messages import FinishReason, ServiceState, TokenEvent


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
    rig.detach_all()
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
    rig.ledger.announce(ServiceState.SERVING, 7, 3, "two nodes are here")
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
