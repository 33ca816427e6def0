"""The API's request bodies: fields, types, ranges; never decides what is done with them.

Fields that OpenAI's API does not have are vLLM's, under vLLM's names. A field that is not listed
here is refused by name, as OpenAI does: a misspelt `temperature` that is silently ignored costs
more than an error. `HARMLESS` are accepted and ignored, since they change nothing in an answer;
`UNSUPPORTED` would change it, and are refused unless they say what holds anyway.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, FiniteFloat

HARMLESS = frozenset(
    {
        "user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key",
        "prompt_cache_retention", "prediction", "parallel_tool_calls", "reasoning_effort",
        "verbosity", "spaces_between_special_tokens", "cache_salt", "request_id",
        "include_reasoning",
    }
)  # fmt: skip

# Name → the values that say what holds anyway. An empty list, null and false say it for all.
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": (),
    "chat_template": (),
    "function_call": ("none",),
    "functions": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "length_penalty": (1, 1.0),
    "logits_processors": (),
    "modalities": (["text"],),
    "priority": (0,),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "structured_outputs": (),
    "suffix": ("",),
    "truncate_prompt_tokens": (),
    "use_beam_search": (),
    "web_search_options": (),
}

Prompt = str | tuple[int, ...]


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _prompts(value: object) -> list[Prompt]:
    """A text, a list of texts, a list of token ids or a list of those: one form for all."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise ValueError("a text, a list of texts, a list of token ids or a list of such lists")
    if all(_is_token(item) for item in value):
        return [tuple(value)]
    if all(isinstance(item, str) for item in value):
        return list(value)
    if all(isinstance(item, list) and all(_is_token(t) for t in item) for item in value):
        return [tuple(item) for item in value]
    raise ValueError("texts and token ids cannot be mixed in one list")


def _stops(value: object) -> object:
    if value is None:
        return []
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(item, str) for item in values):
        raise ValueError("a string or a list of strings")
    if not all(values):
        raise ValueError("a stop string cannot be empty")
    return values


Prompts = Annotated[list[Any], BeforeValidator(_prompts)]
Stops = Annotated[list[str], BeforeValidator(_stops)]
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="allow", protected_namespaces=())

    @property
    def unlisted(self) -> dict[str, Any]:
        """Fields the class does not name."""
        return self.model_extra or {}


class StreamOptions(BaseModel):
    """What a stream tells besides its text."""

    model_config = ConfigDict(extra="ignore")

    include_usage: bool = False
    continuous_usage_stats: bool = False


class ResponseFormat(BaseModel):
    """Only `text` is done here."""

    model_config = ConfigDict(extra="ignore")

    type: str = "text"


class GenerationBody(_Body):
    """What completions and chat completions have in common."""

    model: str | None = None
    n: int | None = Field(None, ge=1)
    temperature: FiniteFloat | None = Field(None, ge=0)
    top_p: FiniteFloat | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: FiniteFloat | None = Field(None, ge=0, le=1)
    repetition_penalty: FiniteFloat | None = Field(None, gt=0, le=10)
    presence_penalty: FiniteFloat | None = Field(None, ge=-2, le=2)
    frequency_penalty: FiniteFloat | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, Annotated[FiniteFloat, Field(ge=-100, le=100)]] | None = None
    seed: Int64 | None = None
    stop: Stops = []
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    min_tokens: int | None = Field(None, ge=0)
    max_tokens: int | None = Field(None, ge=0)
    ignore_eos: bool = False
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    add_special_tokens: bool | None = None


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Prompts
    logprobs: int | None = Field(None, ge=0)
    echo: bool | None = None
    best_of: int | None = Field(None, ge=1)


class ChatMessage(BaseModel):
    """One message; keys beyond these go to the model's template as they are."""

    model_config = ConfigDict(extra="allow")

    role: str = Field(min_length=1)
    content: str | list[dict[str, Any]] | None = None


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    echo: bool | None = None


class TokenizeBody(_Body):
    """POST /tokenize: a `prompt`, or `messages` as the chat endpoint takes them."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1)
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None


class DetokenizeBody(_Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]
