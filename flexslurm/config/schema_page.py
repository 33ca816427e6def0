"""Writes the page of all keys of a settings file from its schema; never reads a file.

What it says is what the schema checks, so the page cannot go out of date.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from flexslurm.config.schema import Section, section_in
from flexslurm.config.sources import quantity_of, show_value
from flexslurm.config.units import Quantity


class Key(NamedTuple):
    """One key of a settings file, in words."""

    name: str
    kind: str
    default: str
    """As it would be written; `required` where there is none."""
    words: str


def keys_of(section: type[Section], prefix: str = "") -> Iterator[Key]:
    """Every key, sections inside of sections by dotted names (`NAME` and `N` stand for yours)."""
    for name, field in section.model_fields.items():
        inner = section_in(field.annotation)
        dotted = f"{prefix}{name}"
        default = _default(field)
        yield Key(dotted, _kind(field, inner), default, field.description or _doc(inner))
        if inner is not None and issubclass(inner, Section):
            yield from keys_of(inner, f"{dotted}{_step(field.annotation)}.")


def page(section: type[Section], title: str) -> str:
    """The keys as a Markdown page."""
    lines = [f"# {title}", "", _doc(section), ""]
    lines += ["| key | value | default | meaning |", "|---|---|---|---|"]
    for key in keys_of(section):
        cells = (f"`{key.name}`", key.kind, key.default, key.words)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _doc(section: type[BaseModel] | None) -> str:
    if section is None or section.__doc__ is None:
        return ""
    return inspect.cleandoc(section.__doc__).splitlines()[0]


def _step(annotation: Any) -> str:
    """What stands between a key and the keys inside of it."""
    kinds = {get_origin(annotation), *(get_origin(part) for part in get_args(annotation))}
    if dict in kinds:
        return ".NAME"
    return ".N" if list in kinds else ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        given = value.model_dump(mode="json", exclude_defaults=True)
        return f"`{given}`" if given else "as below"
    marks = [mark for mark in field.metadata if isinstance(mark, Quantity)]
    return f"`{show_value(value, marks[0] if marks else field.annotation)}`"


def _kind(field: FieldInfo, inner: type[BaseModel] | None) -> str:
    if inner is not None:
        step = _step(field.annotation)
        return {".NAME": "section for each NAME", ".N": "list of sections"}.get(step, "section")
    marks = [mark for mark in field.metadata if isinstance(mark, Quantity)]
    words = marks[0].name if marks else _type_words(field.annotation)
    bounds = [text for mark in field.metadata if (text := _bound(mark))]
    return " ".join([words, *([f"({', '.join(bounds)})"] if bounds and not marks else [])])


def _bound(mark: object) -> str:
    match mark:
        case Ge():
            return f"≥ {mark.ge}"
        case Gt():
            return f"> {mark.gt}"
        case Le():
            return f"≤ {mark.le}"
        case Lt():
            return f"< {mark.lt}"
    return ""


_PLAIN = {str: "text", int: "whole number", float: "number", bool: "true or false"}


def _type_words(annotation: Any) -> str:
    quantity = quantity_of(annotation)
    if quantity is not None or annotation in _PLAIN:
        return quantity.name if quantity is not None else _PLAIN[annotation]
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:  # by a check of the value: its words are in the description
        return _type_words(parts[0])
    if origin is Literal:
        return " or ".join(f"`{part}`" for part in parts)
    if origin in (Union, UnionType):
        return " or ".join(_type_words(part) for part in parts if part is not NoneType)
    words = _type_words(parts[-1]) if parts else getattr(annotation, "__name__", str(annotation))
    return {list: f"list of {words}", dict: f"{words} for each NAME"}.get(origin, words)
