"""The driver: steps to all workers, answers matched by step, silence and failures reported once."""

from __future__ import annotations

import subprocess
import sys

import pytest
from fake_replica import Answers, FakeWorkers, make_replica, make_request, undisturbed

from flexslurm.engine.driver import Driver, Hooks
from flexslurm.gear import Replica
from flexslurm.messages import Message, SampledToken, Step, StepDone, StepFailed, TokenEvent


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Rig:
    def __init__(self, replica: Replica | None = None, epoch: int = 3) -> None:
        self.clock = Clock()
        self.answers = Answers()
        replica = replica or make_replica(pp=2, tp=2)
        self.workers = FakeWorkers(epoch, 0, replica, 4, self.answers.take, self.clock)
        self.driver = self.workers.driver


def test_all_workers_get_all_steps_in_order() -> None:
    rig = Rig()
    for n in range(5):
        rig.driver.submit(make_request(f"s{n}", (n, 1), 6, arrival=n))
    assert rig.driver.pump() == 1
    while rig.workers.answer():
        pass
    inboxes = list(rig.workers.inboxes.values())
    assert len(inboxes) == 4
    assert all(inbox == inboxes[0] for inbox in inboxes)
    steps = [m.step for m in inboxes[0] if isinstance(m, Step)]
    assert steps == list(range(len(steps)))
    freed = [block for m in inboxes[0] for block in (m.freed if isinstance(m, Step) else m.blocks)]
    assert len(freed) == 5 * 2, "five sequences of two blocks each"
    for n in range(5):
        rig.answers.check(make_request(f"s{n}", (n, 1), 6))
    assert rig.driver.idle and rig.driver.load().free_blocks == 64


def test_a_step_is_sent_to_all_workers_at_once() -> None:
    sent: list[tuple[tuple[str, ...], Message]] = []
    driver = Driver(
        1,
        0,
        make_replica(tp=2),
        4,
        ("a", "b"),
        Hooks(
            send=lambda workers, message: sent.append((workers, message)),
            emit=lambda event: None,
            broken=pytest.fail,
            now=lambda: 0.0,
        ),
    )
    driver.submit(make_request())
    driver.pump()
    assert [workers for workers, _ in sent] == [("a", "b")]


def test_the_next_step_goes_out_before_the_events_of_the_last() -> None:
    order: list[str] = []
    driver = Driver(
        1,
        0,
        make_replica(),
        4,
        ("w",),
        Hooks(
            send=lambda workers, message: order.append("step"),
            emit=lambda event: order.append("event"),
            broken=pytest.fail,
            now=lambda: 0.0,
        ),
    )
    driver.submit(make_request())
    driver.pump()
    done = StepDone(worker="w", epoch=1, replica=0, step=0, tokens=(SampledToken("r/0", 5),))
    driver.on_step_done(done)
    assert order == ["step", "step", "event"]


def test_answers_of_other_epochs_replicas_and_closed_drivers_are_dropped() -> None:
    rig = Rig()
    rig.driver.submit(make_request())
    rig.driver.pump()
    done = rig.workers.done(rig.workers.pending[0])
    stale = StepDone(worker=done.worker, epoch=2, replica=0, step=0, tokens=done.tokens)
    other = StepDone(worker=done.worker, epoch=3, replica=1, step=0, tokens=done.tokens)
    rig.driver.on_step_done(stale)
    rig.driver.on_step_done(other)
    rig.driver.on_step_failed(StepFailed(worker=done.worker, epoch=2, step=0, reason="late"))
    rig.driver.on_step_failed(StepFailed(worker="stranger", epoch=3, step=0, reason="who"))
    assert rig.answers.tokens == {} and rig.workers.broken == []
    rig.driver.close()
    rig.driver.on_step_done(done)
    assert rig.answers.tokens == {}
    assert rig.driver.dropped == 5
    assert rig.driver.pump() == 0


def test_close_gives_what_is_left_by_arrival_and_another_driver_goes_on() -> None:
    rig = Rig(make_replica(max_batch=2))
    requests = [make_request(f"s{n}", (n, 1), 6, arrival=9 - n) for n in range(4)]
    for request in requests:
        rig.driver.submit(request)
    rig.driver.pump()
    for _ in range(3):
        rig.workers.answer()
    live = rig.driver.close()
    assert [s.request.seq_id for s in live] == ["s3", "s2", "s1", "s0"]
    assert [len(s.output) for s in live] == [3, 3, 0, 0]
    after = FakeWorkers(4, 0, make_replica(pp=3), 2, rig.answers.take)
    for sequence in live:
        after.driver.submit(sequence.request, sequence.output)
    after.driver.pump()
    while after.answer():
        pass
    for request in requests:
        rig.answers.check(request)


