"""The API over a real socket, with OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest
from gateway_fakes import (
    MODEL,
    FakeGenerator,
    gateway,
    in_loop,
    metaspace_tokenizer,
    says,
    small_text,
)

from flexslurm.errors import NotServing, Overloaded
from flexslurm.gateway.card import Bounds
from flexslurm.gateway.chat_template import ChatTemplate
from flexslurm.gateway.text import TextModel

USER = [{"role": "user", "content": "hi"}]
SAID = "a stream of naïve text, 🎉 to the END of it"


def bytes_of(text: str) -> list[int]:
    return list(text.encode())


# ------------------------------------------------------------------------------------- models


@in_loop
async def test_models_are_listed_and_found() -> None:
    async with gateway(FakeGenerator(says("x"))) as g:
        listed = await g.client.models.list()
        assert [(m.id, m.owned_by, m.created) for m in listed.data] == [
            (MODEL, "flexslurm", 1_700_000_000)
        ]
        found = await g.client.models.retrieve(MODEL)
        assert found.model_dump()["max_model_len"] == 256
        with pytest.raises(openai.NotFoundError) as caught:
            await g.client.models.retrieve("other/model")
        assert caught.value.code == "model_not_found"


# ------------------------------------------------------------------------------- completions


@in_loop
async def test_a_completion_has_text_finish_and_usage() -> None:
    async with gateway(FakeGenerator(says(SAID))) as g:
        answer = await g.client.completions.create(model=MODEL, prompt="go", max_tokens=100)
        assert answer.id.startswith("cmpl-") and answer.object == "text_completion"
        assert [(c.index, c.text, c.finish_reason) for c in answer.choices] == [(0, SAID, "stop")]
        tokens = small_text().encode(SAID, add_special_tokens=False)
        prompt = small_text().encode("go", add_special_tokens=True)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == len(tokens) + 1
        assert answer.usage.prompt_tokens == len(prompt)
        assert answer.usage.total_tokens == len(prompt) + len(tokens) + 1
        request = g.generator.requests[0]
        assert request.prompt == tuple(prompt)
        assert request.seq_id == f"{answer.id.removeprefix('cmpl-')}/0"


@in_loop
async def test_a_streamed_completion_joins_to_the_same_text() -> None:
    async with gateway(FakeGenerator(says(SAID))) as g:
        stream = await g.client.completions.create(
            model=MODEL, prompt="go", max_tokens=100, stream=True
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].text for c in chunks) == SAID
        assert [c.choices[0].finish_reason for c in chunks][-1] == "stop"
        assert all(c.choices[0].finish_reason is None for c in chunks[:-1])
        assert all("\ufffd" not in c.choices[0].text for c in chunks)
        assert len({c.id for c in chunks}) == 1
        assert len(chunks) > 3


@in_loop
async def test_every_form_of_prompt_is_taken() -> None:
    async with gateway(FakeGenerator(says("x"))) as g:
        text = small_text()
        one, two = (tuple(text.encode(p, add_special_tokens=True)) for p in ("go", "on"))
        forms: list[tuple[Any, list[tuple[int, ...]]]] = [
            ("go", [one]),
            (["go", "on"], [one, two]),
            (list(one), [one]),
            ([list(one), list(two)], [one, two]),
        ]
        for prompt, expected in forms:
            g.generator.requests.clear()
            answer = await g.client.completions.create(model=MODEL, prompt=prompt)
            assert [request.prompt for request in g.generator.requests] == expected
            assert [choice.index for choice in answer.choices] == list(range(len(expected)))


@in_loop
async def test_n_choices_have_their_own_seeds_and_indices() -> None:
    def answer(request: Any, position: int) -> int:
        return [*small_text().encode(f"seed {request.sampling.seed}", add_special_tokens=False), 2][
            position
        ]

    async with gateway(FakeGenerator(answer)) as g:
        done = await g.client.completions.create(
            model=MODEL, prompt=["go", "on"], n=2, seed=41, max_tokens=20
        )
        assert [choice.text for choice in done.choices] == ["seed 41", "seed 42"] * 2
        stream = await g.client.chat.completions.create(
            model=MODEL,
            messages=USER,
            n=3,
            seed=-1,
            stream=True,
        )
        texts, roles = ["", "", ""], []
        async for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                roles += [choice.index] if choice.delta.role else []
        assert sorted(roles) == [0, 1, 2]
        assert texts == [f"seed {2**63 - 1}", "seed 0", "seed 1"]
        g.generator.requests.clear()
        await g.client.completions.create(model=MODEL, prompt="go", n=4)
        assert len({request.sampling.seed for request in g.generator.requests}) == 4


@in_loop
async def test_echo_puts_the_prompt_first() -> None:
    async with gateway(FakeGenerator(says(" it is"))) as g:
        create = g.client.completions.create
        done = await create(model=MODEL, prompt=["go", "on"], echo=True)
        assert [choice.text for choice in done.choices] == ["go it is", "on it is"]
        tokens = small_text().encode("naïve", add_special_tokens=True)
        stream = await create(model=MODEL, prompt=tokens, echo=True, stream=True)
        assert "".join([c.choices[0].text async for c in stream]) == "naïve it is"
        g.generator.requests.clear()
        none = await create(model=MODEL, prompt="go", echo=True, max_tokens=0)
        assert (none.choices[0].text, none.choices[0].finish_reason) == ("go", "length")
        stream = await create(model=MODEL, prompt="go", echo=True, max_tokens=0, stream=True)
        assert [c.choices[0].text async for c in stream] == ["go"]
        assert g.generator.requests == []


@in_loop
async def test_completion_logprobs_are_parallel_lists() -> None:
    async with gateway(FakeGenerator(says("a naïve 🎉"))) as g:
        done = await g.client.completions.create(
            model=MODEL, prompt="go", logprobs=2, max_tokens=50
        )
        found = done.choices[0].logprobs
        assert found is not None and found.tokens and found.text_offset and found.top_logprobs
        tokens = small_text().encode("a naïve 🎉", add_special_tokens=False)
        assert len(found.tokens) == len(tokens)  # the end token is not text
        assert found.token_logprobs == [-0.5] * len(tokens)
        assert found.text_offset[0] == 0 and found.text_offset == sorted(found.text_offset)
        assert all(1 <= len(best) <= 2 for best in found.top_logprobs)
        assert all(t in b for t, b in zip(found.tokens, found.top_logprobs, strict=True))
        chosen = await g.client.completions.create(model=MODEL, prompt="go", logprobs=0)
        assert chosen.choices[0].logprobs is not None
        assert chosen.choices[0].logprobs.top_logprobs is not None
        assert all(len(best) == 1 for best in chosen.choices[0].logprobs.top_logprobs)
        streamed = await g.client.completions.create(
            model=MODEL, prompt="go", logprobs=2, max_tokens=50, stream=True
        )
        offsets: list[int] = []
        async for chunk in streamed:
            assert chunk.choices[0].logprobs is not None
            offsets += chunk.choices[0].logprobs.text_offset or []
        assert offsets == found.text_offset


@in_loop
async def test_a_completion_continues_the_prompt_and_a_chat_answer_stands_alone() -> None:
    """A tokenizer whose first token's space is not part of a text by itself."""
    tokenizer = metaspace_tokenizer()
    text = TextModel(
        tokenizer,
        eos_ids=(tokenizer.token_to_id("</s>"),),
        chat_template=ChatTemplate(
            {"default": "{% for m in messages %}{{ m.content }}{% endfor %}"}, {}
        ),
    )
    async with gateway(FakeGenerator(says("the a", model=text)), text=text) as g:
        done = await g.client.completions.create(model=MODEL, prompt="the", echo=True)
        assert done.choices[0].text == "the the a"
        messages: Any = [{"role": "user", "content": "go"}]
        chat = await g.client.chat.completions.create(model=MODEL, messages=messages)
        assert chat.choices[0].message.content == "the a"
        messages.append({"role": "assistant", "content": "the"})
        continued = await g.client.chat.completions.create(
            model=MODEL,
            messages=messages,
            extra_body={"continue_final_message": True, "add_generation_prompt": False},
        )
        assert continued.choices[0].message.content == " the a"


