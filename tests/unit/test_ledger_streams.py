"""Streams of the ledger: read as tokens come, closed, cancelled, let go of, many at once."""

from __future__ import annotations

import asyncio
import gc
import random

import pytest
from fake_replica import Answers, FakeGear, make_replica, make_request, undisturbed
from ledger_rig import Rig

from flexslurm.head.stream import Stream


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
        async with asyncio.timeout(200):
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
        async with asyncio.timeout(200):
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
