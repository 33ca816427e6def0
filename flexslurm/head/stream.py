"""The events of one API request on their way to its client; never drops, repeats or reorders one.

The ledger holds the `EventChannel`, the client the `Stream`: a client that goes away without
closing its stream lets it be collected, and that counts as closing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from flexslurm.messages import TokenEvent


class EventChannel:
    """Events that the client has not taken yet, and the sequences that may still give some.

    Its bound is the number of tokens the sequences may reach, which `max_tokens` limits.
    """

    __slots__ = ("bound", "events", "open", "waiter")

    def __init__(self, seq_ids: Sequence[str], bound: int) -> None:
        self.open = set(seq_ids)
        self.bound = bound
        self.events: deque[TokenEvent] = deque()
        self.waiter: asyncio.Future[None] | None = None

    def put(self, event: TokenEvent) -> None:
        """Add an event of an open sequence; one with `finish` closes it."""
        assert event.seq_id in self.open, f"an event of {event.seq_id} after its end: {event}"
        assert len(self.events) < self.bound, f"more events than tokens: {len(self.events)}"
        self.events.append(event)
        if event.finish is not None:
            self.open.discard(event.seq_id)
        self._wake()

    def drop(self, seq_id: str) -> None:
        """Close a sequence without an event, and forget those of it that were not taken."""
        self.open.discard(seq_id)
        self.events = deque(event for event in self.events if event.seq_id != seq_id)
        self._wake()

    def _wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


class Stream:
    """The client's end: an asynchronous iterator over events, for one reader.

    `close` (or `aclose`) has the ledger abort what still runs; a stream that is let go of leaves
    its sequences in `abandoned`. Cancelling a wait for the next event loses nothing.
    """

    def __init__(
        self,
        channel: EventChannel,
        abort: Callable[[Sequence[str]], None],
        abandoned: deque[str],
    ) -> None:
        self._channel = channel
        self._abort = abort
        self._abandoned = abandoned
        self._closed = False

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> TokenEvent:
        channel = self._channel
        while not channel.events:
            if self._closed or not channel.open:
                raise StopAsyncIteration
            assert channel.waiter is None, "two readers of one stream"
            channel.waiter = asyncio.get_running_loop().create_future()
            try:
                await channel.waiter
            finally:
                channel.waiter = None
        return channel.events.popleft()

    def ready(self) -> list[TokenEvent]:
        """Take all events that are there, without waiting."""
        events = list(self._channel.events)
        self._channel.events.clear()
        return events

    def close(self) -> None:
        """Abort what still runs; no further event is given. Idempotent."""
        if self._closed:
            return
        self._closed = True
        channel = self._channel
        channel.events.clear()
        self._abort(sorted(channel.open))
        if channel.waiter is not None and not channel.waiter.done():
            channel.waiter.set_result(None)

    async def aclose(self) -> None:
        self.close()

    def __del__(self) -> None:
        # May run at any moment, in the middle of the ledger's work too: only leaves a note.
        if not self._closed and self._channel.open:
            self._abandoned.extend(self._channel.open)
