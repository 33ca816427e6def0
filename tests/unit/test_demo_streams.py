"""The demo's streaming client, which the tests of services use too, against a real gateway."""

from __future__ import annotations

import asyncio

from gateway_fakes import MODEL, FakeGenerator, gateway, in_loop, says

from flexslurm.cli.demo_streams import StreamRun, open_streams, stream

SAID = "a stream of naïve text to its end"
TEXT = {"model": MODEL, "prompt": "go", "max_tokens": 100}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 100}


@in_loop
async def test_completions_and_chats_are_read_to_their_end() -> None:
    async with gateway(FakeGenerator(says(SAID))) as g:
        for path, body in (("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)):
            heard: list[str] = []
            run = StreamRun(body)
            await asyncio.to_thread(stream, g.url, run, heard.append, path)
            assert (run.text, run.finish, run.error) == (SAID, "stop", "")
            assert "".join(heard) == SAID and len(heard) > 1
            assert len(run.tokens) == len(run.times) > 1
            assert run.times == sorted(run.times)
            assert run.longest_gap_s <= run.times[-1] - run.times[0]


@in_loop
async def test_what_goes_wrong_is_in_the_run() -> None:
    async with gateway(FakeGenerator(says(SAID))) as g:
        refused = StreamRun({**CHAT, "model": "another"})
        await asyncio.to_thread(stream, g.url, refused)
        assert "model" in refused.error and refused.finish is None
        url = g.url
    gone = StreamRun(CHAT)
    await asyncio.to_thread(stream, url, gone)
    assert "ConnectionRefusedError" in gone.error


@in_loop
async def test_several_streams_say_which_one_speaks() -> None:
    async with gateway(FakeGenerator(says(SAID))) as g:
        heard: dict[int, str] = {0: "", 1: ""}

        def take(number: int, text: str) -> None:
            heard[number] += text

        runs, threads = open_streams(g.url, [CHAT, CHAT], take)
        await asyncio.to_thread(lambda: [thread.join(60) for thread in threads])
        assert [run.text for run in runs] == [SAID, SAID] == list(heard.values())
