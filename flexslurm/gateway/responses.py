"""The API's answers as values that encode fast; never validated, since we make them ourselves."""

from __future__ import annotations

from typing import Any

import msgspec

_encoder = msgspec.json.Encoder()

# ------------------------------------------------------------------------------------ common


class Usage(msgspec.Struct):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


def usage_of(prompt_tokens: int, completion_tokens: int) -> Usage:
    return Usage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens)


class ErrorBody(msgspec.Struct):
    """What is wrong, in OpenAI's form."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct):
    """The body of every error."""

    error: ErrorBody


class ModelEntry(msgspec.Struct, kw_only=True):
    """The model that is served."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "flexslurm"
    root: str
    max_model_len: int


class ModelList(msgspec.Struct, kw_only=True):
    """The answer of /v1/models."""

    object: str = "list"
    data: list[ModelEntry]


# ------------------------------------------------------------------------------- completions


class TextLogprobs(msgspec.Struct):
    """Completions' form: parallel lists."""

    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]]


class TextChoice(msgspec.Struct, kw_only=True):
    """One answer to a prompt, or a part of it."""

    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class TextCompletion(msgspec.Struct, kw_only=True):
    """A whole completion, or a chunk of one."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


# -------------------------------------------------------------------------------------- chat


class TopLogprob(msgspec.Struct):
    """One of the likeliest tokens at a position."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct):
    """A token of the answer, with the likeliest at its position."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """Chat's form: a list of tokens."""

    content: list[TokenLogprob]
    refusal: None = None


class ChatMessageOut(msgspec.Struct, kw_only=True):
    """The answer of a chat."""

    role: str = "assistant"
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct, kw_only=True):
    """One answer of a chat."""

    index: int
    message: ChatMessageOut
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    """A whole answer."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class Delta(msgspec.Struct, omit_defaults=True, kw_only=True):
    """What a chunk adds."""

    role: str | None = None
    content: str | None = None


class DeltaChoice(msgspec.Struct, kw_only=True):
    """A part of one answer of a chat."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | msgspec.UnsetType | None = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    """A chunk of a streamed answer."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[DeltaChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


# ---------------------------------------------------------------------------------- encoding

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"

# Clients that cut lines with Python's str.splitlines break at these as well, so they go escaped.
_LINE_BREAKS = (
    (b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"),
)  # fmt: skip


def encode(value: Any) -> bytes:
    """JSON, UTF-8."""
    return _encoder.encode(value)


def sse(value: Any) -> bytes:
    """One server-sent event. JSON has no raw line breaks, so one `data:` line is enough."""
    data = _encoder.encode(value)
    for raw, escaped in _LINE_BREAKS:
        if raw in data:
            data = data.replace(raw, escaped)
    return b"data: %b\n\n" % data
