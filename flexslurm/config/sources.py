"""Effective settings and where each comes from: command line, environment, file, default.

The earlier in this order wins. An option `--set KEY=VALUE` sets a key of the service file, and
`--set site.KEY=VALUE` one of the site file. A variable FLEXSLURM_SERVICE__SERVING__MAX_BATCH or
FLEXSLURM_SITE__SLURM__POLL_INTERVAL does the same: two underscores stand for the dot. Values are
read as YAML. Never looks at the cluster or the model.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, get_args, get_origin

from pydantic import BaseModel

from flexslurm.config.schema import (
    Assignment,
    S,
    Section,
    check_text,
    dotted,
    nearest_hint,
    place_of,
    read_text,
)
from flexslurm.config.service import Service
from flexslurm.config.site import Site
from flexslurm.config.units import Quantity
from flexslurm.config.yaml_text import Loc, Origin, Place, Read, read_yaml
from flexslurm.errors import ConfigError

LAYERS: tuple[str, ...] = ("service", "site")
_VARIABLE = re.compile(r"FLEXSLURM_([A-Z0-9]+)__(\w+)")
# Paths are relative to the file that names them. What a node expands for itself is not here.
_PATHS: dict[type[Section], tuple[Loc, ...]] = {
    Service: (
        ("model", "path"),
        ("model", "chat_template"),
        ("gateway", "api_keys_file"),
        ("executor", "checkpoint_dir"),
    ),
    Site: (
        ("paths", "shared_dir"),
        ("slurm", "conf"),
        ("slurm", "topology"),
        ("measured", "profiles"),
        ("measured", "links"),
    ),
}


@dataclass(frozen=True, slots=True)
class Setting:
    """One effective value: its dotted key, the value, how to write it, and who set it."""

    key: str
    value: object
    shown: str
    origin: Origin
    source: str
    """`service.yaml:12`, `--set …`, the variable's name; empty for a default."""


@dataclass(frozen=True, slots=True)
class Loaded(Generic[S]):
    """A checked settings file together with the place of every value in it."""

    value: S
    file: str
    places: Mapping[Loc, Place]

    def written(self, *loc: str | int) -> bool:
        """Whether somebody set this value, so that it is not a default."""
        return loc in self.places

    def error(self, loc: Loc, words: str, hint: str | None = None) -> ConfigError:
        """An error at the place of the value at `loc`, or of the nearest thing around it."""
        place = place_of(loc, self.places) or Place(Origin.FILE, self.file)
        return ConfigError(words, file=place.name, line=place.line, key=dotted(loc), hint=hint)

    def settings(self) -> list[Setting]:
        """Every effective value, in the order of the schema."""
        return [self._setting(*leaf) for leaf in _leaves(self.value, ())]

    def _setting(self, loc: Loc, value: object, annotation: Any) -> Setting:
        place = self.places.get(loc)
        origin = Origin.DEFAULT if place is None else place.origin
        source = "" if place is None else str(place)
        return Setting(dotted(loc), value, show_value(value, annotation), origin, source)


def load_service(
    path: Path, options: Sequence[str] = (), environ: Mapping[str, str] = os.environ
) -> Loaded[Service]:
    """The service file under what `--set` options and the environment say.

    Paths come back absolute. Raises ConfigError naming the place.
    """
    return _one_block_size(_load(Service, "service", path, options, environ))


def load_site(
    path: Path, options: Sequence[str] = (), environ: Mapping[str, str] = os.environ
) -> Loaded[Site]:
    """As load_service, for the site file."""
    return _load(Site, "site", path, options, environ)


def _load(
    kind: type[S], layer: str, path: Path, options: Sequence[str], environ: Mapping[str, str]
) -> Loaded[S]:
    assignments = [
        assignment
        for owner, assignment in [*from_environment(environ), *from_options(options)]
        if owner == layer
    ]
    checked = check_text(kind, read_text(path), str(path), assignments)
    loaded = Loaded(checked.value, str(path), checked.places)
    for loc in _PATHS.get(kind, ()):
        loaded = _absolute(loaded, loc)
    return loaded


def from_options(options: Sequence[str]) -> list[tuple[str, Assignment]]:
    """`--set` options as assignments, each with the file it is for. Raises ConfigError."""
    found = []
    for option in options:
        key, equals, text = option.partition("=")
        layer, dot, rest = key.strip().partition(".")
        if not dot or layer not in LAYERS:
            layer, rest = "service", key.strip()
        if not equals or not rest or not all(rest.split(".")):
            raise ConfigError(
                f"cannot read --set '{option}'",
                hint="write KEY=VALUE, for example serving.max_batch=8 or site.slurm.kill_wait=30s",
            )
        place = Place(Origin.COMMAND_LINE, "--set")
        found.append((layer, Assignment(rest, _read_value(text, place), place)))
    return found


