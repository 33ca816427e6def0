"""A stream and a shift at every turn of the loop: no order of what is ready loses a token.

The gateway's session reads a real ledger's stream while its keep-alive fires, a gear goes, and
another comes; each of the three at every turn of the loop.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from fake_replica import FakeGear, make_replica, make_request, undisturbed

from flexslurm.gateway import streaming
from flexslurm.gateway.choice import Choice, ChoiceDelta, EndRules
from flexslurm.gateway.responses import PING
from flexslurm.gateway.streaming import Answer, Lifecycle, Session
from flexslurm.head.ledger import Ledger, LedgerSettings
from flexslurm.messages import SequenceRequest

TURNS = 9


class Letters:
    """A detokenizer: one word for each token."""

    def push(self, token: int) -> str:
        return f"{token} "

    def finish(self) -> str:
        return ""


class Plain:
    """A form of answers that is only its text."""

    def chunk(self, choice: Choice, piece: ChoiceDelta, choices: Sequence[Choice]) -> bytes:
        return piece.text.encode()

    def closing(self, choices: Sequence[Choice]) -> bytes:
        return b"END"

    def whole(self, choices: Sequence[Choice]) -> bytes:
        return b"".join(choice.take().text.encode() for choice in choices) + b"END"


class Counter:
    def answered(self, finish_reason: str) -> None:
        assert finish_reason == "length"


def after(turns: int, act: Callable[[], object]) -> None:
    """Do this after so many turns of the loop."""
    loop = asyncio.get_running_loop()

    def turn(left: int) -> None:
        if left:
            loop.call_soon(turn, left - 1)
        else:
            act()

    turn(turns)


async def one_stream(request: SequenceRequest, *, goes: int, comes: int, stream: bool) -> bytes:
    """What the client gets where the first gear goes and the next one comes after so many turns."""
    ledger = Ledger(LedgerSettings(model_context=64))
    gears: list[FakeGear] = []
    over = False

    def attach() -> None:
        gears.append(FakeGear(len(gears) + 1, [make_replica()], 4, ledger.on_event))
        ledger.attach(gears[-1].drivers)

    def serve() -> None:
        if not over:
            gears[-1].answer()
            after(1, serve)

    attach()
    after(goes, lambda: ledger.detach([0]))
    after(goes + comes, attach)
    after(1, serve)
    parts: list[bytes] = []

    async def send(message: Any) -> None:
        await asyncio.sleep(0)
        if message["type"] == "http.response.body":
            parts.append(message.get("body", b""))

    async def receive() -> Any:
        await asyncio.Event().wait()

    choices = [Choice(0, Letters(), EndRules())]  # type: ignore[arg-type]
    answer = Answer(
        lambda: Session(ledger, [request], choices),
        Plain(),  # type: ignore[arg-type]
        stream=stream, ping_s=1.0, lifecycle=Lifecycle(), counter=Counter(),
    )  # fmt: skip
    try:
        await answer({"type": "http", "method": "POST", "headers": []}, receive, send)
    finally:
        over = True
    ledger.check_invariants()
    assert ledger.empty
    return b"".join(parts).replace(PING, b"")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("tokens", [1, 3])
def test_no_turn_of_the_loop_loses_a_token(
    monkeypatch: pytest.MonkeyPatch, tokens: int, stream: bool
) -> None:
    request = make_request("r/0", (1, 2), tokens)
    wanted = "".join(f"{token} " for token in undisturbed(request)[0]).encode() + b"END"
    pinged = 0
    real = asyncio.timeout

    def timeout(seconds: float | None) -> asyncio.Timeout:
        """One that fires after `turns` of the loop."""
        made = real(None)

        def fire() -> None:
            nonlocal pinged
            if made._state is asyncio.timeouts._State.ENTERED:
                pinged += 1
                made.reschedule(0.0)

        if seconds is not None:
            after(turns, fire)
        return made

    monkeypatch.setattr(streaming.asyncio, "timeout", timeout)
    for turns, goes, comes in itertools.product(range(TURNS), range(TURNS), (0, 1, 2, 5)):
        got = asyncio.run(one_stream(request, goes=goes, comes=comes, stream=stream))
        assert got == wanted, (turns, goes, comes)
    assert pinged or not stream, "no keep-alive came in between"
