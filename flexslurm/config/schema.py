"""Turns YAML into checked values, with errors that name file, line, key and the nearest key."""

from __future__ import annotations

import difflib
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Generic, NamedTuple, TypeVar, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from flexslurm.config import bounded
from flexslurm.config.yaml_text import Loc, Origin, Place, Read, read_yaml
from flexslurm.errors import ConfigError

_MAX_FILE_BYTES = 4 * 2**20
_MAX_SHOWN = 5
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Section(BaseModel):
    """A part of a configuration file: immutable, unknown keys refused, numbers finite."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _empty_is_left_out(cls, data: Any) -> Any:
        """A key with nothing behind it (all its lines are comments) counts as left out."""
        if not isinstance(data, dict):
            return data
        fields = cls.model_fields
        return {
            key: value
            for key, value in data.items()
            if value is not None or key not in fields or takes_none(fields[key].annotation)
        }

    @field_validator("*", mode="after")
    @classmethod
    def _no_control_characters(cls, value: Any) -> Any:
        """Texts become paths, arguments and variables: none can hold what a keyboard cannot."""
        if isinstance(value, str) and (bad := _CONTROL.search(value)) is not None:
            raise ValueError(f"the character U+{ord(bad[0]):04X} is not allowed here")
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _truth_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool) and info.field_name is not None:
            kinds = set(_scalars(cls.model_fields[info.field_name].annotation))
            if kinds & {int, float} and bool not in kinds:
                raise ValueError(f"a number is expected, not {str(value).lower()}")
        return value


def named(word: str) -> str:
    """A name that becomes part of paths and job names. Raises ValueError."""
    if _NAME.fullmatch(word) is None:
        raise ValueError(
            f"'{word}' is no name: letters, digits, '.', '_' and '-', at most 64, "
            "beginning with a letter or digit"
        )
    return word


Name = Annotated[str, AfterValidator(named)]

S = TypeVar("S", bound=Section)


class Assignment(NamedTuple):
    """A value that wins over the file's: a dotted key, the value, and who says so."""

    key: str
    read: Read
    place: Place | None


@dataclass(frozen=True, slots=True)
class Checked(Generic[S]):
    """A section and the place of every value that was written somewhere, by location."""

    value: S
    places: Mapping[Loc, Place]


def load_section(kind: type[S], path: Path, overrides: Mapping[str, object] | None = None) -> S:
    """Read a YAML file into `kind`; `overrides` maps dotted keys to values that win over it.

    Raises ConfigError naming the file, the line and the key.
    """
    return parse_section(kind, read_text(path), str(path), overrides)


def parse_section(
    kind: type[S], text: str, file: str, overrides: Mapping[str, object] | None = None
) -> S:
    """As load_section, from text; `file` is the name used in errors."""
    assignments = [
        Assignment(key, Read(value, {}), None) for key, value in (overrides or {}).items()
    ]
    return check_text(kind, text, file, assignments).value


def check_text(
    kind: type[S], text: str, file: str, assignments: Sequence[Assignment] = ()
) -> Checked[S]:
    """As parse_section, keeping where each value comes from; later assignments win.

    Raises ConfigError.
    """
    data, noted = read_yaml(text, file)
    places = dict(noted)
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise ConfigError("a mapping of keys to values is expected", file=file, line=1)
    for assignment in assignments:
        loc = _resolve(kind, data, assignment)
        data = _with(data, loc, assignment.read.value)
        places = {at: place for at, place in places.items() if at[: len(loc)] != loc}
        if assignment.place is not None:
            for length in range(1, len(loc)):
                places.setdefault(loc[:length], assignment.place)
            places[loc] = assignment.place
            places |= {loc + at: assignment.place for at in assignment.read.places}
    try:
        return Checked(kind.model_validate(data), places)
    except ValidationError as error:
        raise _explain(kind, error, file, places) from None


def read_text(path: Path) -> str:
    """The text of a settings file. Raises ConfigError when it is missing, binary or too large."""
    try:
        status = path.stat()
        if stat.S_ISREG(status.st_mode) and status.st_size > _MAX_FILE_BYTES:
            raise ConfigError(
                f"{status.st_size} bytes are too many for a settings file", file=str(path)
            )
        return bounded.read_text(path, _MAX_FILE_BYTES)
    except FileNotFoundError:
        raise ConfigError("no such file", file=str(path), hint=_nearest_file(path)) from None
    except ValueError:  # not UTF-8, or a name with a null character
        raise ConfigError("cannot read it: it is not UTF-8 text", file=str(path)) from None
    except OSError as error:
        raise ConfigError(f"cannot read it: {error.strerror}", file=str(path)) from None


