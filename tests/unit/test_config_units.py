"""Quantities: exact where they can be, refused where two readings are possible."""

from __future__ import annotations

import pytest

from flexslurm.config.schema import Section, parse_section
from flexslurm.config.size_words import show_bytes
from flexslurm.config.units import (
    RATE,
    SIZE,
    TIME,
    Bytes,
    BytesPerS,
    FlopsPerS,
    Fraction,
    Quantity,
    Seconds,
)
from flexslurm.errors import ConfigError


class Sample(Section):
    size: Bytes = 0
    rate: BytesPerS = 1.0
    time: Seconds = 0.0
    flops: FlopsPerS = 1.0
    share: Fraction = 1.0


@pytest.mark.parametrize(
    ("key", "text", "meant"),
    [
        ("size", "40GiB", 40 * 2**30), ("size", "40 GB", 40 * 10**9), ("size", "1.5KiB", 1536),
        ("size", "0", 0), ("size", "123", 123), ("size", "1e3", 1000), ("size", "1e3MB", 10**9),
        ("size", "9007199254740993B", 9007199254740993), ("size", "0.1GB", 10**8),
        ("size", "1.0", 1), ("size", "1.2", 1), ("size", "'12'", 12),
        ("rate", "300GB/s", 300e9), ("rate", "200Gbit/s", 25e9), ("rate", "8Gbps", 1e9),
        ("time", "5us", 5e-6), ("time", "1.5h", 5400.0), ("time", "90min", 5400.0),
        ("time", "2d", 172800.0), ("time", ".5s", 0.5), ("time", "0.3s", 0.3),
        ("time", "1-12:00:00", 129600.0), ("time", "01:30:00", 5400.0), ("time", "2-00", 172800.0),
        ("time", "1-02:03", 93780.0), ("time", "0:00:05", 5.0), ("time", "48:00:00", 172800.0),
        ("flops", "312TFLOPS", 312e12), ("share", "0.9", 0.9),
    ],
)  # fmt: skip
def test_read(key: str, text: str, meant: float) -> None:
    assert getattr(parse_section(Sample, f"{key}: {text}", "f"), key) == meant


@pytest.mark.parametrize(
    ("key", "text", "words"),
    [
        ("size", "40gib", "write a number and one of"),
        ("size", "40G", "write a number and one of"),
        ("size", "forty", "write a number and one of"),
        ("size", "1 000", "write a number and one of"),
        ("size", "'１２'", "write a number and one of"),
        ("size", "-1GiB", "greater than or equal to 0"),
        ("size", "2e9TiB", "less than or equal to"),
        ("size", "1e999999999", "number is expected"),
        ("size", "1e9999GB", "write a number and one of"),
        ("size", ".inf", "number is expected"),
        ("size", ".nan", "number is expected"),
        ("size", "true", "a number is expected, not true"),
        ("size", "[1]", "whole number is expected"),
        ("time", "1:30", "write a number and one of"),
        ("time", ".inf", "number is expected"),
        ("time", "1e999s", "a number is expected"),
        ("time", "-1s", "greater than or equal to 0"),
        ("time", "UNLIMITED", "write a number and one of"),
        ("time", "false", "a number is expected, not false"),
        ("rate", "0", "greater than 0"),
        ("rate", "10GB", "write a number and one of"),
        ("share", "1.1", "less than or equal to 1"),
        ("share", "90%", "number is expected"),
        ("flops", "1e30", "less than or equal to"),
    ],
)
def test_refuse(key: str, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        parse_section(Sample, f"# first\n{key}: {text}", "f.yaml")
    assert (caught.value.line, caught.value.key) == (2, key)


@pytest.mark.parametrize(
    ("quantity", "number", "text"),
    [
        (SIZE, 40 * 2**30, "40GiB"), (SIZE, 1536, "1.5KiB"), (SIZE, 1000, "1000"), (SIZE, 0, "0"),
        (TIME, 600.0, "10min"), (TIME, 0.5, "500ms"), (TIME, 5e-6, "5us"), (TIME, 0.0, "0"),
        (TIME, 90.0, "1.5min"), (TIME, 86400.0, "24h"), (RATE, 12.5e9, "12.5GB/s"),
    ],
)  # fmt: skip
def test_show(quantity: Quantity, number: float, text: str) -> None:
    assert quantity.show(number) == text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 30, "3 GiB"), (10**9, "953.7 MiB"),
     (5 << 40, "5 TiB"), (9000 << 40, "9000 TiB")],
)  # fmt: skip
def test_bytes_for_people_have_four_figures(nbytes: int, text: str) -> None:
    assert show_bytes(nbytes) == text
