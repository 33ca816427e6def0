"""Chat messages to prompt text by the model's own Jinja template; never runs a client's template.

The rendering equals transformers' `apply_chat_template`: the same environment (sandboxed and
immutable, blocks trimmed, loop controls, `tojson` without HTML escapes, `raise_exception`,
`strftime_now`, `{% generation %}` blocks) and the same variables.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from flexslurm.errors import InvalidRequest, ModelError

Message = Mapping[str, Any]

# Stands where the last message's text ends, so that the place can be found after rendering.
_END_MARK = "\ue000FLEXSLURM_FINAL_MESSAGE_ENDS\ue000"


# A template is a program without types: what a message lacks shows as any of these.
_TEMPLATE_FAULTS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RecursionError,
)


class ChatTemplate:
    """The model's template, or several by name (`default`, `tool_use`), compiled once."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """Raises ModelError where a template does not compile, or none is the default."""
        if "default" not in sources:
            names = ", ".join(sorted(sources))
            raise ModelError(
                f"the model has several chat templates ({names}) and none named 'default'",
                hint="set model.chat_template to a file with the one to use",
            )
        environment = _environment()
        self._special_tokens = dict(special_tokens)
        self._sources = dict(sources)
        try:
            self._templates = {
                name: environment.from_string(source) for name, source in sources.items()
            }
        except TemplateError as error:
            raise ModelError(f"the chat template does not compile: {error}") from error

    def mentions(self, word: str) -> bool:
        """Whether the default template's text has this word, as it does for roles it knows."""
        return word in self._sources["default"]

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text, special tokens in it by name.

        Raises InvalidRequest, with the template's own words where it objects.
        """
        chat = [{key: value for key, value in m.items() if value is not None} for m in messages]
        final = ""
        if continue_final_message:
            final = _mark_final_message(chat)
        name = "tool_use" if tools is not None and "tool_use" in self._templates else "default"
        given = {**self._special_tokens, **(variables or {})}
        given |= {
            "messages": chat,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = self._templates[name].render(given)
        except _TEMPLATE_FAULTS as error:
            raise InvalidRequest(
                f"the model's chat template refused the messages: {error}", param="messages"
            ) from error
        return _cut_at_mark(text, final) if continue_final_message else text


def _mark_final_message(chat: list[dict[str, Any]]) -> str:
    content = chat[-1].get("content") if chat else None
    if not isinstance(content, str):
        raise InvalidRequest(
            "continue_final_message needs a last message whose content is text", param="messages"
        )
    chat[-1]["content"] = content + _END_MARK
    return content


def _cut_at_mark(text: str, final: str) -> str:
    at = text.rfind(_END_MARK)
    if at < 0 or final.strip() not in text:
        raise InvalidRequest(
            "continue_final_message: the chat template does not keep the last message's text",
            param="continue_final_message",
        )
    return text[:at]


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = _PlainNamespace
    return environment


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


class _PlainNamespace(Namespace):
    """Jinja's namespace without names that begin with an underscore, which reach into Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, rest = args[0], args[1:]
        for name in dict(*rest, **kwargs):
            _check_name(name)
        Namespace.__init__(self, *rest, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot have the attribute {name!r}")


class _GenerationBlock(Extension):
    """`{% generation %} … {% endgeneration %}` marks what an assistant wrote; here, its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> str:
        return str(caller())