def _nearest_file(path: Path) -> str | None:
    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        return None
    near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.75)
    return f"did you mean '{path.parent / near[0]}'?" if near else None


# ------------------------------------------------------------------------------------- overrides


def _resolve(kind: type[BaseModel], data: Any, assignment: Assignment) -> Loc:
    """The location a dotted key stands for, given what is in the file.

    Keys of the file may hold dots (`gpu_types.a100.80`): the longest one that fits is taken.
    From the environment, upper case and `_` for `-` are let pass.
    """
    parts, loc = assignment.key.split("."), Loc()
    loose = assignment.place is not None and assignment.place.origin is Origin.ENVIRONMENT
    while parts:
        if isinstance(data, list):
            index = _index(parts[0], data, assignment)
            loc, parts, data = (*loc, index), parts[1:], data[index]
            continue
        if not isinstance(data, dict) and data is not None:
            source = None if assignment.place is None else str(assignment.place)
            words = f"{dotted(loc)} holds a value and no keys"
            raise ConfigError(words, file=source, key=assignment.key)
        mapping = data or {}
        key, used = _longest_key(parts, [*mapping, *legal_keys(kind, loc)], loose)
        loc, parts, data = (*loc, key), parts[used:], mapping.get(key)
    return loc


def _longest_key(parts: Sequence[str], known: Sequence[str], loose: bool) -> tuple[str, int]:
    plain = {_loosened(key) if loose else key: key for key in reversed(known)}
    for used in range(len(parts), 0, -1):
        word = ".".join(parts[:used])
        if (found := plain.get(_loosened(word) if loose else word)) is not None:
            return found, used
    return (parts[0].lower() if loose else parts[0]), 1


def _loosened(key: str) -> str:
    return key.lower().replace("-", "_").replace(".", "_")


def _index(word: str, items: Sequence[object], assignment: Assignment) -> int:
    if word.isascii() and word.isdigit() and len(word) < 9 and int(word) < len(items):
        return int(word)
    legal = f"0 to {len(items) - 1}" if items else "none: the list is empty"
    source = None if assignment.place is None else str(assignment.place)
    raise ConfigError(
        f"'{word}' is not the number of an entry", file=source, key=assignment.key,
        hint=f"entries here: {legal}",
    )  # fmt: skip


def _with(data: Any, loc: Loc, value: object) -> Any:
    """A copy of `data` with the value at `loc`; what aliases share elsewhere stays as it is."""
    if not loc:
        return value
    if isinstance(data, list):
        assert isinstance(loc[0], int)
        return [*data[: loc[0]], _with(data[loc[0]], loc[1:], value), *data[loc[0] + 1 :]]
    mapping = data if isinstance(data, dict) else {}
    return {**mapping, loc[0]: _with(mapping.get(loc[0]), loc[1:], value)}


# ---------------------------------------------------------------------------------------- errors


def place_of(loc: Loc, places: Mapping[Loc, Place]) -> Place | None:
    """Where the value at `loc`, or the nearest thing around it, is written."""
    while loc and loc not in places:
        loc = loc[:-1]
    return places.get(loc)


def dotted(loc: Loc) -> str:
    return ".".join(str(part) for part in loc)


def _explain(
    kind: type[Section], error: ValidationError, file: str, places: Mapping[Loc, Place]
) -> ConfigError:
    """The first problem as the error, with the others below its hint."""
    # An unknown key comes first: it is often why another one is missing.
    problems = sorted(error.errors(), key=lambda details: details["type"] != "extra_forbidden")
    first, *more = [_one(kind, details, file, places) for details in problems]
    lines = [first.hint] if first.hint else []
    for problem in more[:_MAX_SHOWN]:
        lines.append(problem.message + (f" ({problem.hint})" if problem.hint else ""))
    if len(more) > _MAX_SHOWN:
        lines.append(f"and {len(more) - _MAX_SHOWN} more")
    first.hint = "\n  ".join(lines) or None
    return first


def _one(kind: type[Section], details: Any, file: str, places: Mapping[Loc, Place]) -> ConfigError:
    loc = _loc(details)
    place = place_of(loc, places) or Place(Origin.FILE, file)
    message, hint = _words(kind, details)
    return ConfigError(
        message, file=place.name, line=place.line, key=dotted(loc) or None, hint=hint
    )


