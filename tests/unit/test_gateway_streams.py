"""How requests end when not all goes well: clients that leave, errors, silence, shutdown."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest
from gateway_fakes import MODEL, FakeGenerator, Running, gateway, in_loop, says, small_text

from flexslurm.errors import EnvironmentFault
from flexslurm.gateway.card import Bounds
from flexslurm.gateway.server import bind
from flexslurm.messages import FinishReason, SequenceRequest

PATH = "/v1/completions"
LONG = "a stream of tokens is a stream of text, and no stream is broken " * 4


def raw_request(body: dict[str, Any], path: str = PATH) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


@asynccontextmanager
async def connect(
    g: Running, body: dict[str, Any], path: str = PATH
) -> AsyncIterator[asyncio.StreamReader]:
    """Send a request on a connection that is closed when the block ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", g.server.port)
    try:
        writer.write(raw_request(body, path))
        yield reader
    finally:
        writer.close()
        await writer.wait_closed()


def metrics_page(g: Running) -> str:
    return g.metrics.exposition("")[0].decode()


def events_of(text: str) -> list[str]:
    return [block for block in text.split("\n\n") if block]


# --------------------------------------------------------------------------- clients that leave


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions"])
@pytest.mark.parametrize("held", [True, False])
@in_loop
async def test_a_client_that_leaves_frees_its_sequences(
    stream: bool, path: str, held: bool
) -> None:
    """While the request waits for GPUs, and in the middle of its answer."""
    generator = FakeGenerator(lambda request, position: 40, context=100_000, step_s=0.001)
    generator.held = held
    prompt = {"prompt": "go"} if path == PATH else {"messages": [{"role": "user", "content": "x"}]}
    body = {"max_tokens": 50_000, "stream": stream, "n": 2, **prompt}
    async with gateway(generator) as g:
        async with connect(g, body, path) as reader:
            await g.until(lambda: len(generator.live) == 2, "accepted")
            if not held:
                live = generator.live.values()
                await g.until(lambda: all(s.position > 3 for s in live), "running")
            if stream:
                await reader.readuntil(b"\r\n\r\n")
        await g.until(lambda: not generator.live, "freed")
        assert len(generator.aborted) == 2
        await g.until(lambda: 'success_total{finished_reason="abort"' in metrics_page(g), "counted")


@in_loop
async def test_a_client_of_openai_that_breaks_off_frees_its_sequence() -> None:
    generator = FakeGenerator(lambda request, position: 40, context=100_000, step_s=0.001)
    async with gateway(generator) as g:
        stream = await g.client.completions.create(
            model=MODEL, prompt="go", max_tokens=50_000, stream=True
        )
        async for _ in stream:
            break
        await stream.close()
        await g.until(lambda: not generator.live, "freed")


@in_loop
async def test_a_client_that_does_not_read_does_not_hold_the_generator_up() -> None:
    """What it has not read waits here, and its sequence ends all the same."""
    text = small_text()
    token = text.encode("stream", add_special_tokens=False)[0]
    generator = FakeGenerator(lambda request, position: token, context=100_000)
    async with gateway(generator) as g:
        body = {"prompt": "go", "max_tokens": 40_000, "stream": True}
        async with connect(g, body) as reader:
            await g.until(lambda: len(generator.requests) == 1, "accepted")
            async with asyncio.timeout(200):
                while generator.live:
                    await asyncio.sleep(0.02)
            received = b""
            while b"[DONE]" not in received:
                received = received[-64:] + await reader.read(1 << 20)


# -------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("finish", "code", "status", "shown"),
    [
        (FinishReason.ERROR, "no_capacity", 503, "no_capacity"),
        (FinishReason.ERROR, None, 500, "generation_failed"),
        (FinishReason.ERROR, "never heard of", 500, "generation_failed"),
        (FinishReason.ABORT, None, 503, "aborted"),
    ],
)
@in_loop
async def test_a_sequence_that_fails_is_an_error_answer(
    finish: FinishReason, code: str | None, status: int, shown: str
) -> None:
    generator = FakeGenerator(says(LONG))
    generator.fail_at = (5, finish, "no GPUs came within 600 s", code)
    async with gateway(generator) as g, httpx.AsyncClient() as http:
        body: dict[str, Any] = {"prompt": "go", "max_tokens": 50}
        whole = await http.post(g.url + PATH, json=body)
        assert whole.status_code == status
        error = whole.json()["error"]
        assert (error["code"], error["message"]) == (shown, "no GPUs came within 600 s")
        stream = await http.post(g.url + PATH, json=body | {"stream": True})
        assert stream.status_code == 200
        events = events_of(stream.text)
        assert json.loads(events[-1].removeprefix("data: "))["error"] == error
        assert "[DONE]" not in stream.text
        texts = [json.loads(e.removeprefix("data: "))["choices"][0]["text"] for e in events[:-1]]
        assert LONG.startswith("".join(texts)) and "".join(texts)


@in_loop
async def test_an_error_in_one_choice_ends_the_request() -> None:
    generator = FakeGenerator(says(LONG))
    generator.fail_at = (3, FinishReason.ERROR, "it broke", None)
    async with gateway(generator) as g:
        with pytest.raises(openai.APIError, match="it broke"):
            async for _ in await g.client.completions.create(
                model=MODEL, prompt="go", n=3, stream=True
            ):
                pass
        await g.until(lambda: not generator.live, "freed")


