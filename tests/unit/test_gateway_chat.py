"""Chat answers over a real socket, with OpenAI's own client: choices, stops, log probabilities."""

from __future__ import annotations

from typing import Any

from gateway_fakes import (
    MODEL,
    SAID,
    USER,
    FakeGenerator,
    gateway,
    in_loop,
    says,
    small_text,
)


def bytes_of(text: str) -> list[int]:
    return list(text.encode())


@in_loop
async def test_a_chat_answer_has_role_content_and_usage() -> None:
    async with gateway(FakeGenerator(says(SAID))) as g:
        answer = await g.client.chat.completions.create(model=MODEL, messages=USER)
        assert answer.id.startswith("chatcmpl-") and answer.object == "chat.completion"
        choice = answer.choices[0]
        assert (choice.message.role, choice.message.content) == ("assistant", SAID)
        assert choice.finish_reason == "stop"
        prompt = "<|start|>user\nhi<|end|>\n<|start|>assistant\n"
        tokens = small_text().encode(prompt, add_special_tokens=False)
        assert g.generator.requests[0].prompt == tuple(tokens)
        assert answer.usage is not None and answer.usage.prompt_tokens == len(tokens)
        assert g.generator.requests[0].stop.max_tokens == 256 - len(tokens)


@in_loop
async def test_a_chat_stream_names_the_role_once_and_counts_at_the_end() -> None:
    async with gateway(FakeGenerator(says(SAID))) as g:
        stream = await g.client.chat.completions.create(
            model=MODEL,
            messages=USER,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        deltas = [c.choices[0].delta for c in chunks if c.choices]
        assert [delta.role for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
        assert "".join(delta.content or "" for delta in deltas) == SAID
        assert chunks[-1].choices == [] and chunks[-1].usage is not None
        assert all(chunk.usage is None for chunk in chunks[:-1])
        assert chunks[-2].choices[0].finish_reason == "stop"
        tokens = len(small_text().encode(SAID, add_special_tokens=False)) + 1
        assert chunks[-1].usage.completion_tokens == tokens


@in_loop
async def test_chat_logprobs_have_bytes_that_join_to_the_text() -> None:
    async with gateway(FakeGenerator(says(SAID))) as g:
        arguments: dict[str, Any] = {
            "model": MODEL,
            "messages": USER,
            "logprobs": True,
            "top_logprobs": 3,
        }
        whole = await g.client.chat.completions.create(**arguments)
        logprobs = whole.choices[0].logprobs
        assert logprobs is not None and logprobs.content is not None
        joined = [byte for item in logprobs.content for byte in item.bytes or []]
        assert joined == bytes_of(SAID)
        first = logprobs.content[0]
        assert first.logprob == -0.5 and len(first.top_logprobs) == 3
        assert first.top_logprobs[0].token == first.token
        streamed: list[int] = []
        async for chunk in await g.client.chat.completions.create(**arguments, stream=True):
            if chunk.choices[0].logprobs is not None:
                for item in chunk.choices[0].logprobs.content or []:
                    streamed += item.bytes or []
        assert streamed == bytes_of(SAID)


@in_loop
async def test_a_stop_string_ends_the_answer_and_the_sequence() -> None:
    async with gateway(FakeGenerator(says(SAID))) as g:
        for stop, text in (
            ("END", SAID.split("END", maxsplit=1)[0]),
            (["of it", "naïve"], "a stream of "),
        ):
            whole = await g.client.chat.completions.create(model=MODEL, messages=USER, stop=stop)
            assert whole.choices[0].message.content == text
            assert whole.choices[0].finish_reason == "stop"
            stream = await g.client.chat.completions.create(
                model=MODEL, messages=USER, stop=stop, stream=True
            )
            parts = [c.choices[0].delta.content or "" async for c in stream]
            assert "".join(parts) == text
        assert len(g.generator.aborted) == 4
        assert g.generator.live == {}


@in_loop
async def test_one_choice_that_stops_leaves_the_others_running() -> None:
    def answer(request: Any, position: int) -> int:
        words = "one END two " * 9 if request.sampling.seed == 0 else "three four five six " * 9
        return [*small_text().encode(words, add_special_tokens=False), 2][position]

    async with gateway(FakeGenerator(answer)) as g:
        done = await g.client.completions.create(
            model=MODEL, prompt="go", n=2, seed=0, stop="END", max_tokens=200
        )
        assert [choice.text for choice in done.choices] == ["one ", "three four five six " * 9]
        assert [choice.finish_reason for choice in done.choices] == ["stop", "stop"]
        stopped, ran = (g.generator.given[request.seq_id] for request in g.generator.requests)
        assert stopped < 12 < 60 < ran


@in_loop
async def test_stop_token_ids_and_ignore_eos() -> None:
    comma = small_text().encode(",", add_special_tokens=False)[0]
    async with gateway(FakeGenerator(says("one, two"))) as g:
        done = await g.client.completions.create(
            model=MODEL, prompt="go", extra_body={"stop_token_ids": [comma]}
        )
        assert done.choices[0].text == "one"
        assert done.choices[0].model_dump()["stop_reason"] == comma
        more = await g.client.completions.create(
            model=MODEL, prompt="go", max_tokens=30, extra_body={"ignore_eos": True}
        )
        assert more.choices[0].finish_reason == "length"
        assert g.generator.requests[-1].stop.stop_token_ids == ()


@in_loop
async def test_sampling_parameters_reach_the_generator() -> None:
    async with gateway(FakeGenerator(says("x"))) as g:
        await g.client.chat.completions.create(
            model=MODEL,
            messages=USER,
            temperature=0.25,
            top_p=0.5,
            presence_penalty=1.5,
            frequency_penalty=-1,
            logit_bias={"7": -100, "11": 3},
            max_completion_tokens=5,
            extra_body={"top_k": 7, "min_p": 0.1, "repetition_penalty": 1.2, "min_tokens": 2},
        )
        request = g.generator.requests[0]
        sampling = request.sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.25, 0.5, 7)
        assert (sampling.min_p, sampling.repetition_penalty) == (0.1, 1.2)
        assert (sampling.presence_penalty, sampling.frequency_penalty) == (1.5, -1)
        assert sampling.logit_bias == {7: -100, 11: 3}
        assert (request.stop.max_tokens, request.stop.min_tokens) == (5, 2)
        assert request.stop.stop_token_ids == small_text().eos_ids
        await g.client.completions.create(model=MODEL, prompt="go", top_p=0, temperature=0)
        silent = g.generator.requests[1]
        assert (silent.sampling.top_k, silent.sampling.top_p) == (1, 1.0)
        assert silent.stop.max_tokens == 16
        await g.client.completions.create(model=MODEL, prompt="go")
        assert g.generator.requests[2].sampling.temperature == 1.0
        await g.client.completions.create(
            model=MODEL, prompt="go", seed=2**63 - 1, n=2, extra_body={"top_k": 10**30}
        )
        assert g.generator.requests[3].sampling.top_k == small_text().vocab_size


@in_loop
async def test_token_ids_are_returned_on_request() -> None:
    async with gateway(FakeGenerator(says("one two"))) as g:
        tokens = [*small_text().encode("one two", add_special_tokens=False), 2]
        extra = {"return_token_ids": True}
        whole = await g.client.chat.completions.create(
            model=MODEL,
            messages=USER,
            extra_body=extra,
        )
        assert whole.choices[0].model_dump()["token_ids"] == tokens
        assert whole.model_dump()["prompt_token_ids"] == list(g.generator.requests[0].prompt)
        streamed: list[int] = []
        stream = await g.client.completions.create(
            model=MODEL, prompt="go", stream=True, extra_body=extra
        )
        async for chunk in stream:
            streamed += chunk.choices[0].model_dump()["token_ids"]
        assert streamed == tokens
