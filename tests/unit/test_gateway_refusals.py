"""What the API refuses, names the field, and never gives to the generator."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from gateway_fakes import (
    MODEL,
    USER,
    FakeGenerator,
    gateway,
    in_loop,
    says,
    small_text,
)

from flexslurm.errors import NotServing, Overloaded
from flexslurm.gateway.card import Bounds
from flexslurm.gateway.text import TextModel

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
