"""Reading YAML into checked values, with errors that name file, line, key and the nearest key."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from flexslurm.errors import ConfigError

Loc = tuple[str | int, ...]


class Section(BaseModel):
    """A part of a configuration file: immutable, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


S = TypeVar("S", bound=Section)


class _LineLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice, which YAML forbids and PyYAML lets pass."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, (list, dict)) or key in seen:
                problem = "is not a plain word" if isinstance(key, (list, dict)) else "stands twice"
                raise yaml.MarkedYAMLError(
                    problem=f"the key '{key}' {problem}", problem_mark=key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def load_section(kind: type[S], path: Path, overrides: Mapping[str, object] | None = None) -> S:
    """Read a YAML file into `kind`; `overrides` maps dotted keys to values that win over it.

    Raises ConfigError naming the file, the line and the key.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError("no such file", file=str(path)) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"cannot read it: {reason}", file=str(path)) from error
    return parse_section(kind, text, str(path), overrides)


def parse_section(
    kind: type[S], text: str, file: str, overrides: Mapping[str, object] | None = None
) -> S:
    """As load_section, from text; `file` is the name used in errors."""
    lines: dict[Loc, int] = {}
    try:
        loader = _LineLoader(text)
        try:
            node = loader.get_single_node()
            data = loader.construct_document(node) if node is not None else {}
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or "not valid YAML"
        line = mark.line + 1 if mark is not None else None
        raise ConfigError(str(problem), file=file, line=line) from None
    except RecursionError:
        raise ConfigError(
            "nested too deeply, or an alias that contains itself", file=file
        ) from None
    if node is not None:
        _note_lines(node, (), lines)
    if not isinstance(data, dict):
        raise ConfigError("a mapping of keys to values is expected", file=file, line=1)
    for dotted, value in (overrides or {}).items():
        _override(data, dotted.split("."), value)
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise _explain(kind, error, file, lines) from None


def _note_lines(node: yaml.Node, loc: Loc, lines: dict[Loc, int], depth: int = 0) -> None:
    lines.setdefault(loc, node.start_mark.line + 1)
    if depth > 32:
        return
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            child = (*loc, str(key.value))
            lines[child] = key.start_mark.line + 1
            _note_lines(value, child, lines, depth + 1)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            _note_lines(value, (*loc, index), lines, depth + 1)


def _override(data: dict[str, Any], path: Sequence[str], value: object) -> None:
    for key in path[:-1]:
        child = data.setdefault(key, {})
        if not isinstance(child, dict):
            raise ConfigError(f"cannot set {'.'.join(path)}: '{key}' is not a mapping")
        data = child
    data[path[-1]] = value


def _explain(
    kind: type[Section], error: ValidationError, file: str, lines: Mapping[Loc, int]
) -> ConfigError:
    first = error.errors()[0]
    loc = tuple(part if isinstance(part, int) else str(part) for part in first["loc"])
    at = loc
    while at and at not in lines:
        at = at[:-1]
    key = ".".join(str(part) for part in loc) or None
    message, hint = str(first["msg"]), None
    if first["type"] == "extra_forbidden":
        message = "unknown key"
        hint = nearest_hint(str(loc[-1]), legal_keys(kind, loc[:-1]))
    elif first["type"] == "missing":
        message = "this key is required"
    elif first["type"] == "value_error":
        message = message.removeprefix("Value error, ")
    elif first["type"] == "literal_error":
        hint = nearest_hint(str(first["input"]), _expected(first))
    more = error.error_count() - 1
    if more:
        message += f" (and {more} more)"
    return ConfigError(message, file=file, line=lines.get(at), key=key, hint=hint)


def _expected(details: Any) -> list[str]:
    text = str(details.get("ctx", {}).get("expected", ""))
    return [part.strip().strip("'") for part in text.replace(" or ", ", ").split(",")]


def nearest_hint(word: str, legal: Sequence[str]) -> str | None:
    """`did you mean …` where one is near, else the legal ones."""
    if not legal:
        return None
    near = difflib.get_close_matches(word, legal, n=1)
    return f"did you mean '{near[0]}'?" if near else f"legal here: {', '.join(legal)}"


def legal_keys(kind: type[BaseModel], loc: Loc) -> list[str]:
    """The keys a section at `loc` below `kind` may have."""
    current: type[BaseModel] | None = kind
    container = False
    for part in loc:
        if container:  # a name in a dict of sections or an index in a list: not a field
            container = False
            continue
        field = current.model_fields.get(str(part)) if current is not None else None
        if field is None:
            return []
        current = _section_in(field.annotation)
        container = get_origin(field.annotation) in (dict, list)
    return list(current.model_fields) if current is not None and not container else []


def _section_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (_section_in(argument) for argument in get_args(annotation))
    return next((section for section in found if section is not None), None)
