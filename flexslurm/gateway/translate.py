"""Request bodies to sequences for the generator: pure, apart from the seeds it is handed.

Defaults: what a request leaves out is the model's recommendation (`generation_config.json`:
temperature, top_p, top_k, min_p, repetition_penalty), else OpenAI's default (temperature 1).
A completion without `max_tokens` gets 16 tokens, as OpenAI's; a chat answer gets all that fits.

Seeds: choice i of a prompt is drawn with seed + i; without a seed each choice has its own random
one. The prompts of one request share the seed, so each is answered as it would be alone.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flexslurm.errors import ContextTooLong, InvalidRequest, UnknownModel
from flexslurm.gateway.card import Bounds, ModelCard
from flexslurm.gateway.port import ServedLimits
from flexslurm.gateway.schemas import (
    HARMLESS,
    UNSUPPORTED,
    ChatBody,
    ChatMessage,
    CompletionBody,
    GenerationBody,
)
from flexslurm.gateway.text import SamplingDefaults, TextModel
from flexslurm.messages import SamplingParams, SequenceRequest, StopRules

COMPLETION_MAX_TOKENS = 16
SEED_MODULUS = 2**63
_ID_DIGITS = 12

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """One API request as the generator and the answer need it."""

    request_id: str
    prompts: tuple[Tokens, ...]
    sequences: tuple[SequenceRequest, ...]
    """Choice i belongs to prompt `i // n`."""
    n: int

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt) for prompt in self.prompts)


def check_model_name(name: str | None, card: ModelCard) -> None:
    """A request without a model means the one that is served. Raises UnknownModel."""
    if name is not None and name != card.name:
        raise UnknownModel(
            f"the model '{name}' is not served here", param="model", hint=f"'{card.name}' is"
        )


def check_unlisted(given: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raises InvalidRequest for fields that would change the answer and that we do not have."""
    for name, value in given.items():
        if name in HARMLESS or value is None or value is False or value in ([], {}):
            if name not in HARMLESS and name not in UNSUPPORTED:
                _refuse_unknown(name, known)
            continue
        if name not in UNSUPPORTED:
            _refuse_unknown(name, known)
        if value not in UNSUPPORTED[name]:
            raise InvalidRequest(f"{name} is not supported here", param=name)


def _refuse_unknown(name: str, known: Sequence[str]) -> None:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean '{near[0]}'?" if near else None
    raise InvalidRequest(f"unknown field '{name}'", param=name, hint=hint)


def check_generation(body: GenerationBody, bounds: Bounds) -> None:
    """What both endpoints refuse alike, beyond types and ranges. Raises InvalidRequest."""
    check_unlisted(body.unlisted, list(type(body).model_fields))
    if body.response_format is not None and body.response_format.type != "text":
        raise InvalidRequest(
            f"response_format '{body.response_format.type}' is not supported: only 'text' is",
            param="response_format",
        )
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream: true", param="stream_options")
    if (body.n or 1) > bounds.choices:
        raise InvalidRequest(f"n is at most {bounds.choices} here", param="n")
    if len(body.stop) > bounds.stop_strings:
        raise InvalidRequest(f"at most {bounds.stop_strings} stop strings", param="stop")
    if any(len(stop) > bounds.stop_chars for stop in body.stop):
        raise InvalidRequest(
            f"a stop string has at most {bounds.stop_chars} characters", param="stop"
        )


def check_completion(body: CompletionBody, bounds: Bounds) -> None:
    """Whether this can be completed here. Raises InvalidRequest naming the field."""
    check_generation(body, bounds)
    if (body.n or 1) * len(body.prompt) > bounds.sequences:
        raise InvalidRequest(
            f"{body.n or 1} choices for each of {len(body.prompt)} prompts are more than the "
            f"{bounds.sequences} sequences one request may have",
            param="prompt" if (body.n or 1) == 1 else "n",
        )
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise InvalidRequest("best_of is not supported: give n alone", param="best_of")
    if body.echo and body.logprobs is not None:
        raise InvalidRequest(
            "echo with logprobs is not supported: a prompt has no log probabilities here",
            param="echo",
        )
    if body.max_tokens == 0 and not body.echo:
        raise InvalidRequest(
            "max_tokens must be at least 1, unless echo is set", param="max_tokens"
        )
    if (body.logprobs or 0) > bounds.logprobs:
        raise InvalidRequest(f"logprobs is at most {bounds.logprobs}", param="logprobs")