def from_environment(environ: Mapping[str, str]) -> list[tuple[str, Assignment]]:
    """Variables as assignments, each with the file it is for. Raises ConfigError."""
    found = []
    for name in sorted(environ):
        match = _VARIABLE.fullmatch(name)
        if match is None:
            continue
        layer, key = match[1].lower(), match[2].replace("__", ".")
        if layer not in LAYERS:
            legal = [f"FLEXSLURM_{word.upper()}__{match[2]}" for word in LAYERS]
            raise ConfigError("unknown variable", file=name, hint=nearest_hint(name, legal))
        place = Place(Origin.ENVIRONMENT, name)
        found.append((layer, Assignment(key, _read_value(environ[name], place), place)))
    return found


def _read_value(text: str, place: Place) -> Read:
    """A value as YAML where it is YAML, else the text itself (`a: b`, `@file`, `%d`)."""
    try:
        return read_yaml(text, place.name, place.origin)
    except ConfigError:
        if text.lstrip().startswith(("[", "{")):
            raise
        return Read(text, {})


def _absolute(loaded: Loaded[S], loc: Loc) -> Loaded[S]:
    """With `~`, variables and the place of the file resolved in one path of the settings."""
    text = _at(loaded.value, loc)
    if not isinstance(text, str):
        return loaded
    expanded = os.path.expandvars(text)
    if (unknown := re.search(r"\$\{?(\w+)", expanded)) is not None:
        raise loaded.error(loc, f"the variable {unknown[1]} is not set", "it stands in this path")
    try:
        path = Path(expanded).expanduser()
    except RuntimeError:
        raise loaded.error(loc, f"'{text}': no such home directory") from None
    place = place_of(loc, loaded.places)
    from_file = place is not None and place.origin is Origin.FILE
    base = Path(loaded.file).parent if from_file else Path()
    text = os.path.normpath(Path.cwd() / base / path)
    return Loaded(_changed(loaded.value, loc, text), loaded.file, loaded.places)


def _one_block_size(loaded: Loaded[Service]) -> Loaded[Service]:
    """`serving.block_tokens` and `executor.kvcache_chunk_size` are two names of one thing.

    The first wins where both are set; where only one is, the other follows it.
    """
    block, chunk = ("serving", "block_tokens"), ("executor", "kvcache_chunk_size")
    if loaded.written(*block) and loaded.written(*chunk):
        return loaded
    source, target = (chunk, block) if loaded.written(*chunk) else (block, chunk)
    places = dict(loaded.places)
    if source in places:
        places[target] = places[source]
    return Loaded(_changed(loaded.value, target, _at(loaded.value, source)), loaded.file, places)


def _at(section: BaseModel, loc: Loc) -> Any:
    value: Any = section
    for part in loc:
        value = getattr(value, str(part))
    return value


def _changed(section: Any, loc: Loc, value: object) -> Any:
    name = str(loc[0])
    inner = value if len(loc) == 1 else _changed(getattr(section, name), loc[1:], value)
    return section.model_copy(update={name: inner})


# ------------------------------------------------------------------------------- showing what is


def _leaves(section: BaseModel, loc: Loc) -> Iterator[tuple[Loc, object, Any]]:
    for name, field in type(section).model_fields.items():
        marks = [mark for mark in field.metadata if isinstance(mark, Quantity)]
        annotation = marks[0] if marks else field.annotation
        yield from _below(getattr(section, name), (*loc, name), annotation)


def _below(value: Any, loc: Loc, annotation: Any) -> Iterator[tuple[Loc, object, Any]]:
    if isinstance(value, BaseModel):
        yield from _leaves(value, loc)
    elif isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _below(item, (*loc, key), annotation)
    elif isinstance(value, list) and any(isinstance(item, BaseModel) for item in value):
        for index, item in enumerate(value):
            yield from _below(item, (*loc, index), annotation)
    else:
        yield loc, value, annotation


def quantity_of(annotation: Any) -> Quantity | None:
    """What a setting measures, from its annotation; None for plain numbers and words."""
    if isinstance(annotation, Quantity):
        return annotation
    for mark in getattr(annotation, "__metadata__", ()):
        if isinstance(mark, Quantity):
            return mark
    if get_origin(annotation) is None:
        return None
    found = (quantity_of(argument) for argument in get_args(annotation))
    return next((quantity for quantity in found if quantity is not None), None)


def show_value(value: object, annotation: Any) -> str:
    """A value as it could stand in the file."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    quantity = quantity_of(annotation)
    if quantity is not None and isinstance(value, (int, float)):
        return quantity.show(value)
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, (list, dict)):
        return json.dumps(value, ensure_ascii=False)
    return str(value)
