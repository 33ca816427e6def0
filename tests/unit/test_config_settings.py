"""Service and site settings: errors with place and nearest key, bounds, the page of keys."""

from __future__ import annotations

from pathlib import Path

import pytest
from settings_files import SERVICE, SITE, refused

from flexslurm.config.schema import legal_keys, load_section, parse_section
from flexslurm.config.schema_page import keys_of, page
from flexslurm.config.service import Service
from flexslurm.config.site import Site
from flexslurm.errors import ConfigError


@pytest.mark.parametrize(
    ("more", "line", "key", "words", "hint"),
    [
        ("servin: {}", 11, "servin", "unknown key", "did you mean 'serving'?"),
        ("gateway:\n  prot: 1", 12, "gateway.prot", "unknown key", "did you mean 'port'?"),
        ("gateway: {port: 70000}", 11, "gateway.port", "65535, not 70000", None),
        ("gateway: {port: true}", 11, "gateway.port", "number is expected, not true", None),
        ("gateway: {host: 5}", 11, "gateway.host", "text is expected, not 5", "in quotes"),
        ("gateway: 5", 11, "gateway", "a mapping of keys to values is expected, not 5", None),
        ("head: {place: jbo}", 11, "head.place", "not 'jbo'", "did you mean 'job'?"),
        ("slo: {ttft: 5parsecs}", 11, "slo.ttft", "cannot read '5parsecs'", None),
        ("scheduling: {plans: x}", 11, "scheduling.plans", "a list is expected, not 'x'", None),
    ],
)
def test_errors_name_line_key_and_what_is_near(
    more: str, line: int, key: str, words: str, hint: str | None
) -> None:
    error = refused(SERVICE + more)
    assert (error.line, error.key) == (line, key)
    assert words in error.message
    assert (hint in (error.hint or "")) if hint else error.hint is None


def test_errors_inside_of_lists_and_names() -> None:
    error = refused(SERVICE.replace("gpus: 2", "gpu: 2"))
    assert (error.line, error.key, error.hint) == (
        7, "pool.0.gpu", "did you mean 'gpus'?\n  f.yaml:5: pool.0.gpus: this key is required"
    )  # fmt: skip
    error = refused(SITE.replace("memory", "memroy"), Site)
    assert (error.line, error.key) == (4, "gpu_types.l40s.memroy")
    assert error.hint == "did you mean 'memory'?"


def test_all_problems_are_told_at_once() -> None:
    error = refused("name: X Y\nsllo: {}\n")
    text = str(error)
    assert text.splitlines()[0] == "f.yaml:2: sllo: unknown key"
    for part in ("did you mean 'slo'?", "f.yaml:1: name:", "model: this key is required", "pool"):
        assert part in text


def test_many_problems_are_cut() -> None:
    error = refused("".join(f"wrong{index}: 1\n" for index in range(30)))
    assert "and 27 more" in str(error)


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n"])
def test_an_empty_file_lacks_keys(text: str) -> None:
    assert "this key is required" in refused(text).message


@pytest.mark.parametrize("text", ["- 1\n", "5\n", "just words\n"])
def test_something_else_than_a_mapping(text: str) -> None:
    assert "a mapping of keys to values is expected" in refused(text).message


def test_a_section_of_comments_is_left_out() -> None:
    service = parse_section(Service, SERVICE + "gateway:\n  # port: 8000\nslo:\n", "f")
    assert service.gateway.port == 0


def test_validators_of_ours_name_the_key_below() -> None:
    error = refused(SERVICE + "  heartbeat: 2s\n")
    assert (error.line, error.key) == (9, "serving.lost_after")
    assert "three heartbeats" in error.message
    error = refused(SITE.replace("gpu_types: [a100]", "gpu_types: [a10]"), Site)
    assert (error.line, error.key, error.hint) == (
        10, "partitions.prio.gpu_types.0", "did you mean 'a100'?"
    )  # fmt: skip


def test_numbers_as_names_are_text() -> None:
    site = parse_section(Site, "name: '1'\ngpu_types: {4090: {memory: 24GiB}, on: {}}\n", "f")
    assert list(site.gpu_types) == ["4090", "on"]


@pytest.mark.parametrize("make", ["missing", "directory", "binary", "large"])
def test_files_that_cannot_be_read(make: str, tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    if make == "directory":
        path.mkdir()
    elif make == "binary":
        path.write_bytes(b"\xff\xfe\x00")
    elif make == "large":
        path.write_bytes(b"#" * (5 * 2**20))
    with pytest.raises(ConfigError) as caught:
        load_section(Service, path)
    words = {
        "missing": "no such file", "directory": "is a directory", "binary": "not UTF-8",
        "large": "too many",
    }  # fmt: skip
    assert words[make] in caught.value.message.lower().replace("utf", "UTF")
    assert caught.value.file == str(path)


def test_a_missing_file_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "service.yaml").write_text("")
    with pytest.raises(ConfigError) as caught:
        load_section(Service, tmp_path / "servce.yaml")
    assert caught.value.hint == f"did you mean '{tmp_path / 'service.yaml'}'?"


