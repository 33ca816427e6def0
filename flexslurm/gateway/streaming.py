"""Runs one accepted request from its first event to the last byte of its answer.

A *session* reads the generator's events into choices in one task, as fast as they come; the answer
is written by another, as fast as the client reads. So a slow client never holds the generator up,
and what came meanwhile leaves in one write. What waits is bounded by the request's `max_tokens`.
However a session ends, the generator's iterator is closed, which frees the sequences' blocks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from flexslurm.errors import GenerationFailed, NotServing, RequestError
from flexslurm.gateway.answers import Form
from flexslurm.gateway.choice import Choice
from flexslurm.gateway.port import Generator
from flexslurm.gateway.problems import INTERNAL, error_body
from flexslurm.gateway.responses import PING, ErrorAnswer, sse
from flexslurm.messages import SequenceRequest, TokenEvent

SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect the stream
]


class AnswerCounter(Protocol):
    """Told how each choice ended, from the client's point of view."""

    def answered(self, finish_reason: str) -> None: ...


class Lifecycle:
    """Which sessions run, and whether new ones may begin."""

    def __init__(self) -> None:
        self.sessions: set[Session] = set()
        self.stopping: str | None = None
        """Why no new session may begin."""
        self._idle = asyncio.Event()
        self._idle.set()

    def check(self) -> None:
        """Raises NotServing where no new session may begin."""
        if self.stopping is not None:
            raise NotServing(self.stopping)

    def enter(self, session: Session) -> None:
        self.sessions.add(session)
        self._idle.clear()

    def leave(self, session: Session) -> None:
        self.sessions.discard(session)
        if not self.sessions:
            self._idle.set()

    async def stop(self, reason: str, grace_s: float) -> None:
        """Refuse new sessions, let running ones end for `grace_s`, then fail the rest."""
        self.stopping = reason
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:
            for session in list(self.sessions):
                session.fail(NotServing(reason))


class Session:
    """One API request in the generator: its events, its choices, how it ends."""

    def __init__(
        self,
        generator: Generator,
        sequences: Sequence[SequenceRequest],
        choices: Sequence[Choice],
    ) -> None:
        """Submit the sequences. Raises a RequestError if they are not accepted."""
        assert len(sequences) == len(choices)
        self.choices = choices
        self.error: RequestError | None = None
        self.client_gone = False
        self._generator = generator
        self._by_id = {s.seq_id: c for s, c in zip(sequences, choices, strict=True)}
        self._open = len(choices)
        self._changed: dict[int, Choice] = {}
        self._news = asyncio.Event()
        self._pump: asyncio.Task[None] | None = None
        self._events = generator.submit(sequences)

    @property
    def finished(self) -> bool:
        """All choices have ended well."""
        return self._open == 0 and self.error is None

    @property
    def over(self) -> bool:
        return self.finished or self.client_gone or self.error is not None or self.broken

    @property
    def broken(self) -> bool:
        """The pump met a bug of ours; `running` raises it."""
        pump = self._pump
        return pump is not None and pump.done() and not self.finished and self.error is None

    def fail(self, error: RequestError) -> None:
        """End the session with an error, the first one if there are several."""
        if self.error is None:
            self.error = error
        self._news.set()

    def changed(self) -> list[Choice]:
        """The choices with news since the last call."""
        changed = list(self._changed.values())
        self._changed.clear()
        return changed

    async def news(self, timeout_s: float | None) -> bool:
        """Wait until something has changed; False if nothing has in `timeout_s`."""
        if not self._news.is_set():
            try:
                async with asyncio.timeout(timeout_s):
                    await self._news.wait()
            except TimeoutError:
                if not self._news.is_set():  # it may come in the turn in which the time is up
                    return False
        self._news.clear()
        return True

    @asynccontextmanager
    async def running(self, receive: Receive) -> AsyncIterator[None]:
        """Read events, and watch the client, while the block runs; then close everything."""
        pump = asyncio.create_task(self._read_events(), name="gateway-pump")
        watch = asyncio.create_task(self._watch_client(receive), name="gateway-watch")
        pump.add_done_callback(lambda _: self._news.set())
        self._pump = pump
        try:
            yield
        finally:
            pump.cancel()
            watch.cancel()
            await asyncio.wait((pump, watch))
        if not pump.cancelled():
            pump.result()

    async def _read_events(self) -> None:
        try:
            async for event in self._events:
                self._take(event)
                if self._open == 0 or self.error is not None:
                    return
            self.fail(GenerationFailed("the answer ended without its end"))
        except RequestError as error:
            self.fail(error)
        finally:
            await _close(self._events)

    def _take(self, event: TokenEvent) -> None:
        choice = self._by_id[event.seq_id]
        ended = choice.push(event)
        if choice.must_abort:
            choice.must_abort = False
            self._generator.abort([event.seq_id])
        if choice.error is not None:
            self.fail(choice.error)
        elif ended:
            self._open -= 1
        if choice.has_news:
            self._changed[choice.index] = choice
            self._news.set()

    async def _watch_client(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.client_gone = True
        self._news.set()


async def _close(events: AsyncIterator[TokenEvent]) -> None:
    close: Callable[[], Awaitable[None]] | None = getattr(events, "aclose", None)
    if close is not None:
        await close()


class Answer(Response):
    """Submits a request, and writes its answer as it comes or all at once.

    Submitting happens when the response is sent for, so that whatever is opened here is closed
    here; a RequestError before the first byte becomes an error answer like any other.
    """

    def __init__(
        self,
        open_session: Callable[[], Session],
        form: Form,
        *,
        stream: bool,
        ping_s: float,
        lifecycle: Lifecycle,
        counter: AnswerCounter,
    ) -> None:
        super().__init__()
        self._open_session = open_session
        self._form = form
        self._stream = stream
        self._ping_s = ping_s
        self._lifecycle = lifecycle
        self._counter = counter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._lifecycle.check()
        session = self._open_session()
        self._lifecycle.enter(session)
        try:
            async with session.running(receive):
                if self._stream:
                    await self._write_stream(session, send)
                else:
                    while not session.over:
                        await session.news(None)
            if not self._stream and not session.client_gone:
                await self._write_whole(session, scope, receive, send)
        finally:
            self._lifecycle.leave(session)
            self._count(session)

    def _count(self, session: Session) -> None:
        failed = "abort" if session.client_gone else "error"
        for choice in session.choices:
            self._counter.answered(choice.finish_reason or failed)

    async def _write_whole(
        self, session: Session, scope: Scope, receive: Receive, send: Send
    ) -> None:
        if session.error is not None:
            raise session.error
        body = self._form.whole(session.choices)
        await Response(body, media_type="application/json")(scope, receive, send)

    async def _write_stream(self, session: Session, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": SSE_HEADERS})
        while True:
            woken = await session.news(self._ping_s)
            if session.client_gone:
                return
            over = session.over
            data = self._next_bytes(session) if woken or over else PING
            if data or over:
                await send({"type": "http.response.body", "body": data, "more_body": not over})
            if over:
                return

    def _next_bytes(self, session: Session) -> bytes:
        """All that is new. An error ends a stream without `[DONE]`, which means success."""
        over = session.over
        parts = [
            self._form.chunk(choice, choice.take(), session.choices) for choice in session.changed()
        ]
        if session.error is not None:
            parts.append(sse(ErrorAnswer(error_body(session.error))))
        elif session.finished:
            parts.append(self._form.closing(session.choices))
        elif over:
            parts.append(sse(ErrorAnswer(INTERNAL)))
        return b"".join(parts)
