"""The API over a real socket, with OpenAI's own client: models, completions, pages, keys."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import openai
import pytest
from gateway_fakes import (
    MODEL,
    SAID,
    USER,
    FakeGenerator,
    gateway,
    in_loop,
    metaspace_tokenizer,
    says,
    small_text,
)

from flexslurm.gateway.chat_template import ChatTemplate
from flexslurm.gateway.text import TextModel

COMPLETION = "/v1/completions"


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
        long = await http.post(g.url + "/detokenize", json={"tokens": tokens * 6000})
        assert long.json() == {"prompt": "naïve text" * 6000}
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
        for word in ("BREW", "STEEP"):
            await http.request(word, g.url + "/health")
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
            'flexslurm_http_requests_total{method="other",path="/health",status="405"} 2.0',
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
