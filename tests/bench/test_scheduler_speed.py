"""What a step costs in the head: schedule, encode, complete, and its tokens on their way."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import msgspec
import pytest
from fake_replica import make_replica, make_request

from flexslurm.engine.driver import Driver, Hooks
from flexslurm.engine.scheduler import Scheduler
from flexslurm.head.ledger import Ledger, LedgerSettings
from flexslurm.messages import Message, SampledToken, Step, StepDone, TokenEvent

CONTEXT = 8192
BLOCK = 256


def _replica(running: int, pp: int = 1):  # type: ignore[no-untyped-def]
    return make_replica(
        pp=pp,
        kv_blocks=running * CONTEXT // BLOCK,
        max_batch=running,
        max_batch_tokens=8192,
        max_context=CONTEXT,
    )


def _report(name: str, running: int, times_s: list[float]) -> float:
    median_us = statistics.median(times_s) * 1e6
    worst_us = max(times_s) * 1e6
    print(f"\n{name}, {running} running: {median_us:.0f} µs a step (worst {worst_us:.0f})", end="")
    return median_us


def _decode_steps(scheduler: Scheduler, after: Callable[[Step], None], steps: int) -> list[float]:
    """Times of schedule + encode of decode steps, the answers not counted."""
    encoder = msgspec.msgpack.Encoder()
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        batch = scheduler.schedule()
        assert batch is not None
        step = Step(epoch=1, replica=0, step=batch.step, chunks=batch.chunks)
        encoder.encode(step)
        times.append(time.perf_counter() - began)
        after(step)
    return times


@pytest.mark.parametrize(("running", "target_us"), [(64, 1000.0), (256, 4000.0)])
def test_schedule_and_encode(running: int, target_us: float) -> None:
    scheduler = Scheduler(_replica(running), BLOCK)
    for n in range(running):
        scheduler.add(make_request(f"request-{n}/0", range(4000), 1000, arrival=n, seed=n))

    def answer(step: Step) -> None:
        sampled = [SampledToken(c.seq_id, 7) for c in step.chunks if c.sample is not None]
        scheduler.complete(step.step, sampled)

    while scheduler.load().waiting or scheduler._roster.prefilling:
        _decode_steps(scheduler, answer, 1)
    times_s = _decode_steps(scheduler, answer, 200)
    assert _report("schedule + encode", running, times_s) < target_us


@pytest.mark.parametrize(("running", "target_us"), [(64, 2000.0), (256, 8000.0)])
def test_the_whole_way_of_a_steps_tokens(running: int, target_us: float) -> None:
    """From StepDone to the next Step encoded and all events with their streams."""
    ledger = Ledger(LedgerSettings(model_context=CONTEXT, max_waiting=running))
    encoder = msgspec.msgpack.Encoder()
    steps: list[Step] = []

    def send(workers: tuple[str, ...], message: Message) -> None:
        assert isinstance(message, Step)
        encoder.encode(message)
        steps.append(message)

    def emit(event: TokenEvent) -> None:
        ledger.on_event(event)

    driver = Driver(
        1,
        0,
        _replica(running),
        BLOCK,
        ("w",),
        Hooks(send=send, emit=emit, broken=pytest.fail, now=time.monotonic),
    )
    ledger.attach([driver])
    streams = [
        ledger.submit([make_request(f"request-{n}/0", range(300), 1000, seed=n)])
        for n in range(running)
    ]
    times_s = []
    while len(times_s) < 200:
        step = steps.pop()
        tokens = tuple(SampledToken(c.seq_id, 7) for c in step.chunks if c.sample is not None)
        done = StepDone(worker="w", epoch=1, replica=0, step=step.step, tokens=tokens)
        began = time.perf_counter()
        driver.on_step_done(done)
        if len(tokens) == running:
            times_s.append(time.perf_counter() - began)
    assert all(stream.ready() for stream in streams)
    assert _report("answer to next step and events", running, times_s) < target_us
