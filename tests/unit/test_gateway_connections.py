"""Connections that ask nothing: bounded in number and in time, and nobody else suffers."""

from __future__ import annotations

import asyncio
import re
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from gateway_fakes import MODEL, FakeGenerator, in_loop, says, small_text

from flexslurm.gateway import connections
from flexslurm.gateway.api import create_app
from flexslurm.gateway.card import ModelCard
from flexslurm.gateway.metrics import Metrics
from flexslurm.gateway.server import GatewayServer

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


@asynccontextmanager
async def server(limit: int, request_timeout_s: float = 30.0) -> AsyncIterator[GatewayServer]:
    app = create_app(
        FakeGenerator(says("x")), ModelCard(MODEL, "", 1024), small_text(), Metrics(MODEL)
    )
    made = await GatewayServer.start(
        app, "127.0.0.1", 0, connections=limit, request_timeout_s=request_timeout_s
    )
    try:
        yield made
    finally:
        await made.stop(grace_s=0.0)


@asynccontextmanager
async def connected(to: GatewayServer, count: int) -> AsyncIterator[list[Connection]]:
    made = [await asyncio.open_connection("127.0.0.1", to.port) for _ in range(count)]
    try:
        yield made
    finally:
        for _, writer in made:
            writer.transport.abort()


async def ended(connection: Connection) -> bool:
    """Whether the server closes this connection, which takes it less than a second."""
    try:
        async with asyncio.timeout(30.0):
            return await connection[0].read() is not None
    except ConnectionError:
        return True
    except TimeoutError:
        return False


async def status(connection: Connection) -> bytes:
    connection[1].write(HEALTH)
    async with asyncio.timeout(30.0):
        head = await connection[0].readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: ([0-9]+)", head)
        assert length is not None
        await connection[0].readexactly(int(length[1]))
        return head.splitlines()[0]


@in_loop
async def test_the_one_that_is_idle_longest_makes_room() -> None:
    async with server(4) as gateway, connected(gateway, 4) as idle:
        assert b"200" in await status(idle[0])  # so that it is the second that has waited longest
        async with connected(gateway, 1) as late:
            assert b"200" in await status(late[0])
            assert await ended(idle[1])
            assert b"200" in await status(idle[0])
            assert b"200" in await status(idle[2])


@in_loop
@pytest.mark.parametrize(
    "sent", [b"", b"GET /hea", b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{"]
)
async def test_a_request_that_does_not_come_whole_in_time_is_given_up(sent: bytes) -> None:
    async with server(4, 0.2) as gateway, connected(gateway, 1) as slow:
        slow[0][1].write(sent)
        assert await ended(slow[0])


def test_an_answered_connection_has_the_time_anew() -> None:
    async def main() -> None:
        loop, ahead_s = asyncio.get_running_loop(), 0.0
        time = loop.time
        loop.time = lambda: time() + ahead_s  # type: ignore[method-assign]
        async with server(4, 50.0) as gateway, connected(gateway, 1) as kept:
            for _ in range(3):
                assert b"200" in await status(kept[0])
                ahead_s += 40.0
                await asyncio.sleep(0.01)  # what is due is done
            assert b"200" in await status(kept[0])

    asyncio.run(main())


def test_descriptors_are_left_for_all_else(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: told.append(limits))
    for soft, hard, limit, raised in (
        (1024, 4096, 3072, [(4096, 4096)]),
        (256, 256, 192, []),
        (1024, resource.RLIM_INFINITY, 16_384, [(65_536, resource.RLIM_INFINITY)]),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 16_384, []),
    ):
        told.clear()
        monkeypatch.setattr(resource, "getrlimit", lambda _, found=(soft, hard): found)
        assert connections.connection_limit() == limit
        assert told == raised
