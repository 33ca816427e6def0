"""What `flexslurm plan` is asked for, read into the planner's values; never plans."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import click
from pydantic import TypeAdapter, ValidationError

from flexslurm.config.units import Seconds
from flexslurm.config.whole import shown, whole
from flexslurm.errors import ConfigError
from flexslurm.gear import Signature

if TYPE_CHECKING:
    from flexslurm.planner.workload import Slo, Workload

_SECONDS: TypeAdapter[float] = TypeAdapter(Seconds)
_RATE = re.compile(r"^([0-9]+(?:\.[0-9]+)?)(?:/(s|min|h))?$")
_MOST_RATE = 1e12
_PER = {None: 1.0, "s": 1.0, "min": 60.0, "h": 3600.0}


def check_together(options: Mapping[str, Any]) -> None:
    """Raises UsageError for options that say nothing beside each other, or nothing at all."""
    if options["capacity"] is None:
        for name, words in (("picture", "the curve"), ("price", "the cost")):
            if options[name] is not None:
                raise click.UsageError(f"--{name} is for {words} of --capacity: give that too")
        return
    for name in ("workload", "explain", "what_if", "out", "every"):
        if options[name]:
            option = name.replace("_", "-")
            raise click.UsageError(f"--capacity and --{option} cannot be given together")


def read_allocation(text: str, option: str) -> Signature:
    """`TYPE:GPUSxNODES,…` with at least one GPU. Raises ConfigError, UsageError."""
    found = Signature.parse(text)
    if not found.counts:
        raise click.UsageError(f"{option} names no GPUs")
    return found


def read_pairs(text: str, option: str, legal: tuple[str, ...]) -> dict[str, str]:
    """`a=1,b=2` as a dict; raises ConfigError for another key or a missing value."""
    found: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = part.partition("=")
        if not equals or not value or key.strip() not in legal:
            raise ConfigError(
                f"{option}: cannot read {shown(part)}",
                hint=f"write {','.join(f'{key}=…' for key in legal)}, or some of them",
            )
        if key.strip() in found:
            raise ConfigError(f"{option}: '{key.strip()}' is given twice")
        found[key.strip()] = value.strip()
    return found


def read_workload(pairs: Mapping[str, str], option: str) -> Workload:
    """`in`, `out` (tokens) and `rate` (requests per second, `20/s`, `90/min`)."""
    from flexslurm.planner.workload import Workload

    default = Workload()
    return Workload(
        _tokens(pairs, "in", default.prompt_tokens, option),
        _tokens(pairs, "out", default.output_tokens, option),
        _rate(pairs["rate"], option) if "rate" in pairs else None,
    )


def read_slo(text: str | None) -> Slo:
    """`ttft=2s,tpot=50ms`."""
    from flexslurm.planner.workload import Slo

    pairs = read_pairs(text or "", "--slo", ("ttft", "tpot"))
    values = {key: _seconds(value, f"--slo {key}") for key, value in pairs.items()}
    return Slo(values.get("ttft"), values.get("tpot"))


def read_prices(text: str | None, types: Collection[str]) -> dict[str, float]:
    """`h100=4.2,l4=0.8`: what a GPU of these types costs, in any unit."""
    prices: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in (text or "").split(","))):
        key, _, value = part.partition("=")
        if key.strip() in prices:
            raise ConfigError(f"--price: '{key.strip()}' is given twice")
        try:
            prices[key.strip()] = float(value)
        except ValueError:
            raise ConfigError(
                f"--price: cannot read {shown(part)}", hint="write TYPE=NUMBER"
            ) from None
        if not 0 < prices[key.strip()] < float("inf"):
            raise ConfigError(f"--price: {shown(part)} must be above 0, and finite")
        if key.strip() not in types:
            raise ConfigError(
                f"--price: the pool has no {shown(key)}", hint=f"it has {', '.join(types)}"
            )
    return prices


def _tokens(pairs: Mapping[str, str], key: str, default: int, option: str) -> int:
    if key not in pairs:
        return default
    tokens = whole(pairs[key])
    if not tokens:
        raise ConfigError(
            f"{option}: '{key}' must be a whole number of tokens, not {shown(pairs[key])}"
        )
    return tokens


def _rate(text: str, option: str) -> float:
    match = _RATE.match(text)
    if match is None or not 0 < float(match[1]) < _MOST_RATE:
        raise ConfigError(
            f"{option}: cannot read the rate {shown(text)}", hint="write 20/s or 90/min"
        )
    return float(match[1]) / _PER[match[2]]


def _seconds(text: str, option: str) -> float:
    try:
        value = _SECONDS.validate_python(text)
    except ValidationError as error:
        reason = str(error.errors()[0]["msg"]).removeprefix("Value error, ")
        raise ConfigError(f"{option}: {reason}") from None
    if value <= 0:
        raise ConfigError(f"{option}: must be above 0, not '{text}'")
    return value
