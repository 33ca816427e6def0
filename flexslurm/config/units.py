"""Quantities with units as people write them: `40GiB`, `300GB/s`, `5us`, `312TFLOPS`."""

from __future__ import annotations

import re
from collections.abc import Mapping
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
    "": 1.0, "ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0,
}  # fmt: skip
_FLOPS = {"": 1.0, "GFLOPS": 1e9, "TFLOPS": 1e12, "PFLOPS": 1e15}
_NUMBER = re.compile(r"^\s*([+-]?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*([A-Za-z/]*)\s*$")


def _reader(units: Mapping[str, float], example: str) -> BeforeValidator:
    def read(value: object) -> object:
        if not isinstance(value, str):
            return value
        match = _NUMBER.match(value)
        if match is None or match[2] not in units:
            legal = ", ".join(unit for unit in units if unit)
            raise ValueError(f"cannot read '{value}': write a number and one of {legal}; {example}")
        return float(match[1]) * units[match[2]]

    return BeforeValidator(read)


def _whole(value: object) -> object:
    return round(value) if isinstance(value, float) else value


Bytes = Annotated[int, Field(ge=0), BeforeValidator(_whole), _reader(_BYTES, "for example 40GiB")]
BytesPerS = Annotated[float, Field(gt=0), _reader(_RATE, "for example 300GB/s or 200Gbit/s")]
Seconds = Annotated[float, Field(ge=0), _reader(_SECONDS, "for example 15s or 5us")]
FlopsPerS = Annotated[float, Field(gt=0), _reader(_FLOPS, "for example 312TFLOPS")]
Fraction = Annotated[float, Field(gt=0, le=1)]
