"""The ledger where gears come and go: the same tokens, and waits that have an end."""

from __future__ import annotations

import pytest
from fake_replica import FakeGear, make_replica, make_request, undisturbed
from ledger_rig import Rig, taken

from flexslurm.errors import ContextTooLong, NotServing
from flexslurm.messages import FinishReason


def test_detached_sequences_go_on_with_the_tokens_they_have() -> None:
    rig = Rig(max_waiting=50)
    gear = rig.attach(make_replica(pp=2, max_batch=3))
    requests = [make_request(f"r{n}/0", range(n, n + 5), 9, penalty=n % 2) for n in range(6)]
    streams = [rig.submit(request) for request in requests]
    for _ in range(7):
        gear.answer()
    live = rig.detach_all()
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
    rig.detach_all()
    rig.attach(make_replica(max_context=20)).run()
    answers = taken(*streams)
    answers.check(short)
    assert "long/0" not in answers.finish
    assert rig.ledger.figures().unfit == 1
    with pytest.raises(ContextTooLong):
        rig.submit(make_request("other/0", range(30), 9))
    rig.detach_all()
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
    rig.detach_all()
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
    rig.detach_all()
    gear = rig.attach(make_replica())
    gear.answer()
    rig.detach_all()
    rig.ledger.tick(30.0)
    assert stream.ready()[-1].finish is FinishReason.ERROR


def test_the_wait_for_gpus_begins_anew_after_serving() -> None:
    rig = Rig(wait_s=30)
    stream = rig.submit(make_request("r/0", (3, 4), 50))
    rig.clock.now = 29.0
    gear = rig.attach(make_replica())
    gear.answer()
    rig.detach_all()
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
    rig.detach_all()
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
    rig.detach_all()
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
