"""How many HTTP connections the server holds and for how long; never looks into a request.

A connection costs a descriptor, and a process without descriptors can neither read its files nor
hear its workers. So their number is bounded below the process's limit, one that sends no whole
request in time is closed, and where all places are taken the one that has been idle longest makes
room for the new one.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Iterable
from typing import cast

from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_TIMEOUT_S = 90.0
"""For sending one whole request; longer than an idle connection is kept after its answer."""
_WANTED_DESCRIPTORS = 65_536
_MOST_CONNECTIONS = 16_384


def connection_limit() -> int:
    """Connections that leave descriptors enough for all else; raises our soft limit if it can.

    A quarter of the descriptors, at least, stays for links to workers, logs and files.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = (
        _WANTED_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _WANTED_DESCRIPTORS)
    )
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    have = _WANTED_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
    return max(8, min(_MOST_CONNECTIONS, have * 3 // 4))


class BoundedProtocol(H11Protocol):
    """One connection; `limit` and `request_timeout_s` are set on a subclass for each server."""

    limit = _MOST_CONNECTIONS
    request_timeout_s = REQUEST_TIMEOUT_S

    _idle_since = 0.0
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        self._await_request()
        if len(self.connections) > self.limit:
            idle = longest_idle(c for c in self.connections if isinstance(c, BoundedProtocol))
            (idle or self).transport.abort()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing():
            self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    @property
    def idle(self) -> bool:
        """No request is being answered: none has come, or none has come whole."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    @property
    def idle_since(self) -> float:
        return self._idle_since

    def _await_request(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._idle_since = self.loop.time()
        self._deadline = self.loop.call_later(self.request_timeout_s, self._too_slow)

    def _too_slow(self) -> None:
        if self.idle and not self.transport.is_closing():
            self.transport.abort()


def longest_idle(connections: Iterable[BoundedProtocol]) -> BoundedProtocol | None:
    """The idle connection that has waited longest; None where all are at work."""
    idle = (c for c in connections if c.idle and not c.transport.is_closing())
    return min(idle, key=lambda c: c.idle_since, default=None)
