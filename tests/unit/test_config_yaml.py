"""Reading YAML: the values people mean, and an error with its line for what nobody means."""

from __future__ import annotations

import math

import pytest

from flexslurm.config.yaml_text import read_yaml
from flexslurm.errors import ConfigError


def value(text: str) -> object:
    return read_yaml(f"k: {text}\n", "f.yaml").value["k"]


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("yes", "yes"), ("no", "no"), ("on", "on"), ("off", "off"), ("y", "y"),
        ("true", True), ("False", False),
        ("1:30", "1:30"), ("01:30:00", "01:30:00"), ("1-12:00:00", "1-12:00:00"),
        ("10", 10), ("-3", -3), ("010", "010"), ("0x1F", 31), ("0o17", 15), ("0b11", "0b11"),
        ("1_000", "1_000"), ("1e3", 1000.0), ("1.5", 1.5), (".5", 0.5), ("5.", 5.0),
        ("1.2.3", "1.2.3"), ("010.5", 10.5),
        ("2026-11-29", "2026-11-29"), ("2026-11-29 10:00:00", "2026-11-29 10:00:00"),
        ("~", None), ("null", None), ("", None), ("'null'", "null"), ("'5'", "5"),
        ("=", "="), ("!!str 5", "5"), ("!!int '5'", 5),
        ("40GiB", "40GiB"), (".inf", math.inf), ("-.INF", -math.inf),
    ],
)  # fmt: skip
def test_scalars(text: str, meant: object) -> None:
    got = value(text)
    assert got == meant
    assert type(got) is type(meant)


@pytest.mark.parametrize(
    "text", ["5", "on", "null", "2026-11-29", "0x10", "1:30", "true", "<", "'<<'"]
)
def test_keys_are_text(text: str) -> None:
    assert list(read_yaml(f"{text}: 1", "f").value) == [text.strip("'")]


@pytest.mark.parametrize("text", ["", "\n", "# a comment\n", "---\n", "\ufeff", "--- \n...\n"])
def test_an_empty_document_is_nothing(text: str) -> None:
    assert read_yaml(text, "f").value is None


def test_byte_order_mark_and_windows_lines() -> None:
    assert read_yaml("\ufeffa: 1\r\nb: [2,\r\n 3]\r\n", "f").value == {"a": 1, "b": [2, 3]}


def test_places_of_values() -> None:
    read = read_yaml("a: 1\nb:\n  c: 2\n  d:\n    - x\n    - y: 3\n", "f.yaml")
    lines = {loc: place.line for loc, place in read.places.items()}
    assert lines == {
        (): 1, ("a",): 1, ("b",): 2, ("b", "c"): 3, ("b", "d"): 4,
        ("b", "d", 0): 5, ("b", "d", 1): 6, ("b", "d", 1, "y"): 6,
    }  # fmt: skip
    assert str(read.places["b", "c"]) == "f.yaml:3"


def test_anchors_and_merges() -> None:
    read = read_yaml(
        "base: &base {grace: 5, qos: low}\n"
        "more: &more\n  <<: *base\n  qos: high\n"
        "last:\n  <<: [*more, *base]\n  grace: 9\n",
        "f",
    )
    assert read.value["more"] == {"grace": 5, "qos": "high"}
    assert read.value["last"] == {"grace": 9, "qos": "high"}
    place = read.places["last", "qos"]
    assert place.line == 4


def test_an_alias_used_twice_is_no_duplicate() -> None:
    read = read_yaml("a: &a {x: 1}\nb: {<<: *a, x: 2}\nc: {<<: *a}\nd: *a\n", "f")
    assert read.value == {"a": {"x": 1}, "b": {"x": 2}, "c": {"x": 1}, "d": {"x": 1}}


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("a: 1\na: 2\n", 2, "'a' stands twice"),
        ("a:\n  b: 1\n  c: 2\n  b: 3\n", 4, "'b' stands twice"),
        ("1: x\n'1': y\n", 2, "'1' stands twice"),
        ("a: 1\n\tb: 2\n", 2, "cannot start any token"),
        ("a: 1\n? [x]\n: 2\n", 2, "plain word"),
        ("a: 1\nb: !!python/object:os.system x\n", 2, "has no meaning here"),
        ("a: !!set {x, y}\n", 1, "has no meaning here"),
        ("a: !mine x\n", 1, "has no meaning here"),
        ("a: !!int x\n", 1, "not a whole number"),
        ("a: !!int 010\n", 1, "not a whole number"),
        ("a: !!bool maybe\n", 1, "not true or false"),
        ("a: !!float x\n", 1, "not a number"),
        ("a: 1\nb: " + "9" * 5000, 2, "too many digits"),
        ("a: [1, 2\nb: 3\n", 2, "expected ',' or ']'"),
        ("a: 1\n---\nb: 2\n", 2, "another document"),
        ("a: 1\nb: \x07\n", 2, "U+0007"),
        ("a: &a [*a]\n", 1, "contains itself"),
        ("a: &a {b: *a}\n", 1, "contains itself"),
        ("a: *nothing\n", 1, "undefined alias"),
        ("<<: 5\n", 1, "merging"),
        ('a: "\\ud800"\n', 1, "surrogate"),
    ],
)
def test_errors_name_the_line(text: str, line: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("+", r"\+")) as caught:
        read_yaml(text, "f.yaml")
    assert (caught.value.file, caught.value.line) == ("f.yaml", line)


@pytest.mark.parametrize(
    "text",
    [
        'a: "\\UFFFFFFFF"',
        "[" * 5000,
        "%YAML " + "9" * 5000 + ".1\n---\na: 1",
    ],
)
def test_what_trips_the_library_is_an_error_too(text: str) -> None:
    with pytest.raises(ConfigError):
        read_yaml(text, "f.yaml")


def test_aliases_that_fan_out_are_stopped_early() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    for depth in range(1, 12):
        items = ", ".join([f"*a{depth - 1}"] * 10)
        lines.append(f"a{depth}: &a{depth} [{items}]")
    with pytest.raises(ConfigError, match="more than 100000 values"):
        read_yaml("\n".join(lines), "f.yaml")


def test_tabs_are_explained() -> None:
    with pytest.raises(ConfigError) as caught:
        read_yaml("a:\n\tb: 1\n", "f.yaml")
    assert caught.value.hint == "indent with spaces, not tabs"


def test_a_text_too_long_is_refused_before_it_is_read() -> None:
    with pytest.raises(ConfigError, match="too many for a settings file"):
        read_yaml("#" * (4 * 2**20 + 1), "f.yaml")