@pytest.mark.parametrize("stream", [True, False])
@in_loop
async def test_a_bug_is_an_error_answer_without_its_story(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(request: SequenceRequest, position: int) -> int:
        return 10**9 if position == 2 else 40

    generator = FakeGenerator(broken)
    generator.step_s = 0.01
    async with gateway(generator) as g, httpx.AsyncClient() as http:
        # An id of no sequence of ours is such a bug.
        original = generator._emit

        def emit(live: Any, token: int | None, finish: Any, **more: Any) -> None:
            original(live, token, finish, **more)
            if token == 10**9:
                event = live.stream.events.pop()
                live.stream.events.append(type(event)(seq_id="nobody/0", token=1, position=0))

        generator._emit = emit  # type: ignore[method-assign]
        answer = await http.post(g.url + PATH, json={"prompt": "go", "stream": stream})
        assert answer.status_code == (200 if stream else 500)
        last = events_of(answer.text)[-1].removeprefix("data: ")
        assert json.loads(last)["error"]["code"] == "internal"
        assert "nobody" not in answer.text and "Traceback" not in answer.text
        await g.until(lambda: not generator.live, "freed")
    assert any("KeyError" in str(r.exc_info) for r in caplog.records if r.exc_info)


@in_loop
async def test_a_body_that_says_it_is_too_large_is_refused_before_it_comes() -> None:
    async with gateway(FakeGenerator(says("x")), bounds=Bounds(body_bytes=1000)) as g:
        reader, writer = await asyncio.open_connection("127.0.0.1", g.server.port)
        writer.write(f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: 1001\r\n\r\n".encode())
        assert b" 413 " in await reader.readline()
        writer.close()
        await writer.wait_closed()


# -------------------------------------------------------------------------------------- silence


@in_loop
async def test_a_stream_that_waits_is_kept_alive_by_comments() -> None:
    generator = FakeGenerator(says("at last"))
    generator.held = True
    async with (
        gateway(generator, bounds=Bounds(ping_s=0.02)) as g,
        connect(g, {"prompt": "go", "stream": True}) as reader,
    ):
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"200 OK" in head and b"text/event-stream" in head
        for _ in range(3):
            assert await reader.readuntil(b": ping\n\n")
        generator.hold(False)
        rest = await reader.readuntil(b"data: [DONE]\n\n")
        assert b'"text":"a' in rest


@in_loop
async def test_comments_are_nothing_to_openais_client() -> None:
    generator = FakeGenerator(says("at last"), step_s=0.03)
    async with gateway(generator, bounds=Bounds(ping_s=0.005)) as g:
        stream = await g.client.completions.create(model=MODEL, prompt="go", stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "at last"


# ------------------------------------------------------------------------------------- coalescing


@in_loop
async def test_tokens_that_are_ready_together_leave_together() -> None:
    generator = FakeGenerator(says(LONG), manual=True)
    async with gateway(generator) as g, httpx.AsyncClient() as http:
        request = asyncio.ensure_future(
            http.post(g.url + PATH, json={"prompt": "go", "max_tokens": 40, "stream": True})
        )
        await g.until(lambda: bool(generator.live), "accepted")
        for _ in range(40):
            generator.step()
        answer = await request
        chunks = [e for e in events_of(answer.text) if "[DONE]" not in e]
        assert len(chunks) == 1
        tokens = small_text().encode(LONG, add_special_tokens=False)[:40]
        choice = json.loads(chunks[0].removeprefix("data: "))["choices"][0]
        assert choice["text"] == small_text().decode(tokens)
        assert choice["finish_reason"] == "length"


# -------------------------------------------------------------------------------------- server


@in_loop
async def test_stopping_lets_running_requests_end_and_refuses_new_ones() -> None:
    generator = FakeGenerator(says("the end"))
    generator.held = True
    async with gateway(generator) as g, httpx.AsyncClient() as http:
        running = asyncio.ensure_future(http.post(g.url + PATH, json={"prompt": "go"}))
        await g.until(lambda: bool(generator.live), "accepted")
        stopping = asyncio.ensure_future(g.server.stop(grace_s=60, reason="closing time"))
        await asyncio.sleep(0)
        late = await http.post(g.url + PATH, json={"prompt": "late"})
        assert (late.status_code, late.json()["error"]["message"]) == (503, "closing time")
        health = await http.get(g.url + "/health")
        assert (health.status_code, health.json()["state"]) == (503, "stopping")
        generator.hold(False)
        assert (await running).json()["choices"][0]["text"] == "the end"
        await stopping
        with pytest.raises(httpx.ConnectError):
            await http.get(g.url + "/health")


@in_loop
async def test_stopping_cuts_what_outlasts_the_grace() -> None:
    generator = FakeGenerator(says("never"))
    generator.held = True
    async with gateway(generator) as g, httpx.AsyncClient() as http:
        whole = asyncio.ensure_future(http.post(g.url + PATH, json={"prompt": "go"}))
        stream = asyncio.ensure_future(
            http.post(g.url + PATH, json={"prompt": "go", "stream": True})
        )
        await g.until(lambda: len(generator.live) == 2, "accepted")
        await g.server.stop(grace_s=0.05, reason="closing time")
        assert (await whole).status_code == 503
        assert "closing time" in (await stream).text
        assert generator.live == {}
        await g.server.stop(grace_s=0)  # once more does nothing


@in_loop
async def test_a_port_that_is_taken_is_one_clear_error() -> None:
    async with gateway(FakeGenerator(says("x"))) as g:
        with pytest.raises(EnvironmentFault, match="cannot bind") as caught:
            bind("127.0.0.1", g.server.port)
        assert caught.value.hint is not None
        with pytest.raises(EnvironmentFault, match="not an address"):
            bind("no.such.host.invalid", 0)
