"""Any text is a value or a ConfigError; what is written is read back; overrides touch one key."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

from hypothesis import example, given
from hypothesis import strategies as st

from flexslurm.config.schema import parse_section
from flexslurm.config.service import Service
from flexslurm.config.site import Site
from flexslurm.config.sources import from_options
from flexslurm.config.units import SIZE, TIME
from flexslurm.config.yaml_text import read_yaml
from flexslurm.errors import ConfigError

# Text that is likely to mean something to a YAML parser.
SNIPPETS = st.sampled_from(
    [
        "a", "b", ": ", ":", "- ", "\n", "\n  ", "\n    ", "\t", "[", "]", "{", "}", ",", "&x ",
        "*x", "<<: ", "!!int ", "!!float ", "!!map ", "!t ", "!", "%YAML 1.1\n", "---\n", "...\n",
        "|", ">", "|2-", "'", '"', "\\", "\\x", "\\U0010ffff", "#", "# c", "? ", "~", "null",
        "true", "1", "010", "0x", "0o7", "1:30", ".inf", ".nan", "1e999", "=", "\ufeff", "\r",
        "\x00",        "\u2028", "2026-11-29", "%", "@", "`",
        "name", "model", "pool", "serving", "gpu_types", "partitions", "max_batch", "path",
    ]
)  # fmt: skip
TEXTS = st.one_of(st.text(), st.lists(SNIPPETS, max_size=40).map("".join))
KEYS = st.text(st.characters(exclude_categories=["Cs"]), max_size=80)  # YAML's limit is 1024
PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=20,
)


def outcome(act: Callable[[], object]) -> object:
    try:
        return act()
    except ConfigError as error:
        assert error.message
        return None


@given(TEXTS)
@example("a: &a [*a]")
@example('"\\UFFFFFFFF"')
@example("%YAML 1.1.1\n---\n")
@example("!!int ")
@example("{? : x}")
def test_any_text_is_a_value_or_an_error(text: str) -> None:
    outcome(lambda: read_yaml(text, "f"))
    outcome(lambda: parse_section(Service, text, "f"))
    outcome(lambda: parse_section(Site, text, "f"))


@given(st.sampled_from(["name", "model", "pool", "serving", "slo", "head", "executor"]), PLAIN)
def test_any_value_of_a_key_is_taken_or_refused(key: str, value: object) -> None:
    data: dict[str, object] = {
        "name": "x",
        "model": {"path": "/m"},
        "pool": [{"gpu_type": "a", "gpus": 1}],
        key: value,
    }
    outcome(lambda: parse_section(Service, json.dumps(data), "f"))


@given(st.sampled_from(["gpu_types", "partitions", "slurm", "network", "env", "setup"]), PLAIN)
def test_any_value_of_a_site_key_is_taken_or_refused(key: str, value: object) -> None:
    data: dict[str, object] = {"name": "x", "gpu_types": {"a": {}}, key: value}
    outcome(lambda: parse_section(Site, json.dumps(data), "f"))


@given(PLAIN)
def test_json_is_read_as_it_is(value: object) -> None:
    read = read_yaml(json.dumps(value), "f")
    assert read.value == value
    assert set(read.places) == set(_locations(value, ()))


def _locations(value: object, loc: tuple[object, ...]) -> list[tuple[object, ...]]:
    found = [loc]
    items: list[tuple[object, object]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    for key, item in items:
        found += _locations(item, (*loc, key))
    return found


@given(st.lists(st.text(), max_size=3))
def test_any_option_is_taken_or_refused(options: list[str]) -> None:
    outcome(lambda: from_options(options))


@given(st.text(), PLAIN)
def test_any_override_is_taken_or_refused(key: str, value: object) -> None:
    text = "name: x\nmodel: {path: /m}\npool: [{gpu_type: a, gpus: 1}]\n"
    outcome(lambda: parse_section(Service, text, "f", {key: value}))


@given(st.integers(1, 64), st.integers(1, 512), st.integers(0, 100))
def test_an_override_changes_its_key_alone(batch: int, gpus: int, waiting: int) -> None:
    text = "name: x\nmodel: {path: /m}\npool: [{gpu_type: a, gpus: 1}, {gpu_type: b, gpus: 2}]\n"
    before = parse_section(Service, text, "f")
    after = parse_section(
        Service,
        text,
        "f",
        {"serving.max_batch": batch, "pool.1.gpus": gpus, "serving.max_waiting": waiting},
    )
    want = before.model_dump()
    want["serving"] |= {"max_batch": batch, "max_waiting": waiting}
    want["pool"][1]["gpus"] = gpus
    assert after.model_dump() == want


@given(st.integers(0, 10**15), st.floats(0, 1e9, allow_subnormal=False))
def test_a_shown_quantity_reads_back(size: int, time: float) -> None:
    text = (
        f"name: x\ngpu_types: {{a: {{memory: {SIZE.show(size)}}}}}\n"
        f"slurm: {{kill_wait: {TIME.show(time)}}}\n"
    )
    site = parse_section(Site, text, "f")
    assert site.gpu_types["a"].memory == size
    assert math.isclose(site.slurm.kill_wait, time, rel_tol=1e-9)