def test_legal_keys_follow_lists_names_and_options() -> None:
    assert "count" in legal_keys(Service, ("pool", 0))
    assert "speed" in legal_keys(Site, ("gpu_types", "a100", "virtual"))
    assert legal_keys(Site, ("gpu_types",)) == []
    assert legal_keys(Site, ("nothing", "here")) == []


def test_a_copy_of_the_settings_reads_the_same() -> None:
    """The head reads what the launcher wrote; every effective value must survive the trip."""
    service = parse_section(Service, SERVICE + "gateway: {host: '1e3'}\nslo: {ttft: 300us}\n", "f")
    site = parse_section(Site, SITE, "f")
    assert parse_section(Service, service.model_dump_json(indent=2), "g") == service
    assert parse_section(Site, site.model_dump_json(indent=2), "g") == site


@pytest.mark.parametrize("kind", [Service, Site])
def test_every_key_is_explained(kind: type[Service] | type[Site]) -> None:
    keys = list(keys_of(kind))
    assert [key.name for key in keys if not key.words] == []
    assert [key.name for key in keys if not key.kind] == []


def test_the_page_shows_units_bounds_and_defaults() -> None:
    text = page(Service, "Keys")
    assert "| `serving.block_tokens` | whole number (≥ 1, ≤ 65536) | `256` |" in text
    assert "| `serving.wait_for_gpus` | time | `10min` |" in text
    assert "| `pool.N.gpu_type` | text | required |" in text
    assert "| `model.dtype` | `float64` or `float32` or `bfloat16` or `float16` |" in text
    assert "| `partitions.NAME.max_walltime` | time |" in page(Site, "Keys")


@pytest.mark.parametrize("name", ["../x", "a b", "a/b", ".a", "-a", "é", "x" * 65, '"a\\nb"', '""'])
@pytest.mark.parametrize("where", ["gpu_types", "partitions"])
def test_names_can_stand_in_paths_and_job_names(where: str, name: str) -> None:
    text = {"gpu_types": f"gpu_types: {{{name}: {{}}}}", "partitions": "gpu_types: {a: {}}"}[where]
    if where == "partitions":
        text += f"\npartitions: {{{name}: {{}}}}"
    error = refused(f"name: x\n{text}\n", Site)
    assert "is no name" in error.message


@pytest.mark.parametrize("name", ["../x", "..", "a b", "A", "é", "x" * 32, "-a"])
def test_a_service_is_told_what_it_may_be_called(name: str) -> None:
    error = refused(f"name: {name}\nmodel: {{path: /m}}\npool: [{{gpu_type: a, gpus: 1}}]\n")
    assert f"text of another form is expected, not '{name}'" in error.message
    assert error.hint == "Lower-case letters, digits and dashes, at most 31."


@pytest.mark.parametrize("env", ['{"A=B": x}', '{"": x}', "{A B: x}", "{1A: x}", '{A: "x\\0y"}'])
def test_variables_are_what_a_process_can_have(env: str) -> None:
    for key in (f"env: {env}", f"network: {{nccl_env: {env}}}"):
        error = refused(f"name: x\ngpu_types: {{a: {{}}}}\n{key}\n", Site)
        assert "variable" in error.message
    fine = parse_section(Site, 'name: x\ngpu_types: {a: {}}\nenv: {A_1: "a\\nb"}\n', "f")
    assert fine.env == {"A_1": "a\nb"}


def test_texts_hold_no_control_characters() -> None:
    for key, value in (("path", '"/m\\0"'), ("name", '"a\\nb"'), ("chat_template", '"\\e[31m"')):
        error = refused(
            f"name: x\nmodel: {{path: /m, {key}: {value}}}\n".replace("path: /m, path", "path")
        )
        assert error.key == f"model.{key}" and "not allowed" in error.message


def test_a_pool_is_one_that_a_head_can_watch() -> None:
    for entry in ("count: 65536", "nodes: 4097", "nodes: 64, count: 65"):
        error = refused(
            f"name: x\nmodel: {{path: /m}}\npool: [{{gpu_type: a, gpus: 1, {entry}}}]\n"
        )
        assert error.key == "pool" and "4096" in error.message


def test_nobody_is_asked_without_a_pause() -> None:
    assert "0.01" in refused(SERVICE + "  heartbeat: 1us\n").message
    error = refused("name: x\ngpu_types: {a: {}}\nslurm: {poll_interval: 1ns}\n", Site)
    assert "0.05" in error.message
