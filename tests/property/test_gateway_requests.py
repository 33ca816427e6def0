"""Whatever a client sends, the answer is a completion or an error in OpenAI's form."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from gateway_fakes import MODEL, FakeGenerator, says, small_text
from hypothesis import given
from hypothesis import strategies as st

from flexslurm.gateway.api import create_app
from flexslurm.gateway.card import ModelCard
from flexslurm.gateway.metrics import Metrics
from flexslurm.gateway.schemas import (
    HARMLESS,
    UNSUPPORTED,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)

PATHS = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
VALID: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "go"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "go"}]},
    "/tokenize": {"prompt": "go"},
    "/detokenize": {"tokens": [1, 2]},
}

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-3, 40)
    | st.integers()
    | st.sampled_from([2**31, 2**63, -(2**63) - 1, 10**30])
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["auto", "none", "text", MODEL, "json_object", "1", "\ud800", "\x00"])
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "text", "role", "content", "5"]), inner)
    ),
    max_leaves=6,
)


def check(path: str, body: bytes) -> None:
    async def ask() -> httpx.Response:
        generator = FakeGenerator(says("yes"))
        app = create_app(generator, ModelCard(MODEL, "", 1024), small_text(), Metrics(MODEL))
        transport = httpx.ASGITransport(app)  # an exception of the application is raised here
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
            headers = {"content-type": "application/json"}
            answer = await http.post(path, content=body, headers=headers)
        assert generator.live == {}
        return answer

    answer = asyncio.run(ask())
    assert answer.status_code in (200, 400, 404, 413)
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"] and isinstance(error["message"], str)
        assert "Traceback" not in error["message"]
    elif "text/event-stream" in answer.headers["content-type"]:
        assert answer.text.endswith("data: [DONE]\n\n")
    else:
        answer.json()


@pytest.mark.parametrize("path", PATHS)
@given(data=st.data())
def test_fields_of_any_value(path: str, data: st.DataObject) -> None:
    names = [*PATHS[path].model_fields, *sorted(HARMLESS), *sorted(UNSUPPORTED)]
    strange = data.draw(
        st.dictionaries(st.sampled_from(names) | st.text(max_size=4), values, max_size=3)
    )
    check(path, json.dumps({**VALID[path], **strange}).encode())


@pytest.mark.parametrize("path", PATHS)
@given(body=st.binary(max_size=20) | values.map(lambda value: json.dumps(value).encode()))
def test_bodies_of_any_kind(path: str, body: bytes) -> None:
    check(path, body)