def check_chat(body: ChatBody, bounds: Bounds) -> None:
    """Whether this can be answered here. Raises InvalidRequest naming the field."""
    check_generation(body, bounds)
    if body.tools and body.tool_choice != "none":
        raise InvalidRequest(
            "tools are not supported: the server does not read tool calls out of answers",
            param="tools",
            hint="leave them out, or set tool_choice to 'none'",
        )
    if body.echo:
        raise InvalidRequest("echo is for /v1/completions", param="echo")
    if body.max_tokens == 0:
        raise InvalidRequest("max_tokens must be at least 1", param="max_tokens")
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    if (body.top_logprobs or 0) > bounds.logprobs:
        raise InvalidRequest(f"top_logprobs is at most {bounds.logprobs}", param="top_logprobs")


def render_chat(
    text: TextModel,
    messages: Sequence[ChatMessage],
    *,
    add_generation_prompt: bool,
    continue_final_message: bool,
    documents: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """The prompt's text by the model's template; raises InvalidRequest."""
    template = text.chat_template
    if template is None:
        raise InvalidRequest(
            "the model has no chat template",
            hint="use /v1/completions, or set model.chat_template in the service file",
        )
    if add_generation_prompt and continue_final_message:
        raise InvalidRequest(
            "continue_final_message needs add_generation_prompt: false",
            param="continue_final_message",
        )
    knows_developer = template.mentions("developer")
    return template.render(
        [_plain_message(index, m, knows_developer) for index, m in enumerate(messages)],
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        documents=documents,
        variables=variables,
    )


def _plain_message(index: int, message: ChatMessage, knows_developer: bool) -> dict[str, Any]:
    """As templates expect it: the content one text, and roles that they know."""
    role = message.role
    if role == "developer" and not knows_developer:
        role = "system"  # OpenAI's newer name for the same thing
    content = message.content
    if isinstance(content, list):
        content = "\n".join(_part_text(index, number, p) for number, p in enumerate(content))
    return {**(message.model_extra or {}), "role": role, "content": content}


def _part_text(index: int, number: int, part: Mapping[str, Any]) -> str:
    kind, text = part.get("type"), part.get("text")
    if kind != "text" or not isinstance(text, str):
        raise InvalidRequest(
            f"only text can be part of a message, not {kind!r}",
            param=f"messages[{index}].content[{number}]",
        )
    return text


def check_prompt(tokens: Sequence[int], text: TextModel, param: str) -> Tokens:
    """Not empty, and every id one the model has. Raises InvalidRequest naming `param`."""
    if not tokens:
        raise InvalidRequest("the prompt has no tokens", param=param)
    if min(tokens) < 0 or max(tokens) >= text.vocab_size:
        raise InvalidRequest(
            f"the prompt has a token id outside 0 to {text.vocab_size - 1}", param=param
        )
    return tuple(tokens)


def plan_request(
    body: GenerationBody,
    prompts: Sequence[Tokens],
    *,
    request_id: str,
    text: TextModel,
    limits: ServedLimits,
    random_seed: Callable[[], int],
) -> GenerationPlan:
    """The sequences of a request whose body has been checked. Raises a RequestError."""
    n = body.n or 1
    sampling = sampling_params(body, text)
    sequences: list[SequenceRequest] = []
    for prompt in prompts:
        stop = stop_rules(body, len(prompt), text, limits)
        for choice in range(n):
            seed = random_seed() if body.seed is None else body.seed + choice
            sequences.append(
                SequenceRequest(
                    seq_id=f"{request_id}/{len(sequences)}",
                    prompt=prompt,
                    sampling=_with_seed(sampling, seed % SEED_MODULUS),
                    stop=stop,
                )
            )
    return GenerationPlan(request_id, tuple(prompts), tuple(sequences), n)


def _with_seed(sampling: Mapping[str, Any], seed: int) -> SamplingParams:
    return SamplingParams(**sampling, seed=seed)


def sampling_params(body: GenerationBody, text: TextModel) -> dict[str, Any]:
    """All of SamplingParams but the seed."""
    defaults: SamplingDefaults = text.defaults
    chosen: dict[str, Any] = {
        name: default if (given := getattr(body, name)) is None else given
        for name in SamplingDefaults.__struct_fields__
        for default in (getattr(defaults, name),)
    }
    # -1 and 0 both mean off, as does more than there are: what goes to the workers is bounded
    chosen["top_k"] = max(0, min(chosen["top_k"], text.vocab_size))
    if chosen["top_p"] == 0:  # OpenAI allows it: only the best token is left
        chosen["top_k"], chosen["top_p"] = 1, 1.0
    return chosen | {
        "presence_penalty": body.presence_penalty or 0.0,
        "frequency_penalty": body.frequency_penalty or 0.0,
        "logit_bias": _logit_bias(body.logit_bias, text),
        "logprobs": wanted_logprobs(body),
    }


def wanted_logprobs(body: GenerationBody) -> int:
    """-1: none; else how many alternatives."""
    if isinstance(body, ChatBody):
        return (body.top_logprobs or 0) if body.logprobs else -1
    assert isinstance(body, CompletionBody)
    return -1 if body.logprobs is None else body.logprobs


def _logit_bias(given: Mapping[str, float] | None, text: TextModel) -> dict[int, float] | None:
    if not given:
        return None
    bias: dict[int, float] = {}
    for key, value in given.items():
        short = key.isascii() and key.isdigit() and len(key) <= _ID_DIGITS
        if not short or int(key) >= text.vocab_size:
            raise InvalidRequest(
                f"'{key[:80]}' is not a token id from 0 to {text.vocab_size - 1}",
                param="logit_bias",
            )
        bias[int(key)] = value
    return bias


def stop_rules(
    body: GenerationBody, prompt_tokens: int, text: TextModel, limits: ServedLimits
) -> StopRules:
    """Raises ContextTooLong where prompt and answer do not fit."""
    max_tokens = _max_tokens(body, prompt_tokens, limits)
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens is {min_tokens}, more than the {max_tokens} tokens there may be",
            param="min_tokens",
        )
    own = body.stop_token_ids or []
    if any(not 0 <= token < text.vocab_size for token in own):
        raise InvalidRequest(
            f"a stop token id is outside 0 to {text.vocab_size - 1}", param="stop_token_ids"
        )
    # a model's files may name an end that the model cannot say; workers index by these ids
    ends = () if body.ignore_eos else (t for t in text.eos_ids if t < text.vocab_size)
    ids = [*ends, *own]
    return StopRules(
        max_tokens=max_tokens, min_tokens=min_tokens, stop_token_ids=tuple(dict.fromkeys(ids))
    )


def _max_tokens(body: GenerationBody, prompt_tokens: int, limits: ServedLimits) -> int:
    """What is asked for, or what is left of the context; raises ContextTooLong."""
    context = limits.model_context if limits.max_context is None else limits.max_context
    left = context - prompt_tokens
    whose = "the model takes" if limits.max_context is None else "the present gear holds"
    asked = getattr(body, "max_completion_tokens", None) or body.max_tokens
    if left < 1:
        raise ContextTooLong(
            f"the prompt has {prompt_tokens} tokens; {whose} {context} with the answer",
            param=_prompt_field(body),
        )
    if asked is None:
        return left if isinstance(body, ChatBody) else min(COMPLETION_MAX_TOKENS, left)
    if asked > left:
        raise ContextTooLong(
            f"the prompt's {prompt_tokens} tokens and the {asked} asked for are more than the "
            f"{context} that {whose}",
            param="max_tokens",
        )
    return int(asked)


def _prompt_field(body: GenerationBody) -> str:
    return "messages" if isinstance(body, ChatBody) else "prompt"
