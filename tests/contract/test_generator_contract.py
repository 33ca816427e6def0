"""What every `gateway.port.Generator` must do: the fake of the gateway's tests, and the ledger."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import pytest
from fake_replica import FakeWorkers, make_replica, make_request, undisturbed
from gateway_fakes import FakeGenerator, in_loop

from flexslurm.errors import ContextTooLong
from flexslurm.gateway.port import Generator
from flexslurm.head.ledger import Ledger, LedgerSettings
from flexslurm.messages import FinishReason, SequenceRequest, ServiceState, TokenEvent

CONTEXT = 64


class Rig(Protocol):
    """An implementation that holds 64 tokens a sequence, and the hand that drives it.

    Its sequences' answers are those of `fake_replica.undisturbed`.
    """

    generator: Generator

    def step(self) -> None:
        """Let every running sequence get a token, or come nearer to one."""
        ...


class FakeRig:
    def __init__(self) -> None:
        self.fake = FakeGenerator(
            lambda request, position: undisturbed(request)[0][position],
            context=CONTEXT,
            model_context=1024,
            manual=True,
        )
        self.generator: Generator = self.fake

    def step(self) -> None:
        self.fake.step()


class LedgerRig:
    def __init__(self) -> None:
        self.ledger = Ledger(LedgerSettings(model_context=1024))
        replica = make_replica(max_context=CONTEXT)
        self.workers = FakeWorkers(1, 0, replica, 16, self.ledger.on_event)
        self.ledger.announce(ServiceState.SERVING, 1, 1, "a test")
        self.ledger.attach([self.workers.driver])
        self.generator: Generator = self.ledger

    def step(self) -> None:
        self.workers.answer()
        self.ledger.check_invariants()


Make = Callable[[], Rig]


@pytest.fixture(params=[FakeRig, LedgerRig])
def make(request: pytest.FixtureRequest) -> Make:
    """Makes a rig; called inside the test's event loop."""
    made: Make = request.param
    return made


async def read_all(rig: Rig, requests: list[SequenceRequest]) -> list[TokenEvent]:
    """Step until the iterator ends."""
    events = rig.generator.submit(requests)
    found: list[TokenEvent] = []

    async def read() -> None:
        async for event in events:
            found.append(event)

    reader = asyncio.create_task(read())
    await run_until(rig, reader.done)
    await reader
    return found


async def run_until(rig: Rig, condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        rig.step()
        await asyncio.sleep(0)
    raise AssertionError("it never came to its end")


def busy(rig: Rig) -> int:
    now = rig.generator.serving()
    return now.running + now.waiting


async def aclose(events: object) -> None:
    await events.aclose()  # type: ignore[attr-defined]


@in_loop
async def test_each_sequence_counts_from_zero_and_ends_once(make: Make) -> None:
    rig = make()
    requests = [make_request(f"a/{i}", (1, 2, i), 5 + i, seed=i) for i in range(3)]
    events = await read_all(rig, requests)
    for request in requests:
        own = [event for event in events if event.seq_id == request.seq_id]
        tokens = [event.token for event in own if event.token is not None]
        answer, finish = undisturbed(request)
        assert tokens == answer
        assert [e.position for e in own if e.token is not None] == list(range(len(tokens)))
        assert [event.finish for event in own if event.finish] == [finish]
        assert own[-1].finish is finish
    assert {event.seq_id for event in events} == {request.seq_id for request in requests}
    assert busy(rig) == 0


@in_loop
async def test_a_stop_token_is_given_with_the_end(make: Make) -> None:
    rig = make()
    free = undisturbed(make_request("b/0", max_tokens=20))[0]
    request = make_request("b/0", max_tokens=20, stop=(free[4],))
    events = await read_all(rig, [request])
    assert [event.token for event in events if event.token is not None][-1] == free[4]
    assert events[-1].finish is FinishReason.STOP


@in_loop
async def test_min_tokens_holds_a_stop_token_back(make: Make) -> None:
    rig = make()
    free = undisturbed(make_request("b/1", max_tokens=20))[0]
    request = make_request("b/1", max_tokens=20, stop=(free[0],), min_tokens=6)
    events = await read_all(rig, [request])
    assert len([event for event in events if event.token is not None]) > 6


@in_loop
async def test_all_or_none_are_accepted_in_the_call_itself(make: Make) -> None:
    rig = make()
    good, bad = make_request("c/0"), make_request("c/1", range(1, 21), CONTEXT)
    with pytest.raises(ContextTooLong):
        rig.generator.submit([good, bad])
    assert busy(rig) == 0


@in_loop
async def test_what_is_accepted_is_counted(make: Make) -> None:
    rig = make()
    events = rig.generator.submit([make_request("d/0"), make_request("d/1")])
    assert busy(rig) == 2
    await aclose(events)


@in_loop
async def test_closing_before_the_first_event_frees_all(make: Make) -> None:
    rig = make()
    events = rig.generator.submit([make_request("e/0"), make_request("e/1")])
    await aclose(events)
    await run_until(rig, lambda: busy(rig) == 0)
    with pytest.raises(StopAsyncIteration):
        await anext(events)


@in_loop
async def test_closing_in_the_middle_frees_all(make: Make) -> None:
    rig = make()
    events = rig.generator.submit([make_request("f/0", max_tokens=50)])
    first = asyncio.ensure_future(anext(events))
    await run_until(rig, first.done)
    await aclose(events)
    await run_until(rig, lambda: busy(rig) == 0)


@in_loop
async def test_an_aborted_sequence_falls_silent_and_the_others_go_on(make: Make) -> None:
    rig = make()
    short, long = make_request("g/0", max_tokens=50), make_request("g/1", (4, 5), max_tokens=8)
    events = rig.generator.submit([short, long])
    found: list[TokenEvent] = []

    async def read() -> None:
        async for event in events:
            found.append(event)
            if event.seq_id == short.seq_id:
                rig.generator.abort([short.seq_id])

    reader = asyncio.create_task(read())
    await run_until(rig, reader.done)
    await reader
    assert not [event for event in found if event.seq_id == short.seq_id and event.finish]
    assert [event.finish for event in found if event.seq_id == long.seq_id][-1] is (
        undisturbed(long)[1]
    )
    assert busy(rig) == 0


@in_loop
async def test_aborting_all_ends_the_iterator(make: Make) -> None:
    rig = make()
    events = rig.generator.submit([make_request("h/0")])
    waiting = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0)
    rig.generator.abort(["h/0", "nobody/0"])
    with pytest.raises(StopAsyncIteration):
        await waiting
    rig.generator.abort(["h/0"])


@in_loop
async def test_a_cancelled_wait_loses_nothing(make: Make) -> None:
    rig = make()
    request = make_request("i/0", max_tokens=3)
    events = rig.generator.submit([request])
    waiting = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait((waiting,))
    tokens: list[int | None] = []

    async def read() -> None:
        async for event in events:
            tokens.append(event.token)

    reader = asyncio.create_task(read())
    await run_until(rig, reader.done)
    await reader
    assert [token for token in tokens if token is not None] == undisturbed(request)[0]


@in_loop
async def test_limits_are_those_of_the_gear_and_of_the_model(make: Make) -> None:
    limits = make().generator.limits()
    assert (limits.max_context, limits.model_context) == (CONTEXT, 1024)