def misfit(words: str, *loc: str | int, hint: str | None = None) -> PydanticCustomError:
    """For validators of a section: a problem with the value at `loc` below the section."""
    return PydanticCustomError("misfit", "{words}", {"words": words, "loc": loc, "hint": hint})


def _loc(details: Any) -> Loc:
    below = details["ctx"]["loc"] if details["type"] == "misfit" else ()
    return tuple(part if isinstance(part, int) else str(part) for part in (*details["loc"], *below))


_WANTED = {
    "int_parsing": "a whole number is expected",
    "int_type": "a whole number is expected",
    "int_from_float": "a whole number is expected",
    "float_parsing": "a number is expected",
    "float_type": "a number is expected",
    "finite_number": "a number is expected",
    "bool_parsing": "true or false is expected",
    "bool_type": "true or false is expected",
    "string_type": "text is expected",
    "string_pattern_mismatch": "text of another form is expected",
    "list_type": "a list is expected",
    "model_type": "a mapping of keys to values is expected",
    "dict_type": "a mapping of keys to values is expected",
}


def _words(kind: type[Section], details: Any) -> tuple[str, str | None]:
    """What pydantic found, in words of ours where we have better ones, and a hint."""
    loc, given, what = _loc(details), details.get("input"), details["type"]
    message = str(details["msg"]).removeprefix("Value error, ").removeprefix("Input ")
    if what == "extra_forbidden":
        return "unknown key", nearest_hint(str(loc[-1]), legal_keys(kind, loc[:-1]))
    if what == "missing":
        return "this key is required", None
    if what in ("value_error", "misfit"):
        return message, details["ctx"].get("hint")
    if what in ("too_short", "too_long"):
        return message[:1].lower() + message[1:].replace(" after validation", ""), None
    hint = None
    if what == "literal_error":
        hint = nearest_hint(str(given), [word.strip("'") for word in _expected(details)])
    elif what == "string_pattern_mismatch":
        section = _section_at(kind, loc[:-1])
        field = None if section is None else section.model_fields.get(str(loc[-1]))
        hint = None if field is None else field.description
    elif what == "string_type" and isinstance(given, (bool, int, float)):
        hint = "put the value in quotes"
    return f"{_WANTED.get(what, message)}, not {_shown(given)}", hint


def _shown(value: object) -> str:
    if isinstance(value, (dict, BaseModel)):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if value is None or isinstance(value, bool):
        return "nothing" if value is None else str(value).lower()
    text = str(value)
    text = text if len(text) <= 60 else text[:57] + "..."
    return f"'{text}'" if isinstance(value, str) else text


def _expected(details: Any) -> list[str]:
    text = str(details.get("ctx", {}).get("expected", ""))
    return [part.strip() for part in text.replace(" or ", ", ").split(",")]


def nearest_hint(word: str, legal: Sequence[str]) -> str | None:
    """`did you mean …` where one is near, else the legal ones."""
    if not legal:
        return None
    near = difflib.get_close_matches(word, legal, n=1)
    return f"did you mean '{near[0]}'?" if near else f"legal here: {', '.join(legal)}"


# ----------------------------------------------------------------------------- looking at a schema


def legal_keys(kind: type[BaseModel], loc: Loc) -> list[str]:
    """The keys a section at `loc` below `kind` may have."""
    section = _section_at(kind, loc)
    return [] if section is None else list(section.model_fields)


def _section_at(kind: type[BaseModel], loc: Loc) -> type[BaseModel] | None:
    current: type[BaseModel] | None = kind
    container = False
    for part in loc:
        if container:  # a name in a dict of sections or an index in a list: not a field
            container = False
            continue
        field = current.model_fields.get(str(part)) if current is not None else None
        if field is None:
            return None
        current = section_in(field.annotation)
        container = get_origin(field.annotation) in (dict, list)
    return None if container else current


def section_in(annotation: Any) -> type[BaseModel] | None:
    """The section that an annotation such as `dict[str, Partition]` or `X | None` holds."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (section_in(argument) for argument in get_args(annotation))
    return next((section for section in found if section is not None), None)


def takes_none(annotation: Any) -> bool:
    return annotation is NoneType or NoneType in get_args(annotation)


def _scalars(annotation: Any) -> list[type]:
    """The plain types of an annotation, not those inside of lists and dicts."""
    if annotation in (int, float, bool, str):
        return [annotation]
    if get_origin(annotation) in (list, dict, tuple):
        return []
    return [kind for argument in get_args(annotation) for kind in _scalars(argument)]