def test_a_failed_step_is_reported_once_and_ends_sending() -> None:
    rig = Rig()
    rig.driver.submit(make_request())
    rig.driver.pump()
    worker = rig.driver.workers[1]
    failed = StepFailed(worker=worker, epoch=3, step=0, reason="peer is gone")
    rig.driver.on_step_failed(failed)
    rig.driver.on_step_failed(failed)
    assert rig.workers.broken == [f"worker {worker} failed in step 0: peer is gone"]
    assert not rig.driver.serving
    rig.driver.submit(make_request("later"))
    assert rig.driver.pump() == 0
    assert [s.request.seq_id for s in rig.driver.close()] == ["later", "r/0"]


def test_an_answer_nobody_asked_for_breaks_the_replica() -> None:
    rig = Rig()
    rig.driver.submit(make_request())
    rig.driver.pump()
    name = rig.driver.workers[-1]
    rig.driver.on_step_done(StepDone(worker=name, epoch=3, replica=0, step=5, tokens=()))
    assert rig.workers.broken == [f"worker {name}: step 5 is answered, but it is not in flight"]


def test_silence_counts_from_the_last_answer() -> None:
    rig = Rig(make_replica(pp=2))
    rig.driver.tick(1e9)
    assert rig.workers.broken == [], "nothing is asked"
    for n in range(4):
        rig.driver.submit(make_request(f"s{n}", (n,), 9, arrival=n))
    rig.driver.pump()
    rig.workers.answer()
    assert len(rig.workers.pending) == 2
    rig.clock.now += 50
    rig.driver.tick(rig.clock.now)
    rig.workers.answer()
    rig.clock.now += 59
    rig.driver.tick(rig.clock.now)
    assert rig.workers.broken == []
    rig.clock.now += 2
    rig.driver.tick(rig.clock.now)
    rig.driver.tick(rig.clock.now + 100)
    assert rig.workers.broken == ["step 2 was not answered within 61.0 s"]


def test_idle_time_is_not_silence() -> None:
    rig = Rig(make_replica())
    rig.driver.submit(make_request("a", max_tokens=1))
    rig.driver.pump()
    rig.workers.answer()
    rig.clock.now += 1000
    rig.driver.submit(make_request("b", max_tokens=1))
    rig.driver.pump()
    rig.driver.tick(rig.clock.now + 1)
    assert rig.workers.broken == []


def test_pause_stops_at_a_step_boundary() -> None:
    rig = Rig(make_replica(pp=2))
    for n in range(4):
        rig.driver.submit(make_request(f"s{n}", (n,), 9, arrival=n))
    rig.driver.pump()
    rig.workers.answer()
    rig.driver.pause()
    assert not rig.driver.idle
    while rig.workers.answer():
        pass
    assert rig.driver.idle
    assert rig.driver.pump() == 0
    rig.driver.resume()
    assert len(rig.workers.pending) == 2
    while rig.workers.answer():
        pass
    assert len(rig.answers.finish) == 4


def test_what_waits_for_reserved_blocks_starts_when_they_come_back() -> None:
    rig = Rig(make_replica(kv_blocks=4))
    assert rig.driver.reserve("moved", 3) is not None
    rig.driver.submit(make_request("waits", range(8), 3))
    assert rig.driver.pump() == 0
    rig.driver.release("moved")  # and nothing else happens that would start it
    while rig.workers.answer():
        pass
    assert set(rig.answers.finish) == {"waits"}


def test_step_times_are_measured() -> None:
    rig = Rig(make_replica())
    rig.driver.submit(make_request(max_tokens=3))
    rig.driver.pump()
    for took_s in (1.0, 2.0, 3.0):
        rig.clock.now += took_s
        rig.workers.answer()
    times = rig.driver.step_times
    assert (times.count, times.last_s, times.mean_s) == (3, 3.0, 2.0)
    assert times.compute_s == pytest.approx(0.001)


def test_an_abort_from_the_client_frees_the_blocks() -> None:
    rig = Rig(make_replica())
    rig.driver.submit(make_request(prompt=range(9), max_tokens=20))
    rig.driver.pump()
    rig.workers.answer()
    assert rig.driver.abort("r/0")
    rig.workers.answer()
    assert rig.driver.load().free_blocks == 64
    assert rig.driver.close() == []


def test_closing_from_within_an_event_is_our_bug() -> None:
    def emit(event: TokenEvent) -> None:
        workers.driver.close()

    workers = FakeWorkers(1, 0, make_replica(), 4, emit)
    workers.driver.submit(make_request())
    workers.driver.pump()
    with pytest.raises(AssertionError, match="from within an event"):
        workers.answer()


def test_the_fake_replica_sees_a_wrong_block_table() -> None:
    """The oracle can fail: two sequences over one block give other tokens."""
    request = make_request(prompt=(1, 2, 3), max_tokens=2)
    workers = FakeWorkers(1, 0, make_replica(), 4, lambda event: None)
    workers.driver.submit(request)
    workers.driver.pump()
    workers.answer()
    workers.engine.cells[(0, 1)] = 22
    step = workers.pending[0]
    token = workers.engine.run(step.chunks)[0].token
    assert token != undisturbed(request)[0][1]


def test_the_driver_imports_no_torch() -> None:
    code = (
        "import sys, flexslurm.engine.driver, flexslurm.head.ledger; print('torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