# -------------------------------------------------------------------------------------- chat


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


# --------------------------------------------------------------------------------- refusals

COMPLETION = "/v1/completions"
CHAT = "/v1/chat/completions"


@in_loop
async def test_an_end_beyond_the_vocabulary_never_reaches_the_workers() -> None:
    whole = small_text()
    odd = TextModel(whole.tokenizer, eos_ids=(*whole.eos_ids, 10**6), vocab_size=whole.vocab_size)
    async with gateway(FakeGenerator(says("x")), text=odd) as g:
        await g.client.completions.create(model=MODEL, prompt="go", extra_body={"min_tokens": 2})
        assert g.generator.requests[0].stop.stop_token_ids == whole.eos_ids


REFUSED: list[tuple[str, dict[str, Any], str | None, str]] = [
    (COMPLETION, {"temperature": -1}, "temperature", "greater than or equal to 0"),
    (COMPLETION, {"temperature": "warm"}, "temperature", "number"),
    (COMPLETION, {"top_p": 1.5}, "top_p", "less than or equal to 1"),
    (COMPLETION, {"n": 0}, "n", "greater"),
    (COMPLETION, {"n": 1000}, "n", "at most 128"),
    (COMPLETION, {"temprature": 1}, "temprature", "did you mean 'temperature'?"),
    (COMPLETION, {"temprature": None}, "temprature", "did you mean 'temperature'?"),
    (COMPLETION, {"zzz": 1}, "zzz", "unknown field"),
    (COMPLETION, {"suffix": "end"}, "suffix", "not supported"),
    (COMPLETION, {"best_of": 3}, "best_of", "not supported"),
    (COMPLETION, {"echo": True, "logprobs": 1}, "echo", "echo with logprobs"),
    (COMPLETION, {"logprobs": 21}, "logprobs", "at most 20"),
    (COMPLETION, {"max_tokens": 0}, "max_tokens", "at least 1"),
    (COMPLETION, {"max_tokens": 400}, "max_tokens", "256"),
    (COMPLETION, {"min_tokens": 9, "max_tokens": 3}, "min_tokens", "more than the 3"),
    (COMPLETION, {"prompt": []}, "prompt", "a text, a list of texts"),
    (COMPLETION, {"prompt": ["a", 1]}, "prompt", "mixed"),
    (COMPLETION, {"prompt": [True]}, "prompt", "mixed"),
    (COMPLETION, {"prompt": {"a": 1}}, "prompt", "a text"),
    (COMPLETION, {"prompt": ""}, "prompt", "no tokens"),
    (COMPLETION, {"prompt": [[1], []]}, "prompt", "no tokens"),
    (COMPLETION, {"prompt": [100000]}, "prompt", "token id outside 0 to"),
    (COMPLETION, {"prompt": [-1]}, "prompt", "token id outside 0 to"),
    (COMPLETION, {"prompt": [1] * 300}, "prompt", "256"),
    (COMPLETION, {"prompt": "a\ud800b"}, None, "surrogate"),
    (COMPLETION, {"prompt": ["a"] * 200, "n": 100}, "n", "512"),
    (COMPLETION, {"stop": ["a", ""]}, "stop", "empty"),
    (COMPLETION, {"stop": 5}, "stop", "a string or a list"),
    (COMPLETION, {"stop": ["x"] * 17}, "stop", "at most 16"),
    (COMPLETION, {"stop": "x" * 513}, "stop", "512"),
    (COMPLETION, {"stop_token_ids": [-4]}, "stop_token_ids", "outside"),
    (COMPLETION, {"logit_bias": {"cat": 1}}, "logit_bias", "not a token id"),
    (COMPLETION, {"logit_bias": {"9999999": 1}}, "logit_bias", "not a token id"),
    (COMPLETION, {"logit_bias": {"0" * 12 + "999999": 1}}, "logit_bias", "not a token id"),
    (COMPLETION, {"logit_bias": {"0" * 5000 + "1": 1}}, "logit_bias", "not a token id"),
    (COMPLETION, {"logit_bias": {"1": 101}}, "logit_bias", "less than or equal"),
    (COMPLETION, {"seed": 2**63}, "seed", "less than"),
    (COMPLETION, {"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
    (COMPLETION, {"guided_json": {"a": 1}}, "guided_json", "not supported"),
    (COMPLETION, {"model": "gpt-4"}, "model", "not served here"),
    (CHAT, {"messages": []}, "messages", "at least 1 item"),
    (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role", "required"),
    (CHAT, {"messages": "hi"}, "messages", "list"),
    (CHAT, {"response_format": {"type": "json_object"}}, "response_format", "only 'text'"),
    (CHAT, {"tools": [{"type": "function"}]}, "tools", "not supported"),
    (CHAT, {"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": 40}, "top_logprobs", "at most 20"),
    (CHAT, {"echo": True}, "echo", "completions"),
    (CHAT, {"modalities": ["text", "audio"]}, "modalities", "not supported"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0]",
        "only text",
    ),
    (CHAT, {"continue_final_message": True}, "continue_final_message", "add_generation_prompt"),
]


@in_loop
async def test_what_is_refused_names_the_field_and_never_reaches_the_generator() -> None:
    async with gateway(FakeGenerator(says("x"))) as g, httpx.AsyncClient() as http:
        for path, extra, param, words in REFUSED:
            base = {"prompt": "go"} if path == COMPLETION else {"messages": USER}
            body = json.dumps({"model": MODEL, **base, **extra})
            answer = await http.post(
                g.url + path, content=body, headers={"content-type": "application/json"}
            )
            assert answer.status_code in (400, 404), (extra, answer.text)
            error = answer.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert error["param"] == param, (extra, error)
            assert words in error["message"], (extra, error)
        assert g.generator.requests == []


@in_loop
async def test_harmless_fields_and_those_that_say_nothing_are_taken() -> None:
    async with gateway(FakeGenerator(says("x"))) as g:
        await g.client.chat.completions.create(
            model=MODEL,
            messages=USER,
            user="me",
            store=False,
            metadata={"a": "b"},
            service_tier="auto",
            modalities=["text"],
            response_format={"type": "text"},
            tools=[],
            extra_body={
                "guided_json": None,
                "suffix": None,
                "prompt_logprobs": None,
                "use_beam_search": False,
                "top_k": -1,
            },
        )
        await g.client.chat.completions.create(
            model=MODEL,
            messages=USER,
            tools=[{"type": "function", "function": {"name": "f"}}],
            tool_choice="none",
        )
        assert len(g.generator.requests) == 2


@in_loop
async def test_errors_of_http_itself_have_the_same_form() -> None:
    bounds = Bounds(body_bytes=1000)
    async with gateway(FakeGenerator(says("x")), bounds=bounds) as g, httpx.AsyncClient() as http:
        json_type = {"content-type": "application/json"}

        async def pieces() -> Any:
            for _ in range(30):
                yield b" " * 100

        cases = [
            (await http.get(g.url + "/v1/nothing"), 404, "/v1/nothing"),
            (await http.get(g.url + COMPLETION), 405, "does not take GET"),
            (await http.post(g.url + COMPLETION, content="{", headers=json_type), 400, "JSON"),
            (await http.post(g.url + COMPLETION, content=b"\xff", headers=json_type), 400, "JSON"),
            (
                await http.post(g.url + COMPLETION, content="[" * 900, headers=json_type),
                400,
                "JSON",
            ),
            (await http.post(g.url + COMPLETION, content="[]", headers=json_type), 400, ""),
            (await http.post(g.url + COMPLETION, content="5", headers=json_type), 400, ""),
            (await http.post(g.url + COMPLETION, content="", headers=json_type), 400, "body"),
            (await http.post(g.url + COMPLETION, data={"prompt": "x"}), 400, "application/json"),
            (await http.post(g.url + COMPLETION, json={"prompt": "x" * 1000}), 413, "1000"),
            (await http.post(g.url + COMPLETION, content=pieces(), headers=json_type), 413, "1000"),
        ]
        for answer, status, words in cases:
            assert answer.status_code == status, answer.text
            error = answer.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert words in error["message"], error
        assert cases[1][0].headers["allow"] == "POST"
        assert (await http.get(g.url + "/version")).status_code == 200


@in_loop
async def test_what_the_generator_refuses_keeps_its_status() -> None:
    async with gateway(FakeGenerator(says("x"))) as g, httpx.AsyncClient() as http:
        for stream in (False, True):
            g.generator.refuse = Overloaded("1024 sequences wait already")
            body = {"prompt": "go", "stream": stream}
            answer = await http.post(g.url + COMPLETION, json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
            assert int(answer.headers["retry-after"]) > 0
            g.generator.refuse = NotServing("no GPUs serve the model now")
            answer = await http.post(g.url + COMPLETION, json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_capacity")


@in_loop
async def test_before_a_gear_is_installed_the_models_own_limit_holds() -> None:
    async with gateway(FakeGenerator(says("x"), context=None, model_context=300)) as g:
        with pytest.raises(openai.BadRequestError, match="the model takes") as caught:
            await g.client.completions.create(model=MODEL, prompt="go", max_tokens=300)
        assert caught.value.code == "context_length_exceeded"
        assert (await g.client.models.retrieve(MODEL)).model_dump()["max_model_len"] == 300


# ------------------------------------------------------------------- tokens, health, metrics


@in_loop
async def test_tokenize_and_detokenize() -> None:
    async with gateway(FakeGenerator(says("x"))) as g, httpx.AsyncClient() as http:
        tokens = small_text().encode("naïve text", add_special_tokens=True)
        made = (
            await http.post(
                g.url + "/tokenize", json={"prompt": "naïve text", "return_token_strs": True}
            )
        ).json()
        assert (made["count"], made["tokens"], made["max_model_len"]) == (len(tokens), tokens, 256)
        assert len(made["token_strs"]) == len(tokens)
        back = await http.post(g.url + "/detokenize", json={"tokens": tokens})
        assert back.json() == {"prompt": "naïve text"}
        chat = await http.post(g.url + "/tokenize", json={"messages": USER})
        prompt = "<|start|>user\nhi<|end|>\n<|start|>assistant\n"
        assert chat.json()["tokens"] == small_text().encode(prompt, add_special_tokens=False)
        for body in ({}, {"prompt": "a", "messages": USER}):
            assert (await http.post(g.url + "/tokenize", json=body)).status_code == 400
        assert (await http.post(g.url + "/detokenize", json={"tokens": [-1]})).status_code == 400


@in_loop
async def test_health_says_what_is_and_why() -> None:
    def extra() -> dict[str, Any]:
        return {"gear": "g1", "state": "mine"}

    async with (
        gateway(FakeGenerator(says("x")), extra_status=extra) as g,
        httpx.AsyncClient() as http,
    ):
        for state, status in (
            ("serving", 200),
            ("shifting", 200),
            ("starting", 503),
            ("waiting", 503),
            ("stopping", 503),
        ):
            g.generator.state, g.generator.reason = state, f"because {state}"
            answer = await http.get(g.url + "/health")
            body = answer.json()
            assert answer.status_code == status
            assert (body["state"], body["reason"]) == (state, f"because {state}")
            assert (body["gear"], body["epoch"], body["gpus"]) == ("g1", 3, 2)


@in_loop
async def test_health_answers_head_and_the_schema_is_there() -> None:
    async with gateway(FakeGenerator(says("x"))) as g, httpx.AsyncClient() as http:
        head = await http.head(g.url + "/health")
        assert (head.status_code, head.content) == (200, b"")
        schema = (await http.get(g.url + "/openapi.json")).json()
        assert {"/v1/completions", "/v1/chat/completions", "/health"} <= set(schema["paths"])


@in_loop
async def test_a_text_that_cannot_fit_is_refused_without_tokenizing_it() -> None:
    async with gateway(FakeGenerator(says("x"))) as g, httpx.AsyncClient() as http:
        text = "stream " * 5_000
        fewest = small_text().fewest_tokens(text)
        assert 256 < fewest <= len(small_text().encode(text, add_special_tokens=False))
        answer = await http.post(g.url + COMPLETION, json={"prompt": text})
        assert answer.status_code == 400
        assert "characters are at least" in answer.json()["error"]["message"]


@in_loop
async def test_metrics_have_the_services_figures_and_the_ledgers() -> None:
    async with gateway(FakeGenerator(says("x"))) as g, httpx.AsyncClient() as http:
        await g.client.completions.create(model=MODEL, prompt="go")
        await http.get(g.url + "/nowhere/1")
        g.metrics.accepted("r/0", 7)
        g.metrics.first_token(0.2)
        g.metrics.gap(0.05)
        g.metrics.finished("stop", 1.5, 2, ttft_seconds=0.2)
        g.metrics.shift("committed", 0.7)
        answer = await http.get(g.url + "/metrics")
        assert answer.headers["content-type"].startswith("text/plain")
        page = answer.text
        labels = 'model_name="small"'
        for line in (
            f"flexslurm_prompt_tokens_total{{{labels}}} 7.0",
            f"flexslurm_generation_tokens_total{{{labels}}} 2.0",
            f"flexslurm_time_to_first_token_seconds_count{{{labels}}} 1.0",
            f"flexslurm_inter_token_latency_seconds_sum{{{labels}}} 0.05",
            f"flexslurm_e2e_request_latency_seconds_sum{{{labels}}} 1.5",
            f"flexslurm_request_time_per_output_token_seconds_sum{{{labels}}} 1.3",
            f"flexslurm_kv_cache_usage_ratio{{{labels}}} 0.25",
            f"flexslurm_epoch{{{labels}}} 3.0",
            f"flexslurm_num_requests_running{{{labels}}} 0.0",
            f"flexslurm_num_requests_waiting{{{labels}}} 0.0",
            f'flexslurm_request_success_total{{finished_reason="stop",{labels}}} 1.0',
            f'flexslurm_shifts_total{{{labels},outcome="committed"}} 1.0',
            'flexslurm_state{state="serving"} 1.0',
            'flexslurm_http_requests_total{method="GET",path="other",status="404"} 1.0',
            'flexslurm_http_requests_total{method="POST",path="/v1/completions",status="200"} 1.0',
        ):
            assert line in page.splitlines(), line


# ------------------------------------------------------------------------------------- keys


@in_loop
async def test_keys_guard_all_but_health_metrics_and_version() -> None:
    keys = frozenset({"key-one", "key-two"})
    async with gateway(FakeGenerator(says("x")), keys=keys) as g, httpx.AsyncClient() as http:
        for key in sorted(keys):
            client = g.client.with_options(api_key=key)
            assert (await client.models.list()).data
        with pytest.raises(openai.AuthenticationError) as caught:
            await g.client.with_options(api_key="key-on").models.list()
        assert caught.value.code == "invalid_api_key"
        for headers in (
            {},
            {"authorization": "Basic key-one"},
            {"authorization": "Bearer"},
            {"authorization": "Bearer \xff"},
            {"authorization": "bearer key-three"},
        ):
            raw = [(k.encode(), v.encode("latin-1")) for k, v in headers.items()]
            for path in ("/v1/models", "/tokenize", "/nowhere", "/openapi.json"):
                answer = await http.get(g.url + path, headers=raw)
                assert answer.status_code == 401, (headers, path)
                assert answer.headers["www-authenticate"] == "Bearer"
        lower = {"authorization": "bearer key-one"}
        assert (await http.get(g.url + "/v1/models", headers=lower)).status_code == 200
        for path in ("/health", "/metrics", "/version"):
            assert (await http.get(g.url + path)).status_code == 200


@in_loop
async def test_answers_carry_a_request_id() -> None:
    async with gateway(FakeGenerator(says("x"))) as g, httpx.AsyncClient() as http:
        answer = await http.post(g.url + COMPLETION, json={"prompt": "go"})
        assert answer.json()["id"] == f"cmpl-{answer.headers['x-request-id']}"


@in_loop
async def test_many_requests_at_once() -> None:
    async with gateway(FakeGenerator(says(SAID))) as g:
        answers = await asyncio.gather(
            *(
                g.client.completions.create(model=MODEL, prompt=f"go {i}", max_tokens=80)
                for i in range(40)
            )
        )
        assert {answer.choices[0].text for answer in answers} == {SAID}
        assert len({answer.id for answer in answers}) == 40
