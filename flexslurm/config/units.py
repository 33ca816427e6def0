"""Quantities with units as people write them: `40GiB`, `300GB/s`, `5us`, `312TFLOPS`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated

from pydantic import BeforeValidator, Field

_BYTES = {
    "": 1, "B": 1,
    "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip
_RATE = {f"{unit}/s": factor for unit, factor in _BYTES.items() if unit} | {
    "": 1, "Mbit/s": 125_000, "Gbit/s": 125_000_000, "Mbps": 125_000, "Gbps": 125_000_000,
}  # fmt: skip
_SECONDS = {
    "": Decimal(1), "ns": Decimal("1e-9"), "us": Decimal("1e-6"), "ms": Decimal("1e-3"),
    "s": Decimal(1), "min": Decimal(60), "h": Decimal(3600), "d": Decimal(86400),
}  # fmt: skip
_FLOPS = {"": 1, "GFLOPS": 10**9, "TFLOPS": 10**12, "PFLOPS": 10**15}
# The exponent is bounded: a whole number of 10**999999999 bytes would fill the memory.
_NUMBER = re.compile(
    r"\s*([+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?)\s*([A-Za-z/]*)\s*", re.A
)
# Slurm's [days-]hours:minutes:seconds and days-hours[:minutes]. Its minutes:seconds are refused,
# since half of its readers take them for hours and minutes.
_CLOCK = re.compile(
    r"\s*(?:(?P<d>[0-9]{1,6})-(?P<h1>[0-9]{1,6})(?::(?P<m1>[0-9]{1,6}))?(?::(?P<s1>[0-9]{1,6}))?"
    r"|(?P<h>[0-9]{1,6}):(?P<m>[0-9]{1,6}):(?P<s>[0-9]{1,6}))\s*"
)


@dataclass(frozen=True, slots=True)
class Quantity:
    """What a setting measures, for messages and pages: marks the annotated types below."""

    name: str
    units: tuple[tuple[str, float], ...]
    """Units to show it in, the largest first."""

    def show(self, value: float) -> str:
        """`value` (in base units) in the largest unit that writes it exactly and in short."""
        for unit, factor in self.units:
            scaled = value / factor
            text = f"{scaled:.10g}"
            # An odd size must not be rounded; a time in binary fractions never is exact.
            tolerance = 0.0 if isinstance(value, int) else 1e-14
            exact = math.isclose(float(text) * factor, value, rel_tol=tolerance)
            if scaled >= 1 and len(text) <= 7 and exact:
                return text + unit
        base = next(unit for unit, factor in self.units if factor == 1)
        return f"{value:.15g}{base if value else ''}"


def _reader(units: Mapping[str, float | Decimal], example: str, clock: bool) -> BeforeValidator:
    def read(value: object) -> object:
        if not isinstance(value, str):
            return value
        if clock and (time := _CLOCK.fullmatch(value)) is not None:
            return _clock_s(time)
        match = _NUMBER.fullmatch(value)
        if match is None or match[2] not in units:
            legal = ", ".join(unit for unit in units if unit)
            raise ValueError(f"cannot read '{value}': write a number and one of {legal}; {example}")
        exact = Decimal(match[1]) * Decimal(units[match[2]])
        return int(exact) if exact == exact.to_integral_value() else float(exact)

    return BeforeValidator(read)


def _clock_s(time: re.Match[str]) -> int:
    parts = [int(time[part] or 0) for part in ("d", "h", "m", "s")]
    if time["d"] is not None:
        parts = [int(time[part] or 0) for part in ("d", "h1", "m1", "s1")]
    days, hours, minutes, seconds = parts
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def _whole(value: object) -> object:
    return round(value) if isinstance(value, float) and math.isfinite(value) else value


SIZE = Quantity("size", (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("", 1)))
RATE = Quantity("bytes per second", (("GB/s", 1e9), ("MB/s", 1e6), ("", 1)))
TIME = Quantity("time", (("h", 3600), ("min", 60), ("s", 1), ("ms", 1e-3), ("us", 1e-6)))
COMPUTE = Quantity("FLOP/s", (("TFLOPS", 1e12), ("GFLOPS", 1e9), ("", 1)))

Bytes = Annotated[
    int,
    Field(ge=0, le=2**60),
    BeforeValidator(_whole),
    _reader(_BYTES, "for example 40GiB", clock=False),
    SIZE,
]
BytesPerS = Annotated[
    float,
    Field(gt=0, le=1e18),
    _reader(_RATE, "for example 300GB/s or 200Gbit/s", clock=False),
    RATE,
]
Seconds = Annotated[
    float,
    Field(ge=0, le=1e9),
    _reader(_SECONDS, "for example 15s, 90min or 1-12:00:00", clock=True),
    TIME,
]
FlopsPerS = Annotated[
    float, Field(gt=0, le=1e21), _reader(_FLOPS, "for example 312TFLOPS", clock=False), COMPUTE
]
Fraction = Annotated[float, Field(gt=0, le=1)]
