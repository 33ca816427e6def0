"""Runs the API inside an event loop that is already there; never touches signals or logging."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from flexslurm.errors import DeadlineExceeded, EnvironmentFault
from flexslurm.gateway.connections import REQUEST_TIMEOUT_S, BoundedProtocol, connection_limit
from flexslurm.gateway.streaming import Lifecycle

BACKLOG = 2048
ACCEPT_BURST = 64
"""Connections taken in one turn of the loop, so that the bound on their number is felt in time."""
KEEP_ALIVE_S = 75
"""Longer than the pools of common clients keep an idle connection, so that they close it first."""
START_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 5.0


class _Embedded(uvicorn.Server):
    """Signals belong to the head's process, not to one of its servers."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class GatewayServer:
    """A running server; made by `start`."""

    def __init__(
        self, server: uvicorn.Server, task: asyncio.Task[None], lifecycle: Lifecycle, port: int
    ) -> None:
        self.port = port
        """The port bound, also where 0 was asked for."""
        self._server = server
        self._task = task
        self._lifecycle = lifecycle

    @classmethod
    async def start(
        cls,
        app: FastAPI,
        host: str,
        port: int,
        *,
        connections: int | None = None,
        request_timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> GatewayServer:
        """Bind and answer. Raises EnvironmentFault where the address cannot be had.

        `connections` is how many are held at once; by default, as many as descriptors allow.
        """
        listener = bind(host, port)
        limit = connection_limit() if connections is None else connections
        bounds = {"limit": limit, "request_timeout_s": request_timeout_s}
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="off",
            ws="none",
            backlog=min(ACCEPT_BURST, max(1, limit // 8)),
            http=type("Protocol", (BoundedProtocol,), bounds),
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(CLOSE_TIMEOUT_S),
        )
        server = _Embedded(config)
        task = asyncio.create_task(server.serve(sockets=[listener]), name="gateway-server")
        try:
            await _started(server, task)
        except BaseException:
            task.cancel()
            listener.close()
            raise
        listener.listen(BACKLOG)  # what the kernel holds, apart from what one turn takes
        lifecycle = app.state.lifecycle
        assert isinstance(lifecycle, Lifecycle)
        return cls(server, task, lifecycle, listener.getsockname()[1])

    async def stop(self, grace_s: float = 5.0, reason: str = "the service is stopping") -> None:
        """Refuse new requests, let running ones end for `grace_s`, then end all connections.

        Streams that are cut get an error event. Idempotent; bounded by `grace_s` and some seconds.
        """
        await self._lifecycle.stop(reason, grace_s)
        self._server.should_exit = True
        done, _ = await asyncio.wait((self._task,), timeout=2 * CLOSE_TIMEOUT_S)
        if not done:
            self._server.force_exit = True
            self._task.cancel()
            await asyncio.wait((self._task,), timeout=CLOSE_TIMEOUT_S)


async def _started(server: uvicorn.Server, task: asyncio.Task[None]) -> None:
    """Raises DeadlineExceeded or EnvironmentFault where it does not come up."""
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            while not server.started:
                if task.done():
                    task.result()
                    raise EnvironmentFault("the API server ended while it started")
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise DeadlineExceeded("the API server did not start in time") from None


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet. Raises EnvironmentFault."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise EnvironmentFault(
            f"gateway.host '{host}' is not an address of this machine: {error.strerror}",
            hint="0.0.0.0 listens at all of them",
        ) from error
    listener = socket.socket(family, kind, proto)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise EnvironmentFault(
            f"cannot bind the API to {host}:{port}: {error.strerror}",
            hint="gateway.port: 0 takes any free port" if port else None,
        ) from error
    return listener
