"""Reads YAML text into plain values and remembers where each stood; never knows what they mean.

The scalars are those of YAML 1.2's core schema, not PyYAML's 1.1: `no` and `on` are words, `1:30`
and `010` are text and not 90 and 8, a date is text. Keys are always text. What a configuration file
has no use for is refused: tags of other types, a key given twice, an alias that contains itself.
Any text gives a value or a ConfigError.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any, ClassVar, NamedTuple

import yaml

from flexslurm.errors import ConfigError

Loc = tuple[str | int, ...]

_MAX_TEXT_BYTES = 4 * 2**20
_MAX_VALUES = 100_000
_MAX_DEPTH = 32
_MAX_DIGITS = 40


class Origin(StrEnum):
    """Who set a value; the earlier here wins over the later."""

    COMMAND_LINE = "command line"
    ENVIRONMENT = "environment"
    FILE = "file"
    DEFAULT = "default"


class Place(NamedTuple):
    """Where a value stands: a file and line, an option, or a variable."""

    origin: Origin
    name: str
    line: int | None = None

    def __str__(self) -> str:
        return self.name if self.line is None else f"{self.name}:{self.line}"


class Read(NamedTuple):
    """A value with the place of every part of it, by location."""

    value: Any
    places: Mapping[Loc, Place]


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with YAML 1.2's scalars, text keys and nothing else."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 - PyYAML declares it for instances
    yaml_constructors: ClassVar[dict[Any, Any]] = {}

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # Here and not while constructing: merging (<<) puts other mappings' keys beside our own.
        node = super().compose_mapping_node(anchor)
        assert isinstance(node, yaml.MappingNode)
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _problem("a key must be a plain word", key)
            key.value = _joined(key.value, key)
            if key.value in seen:
                raise _problem(f"the key '{key.value}' stands twice", key)
            seen.add(key.value)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        self.flatten_mapping(node)
        return {key.value: self.construct_object(value, deep=deep) for key, value in node.value}


def _problem(words: str, node: yaml.Node) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=words, problem_mark=node.start_mark)


def _build_bool(loader: _Loader, node: yaml.ScalarNode) -> bool:
    text = loader.construct_scalar(node).lower()
    if text not in ("true", "false"):
        raise _problem(f"'{text}' is not true or false", node)
    return text == "true"


def _build_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = loader.construct_scalar(node)
    if len(text) > _MAX_DIGITS:
        raise _problem("this number has too many digits", node)
    try:
        return int(text, 0)
    except ValueError:
        raise _problem(f"'{text}' is not a whole number", node) from None


def _build_float(loader: _Loader, node: yaml.ScalarNode) -> float:
    text = loader.construct_scalar(node).lower()
    try:
        return float(text.replace(".inf", "inf").replace(".nan", "nan"))
    except ValueError:
        raise _problem(f"'{text}' is not a number", node) from None


def _build_str(loader: _Loader, node: yaml.ScalarNode) -> str:
    return _joined(loader.construct_scalar(node), node)


def _joined(text: str, node: yaml.Node) -> str:
    """Text with the halves of a character, which JSON writes as two escapes, put together."""
    if not any(0xD800 <= ord(character) < 0xE000 for character in text):
        return text
    try:
        return text.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError:
        raise _problem("this text has half a character (a lone surrogate)", node) from None


def _build_unknown(loader: _Loader, node: yaml.Node) -> Any:
    raise _problem(f"the tag {node.tag} has no meaning here", node)


_TAG = "tag:yaml.org,2002:"
for _name, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?(?:0|[1-9][0-9]*)|0x[0-9a-fA-F]+|0o[0-7]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(?:(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+"
        r"|\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN)",
        "-+.0123456789",
    ),
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("merge", r"<<", "<"),
):
    _Loader.add_implicit_resolver(
        _TAG + _name, re.compile(rf"^(?:{_pattern})$"), ["" if c == "\0" else c for c in _first]
    )
for _name, _build in (
    ("bool", _build_bool),
    ("int", _build_int),
    ("float", _build_float),
    ("str", _build_str),
    ("null", yaml.SafeLoader.construct_yaml_null),
    ("seq", yaml.SafeLoader.construct_yaml_seq),
    ("map", yaml.SafeLoader.construct_yaml_map),
):
    _Loader.add_constructor(_TAG + _name, _build)
_Loader.add_constructor(None, _build_unknown)


def read_yaml(text: str, name: str, origin: Origin = Origin.FILE) -> Read:
    """Read one document; an empty one is None. `name` stands for the file in places and errors.

    Raises ConfigError naming the file and, where known, the line.
    """
    if len(text) > _MAX_TEXT_BYTES:
        raise ConfigError(f"{len(text)} characters are too many for a settings file", file=name)
    try:
        node, value = _load(text)
        places = dict(_places(node, name, origin)) if node is not None else {}
    except yaml.reader.ReaderError as error:
        at = text.count("\n", 0, error.position) + 1
        words = f"the character U+{error.character:04X} is not allowed"
        raise ConfigError(words, file=name, line=at) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = None if mark is None else mark.line + 1
        problem = str(error.problem or error.context or "not valid YAML")
        hint = "indent with spaces, not tabs" if "'\\t'" in problem else None
        raise ConfigError(problem, file=name, line=line, hint=hint) from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        # PyYAML converts some escapes and version numbers unchecked, without a mark.
        raise ConfigError(f"not valid YAML: {error}", file=name) from None
    except RecursionError:
        words = "nested too deeply, or an alias that contains itself"
        raise ConfigError(words, file=name) from None
    return Read(value, places)


def _load(text: str) -> tuple[yaml.Node | None, Any]:
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        return node, None if node is None else loader.construct_document(node)
    finally:
        loader.dispose()


def _places(root: yaml.Node, name: str, origin: Origin) -> Iterator[tuple[Loc, Place]]:
    """The place of every value below `root`; bounded, since aliases can fan out without end."""
    waiting: list[tuple[Loc, yaml.Node, int]] = [((), root, root.start_mark.line + 1)]
    count = 0
    while waiting:
        loc, node, line = waiting.pop()
        count += 1
        if count > _MAX_VALUES:
            raise _problem(f"more than {_MAX_VALUES} values, with aliases written out", node)
        if len(loc) > _MAX_DEPTH:
            raise _problem("nested too deeply, or an alias that contains itself", node)
        yield loc, Place(origin, name, line)
        if isinstance(node, yaml.MappingNode):
            # From the last to the first: the later popped wins, as our own key over a merged one.
            for key, value in reversed(node.value):
                waiting.append(((*loc, key.value), value, key.start_mark.line + 1))
        elif isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                waiting.append(((*loc, index), item, item.start_mark.line + 1))
