"""Service and site settings: errors with place and nearest key, sources, checks of the pair."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexslurm.config.check import load_pair, load_service_and_site
from flexslurm.config.schema import legal_keys, load_section, parse_section
from flexslurm.config.schema_page import keys_of, page
from flexslurm.config.service import Service
from flexslurm.config.site import Site
from flexslurm.config.sources import Loaded, from_environment, from_options, load_service, load_site
from flexslurm.config.yaml_text import Origin
from flexslurm.errors import ConfigError

SERVICE = """\
name: chat
model:
  path: models/small
pool:
  - partition: scav
    gpu_type: a100
    gpus: 2
  - {partition: scav, gpu_type: l40s, gpus: 1, count: 2}
serving:
  max_batch: 8
"""
SITE = """\
name: here
gpu_types:
  a100: {model: a100-80}
  l40s: {memory: 48GiB}
partitions:
  scav:
    gpu_types: [a100, l40s]
    gpus_per_node: 4
    max_walltime: 1-00:00:00
  prio: {gpu_types: [a100], preemptible: false}
head: {partition: prio}
"""


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    model = tmp_path / "models" / "small"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    service, site = tmp_path / "service.yaml", tmp_path / "site.yaml"
    service.write_text(SERVICE)
    site.write_text(SITE)
    return service, site


def refused(text: str, kind: type[Service] | type[Site] = Service) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        parse_section(kind, text, "f.yaml")
    return caught.value


# ------------------------------------------------------------------------------------- one file


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


# -------------------------------------------------------------------------------------- sources


def sources(loaded: Loaded[Service] | Loaded[Site]) -> dict[str, tuple[str, Origin, str]]:
    return {
        setting.key: (setting.shown, setting.origin, setting.source)
        for setting in loaded.settings()
    }


def test_the_order_is_command_line_environment_file_default(files: tuple[Path, Path]) -> None:
    path, _ = files
    environ = {
        "FLEXSLURM_SERVICE__SERVING__MAX_BATCH": "16",
        "FLEXSLURM_SERVICE__SERVING__HEARTBEAT": "100ms",
        "FLEXSLURM_SERVICE__POOL__1__COUNT": "5",
    }
    found = sources(load_service(path, ["serving.max_batch=32", "slo.ttft=2s"], environ))
    assert found["serving.max_batch"] == ("32", Origin.COMMAND_LINE, "--set")
    assert found["slo.ttft"] == ("2s", Origin.COMMAND_LINE, "--set")
    assert found["serving.heartbeat"] == (
        "100ms", Origin.ENVIRONMENT, "FLEXSLURM_SERVICE__SERVING__HEARTBEAT"
    )  # fmt: skip
    assert found["pool.1.count"][:2] == ("5", Origin.ENVIRONMENT)
    assert found["pool.0.gpus"] == ("2", Origin.FILE, f"{path}:7")
    assert found["pool.0.count"] == ("1", Origin.DEFAULT, "")
    assert found["serving.wait_for_gpus"] == ("10min", Origin.DEFAULT, "")
    assert sources(load_service(path, [], environ))["serving.max_batch"][0] == "16"
    assert sources(load_service(path, [], {}))["serving.max_batch"][0] == "8"


def test_every_key_has_exactly_one_source(files: tuple[Path, Path]) -> None:
    _, path = files
    settings = load_site(path, [], {}).settings()
    keys = [setting.key for setting in settings]
    assert len(keys) == len(set(keys))
    assert {"partitions.scav.grace", "network.node_link.bandwidth", "setup"} <= set(keys)
    for setting in settings:
        assert (setting.source == "") == (setting.origin is Origin.DEFAULT)


def test_options_and_variables_say_which_file_they_are_for(files: tuple[Path, Path]) -> None:
    service, site = files
    options = ["service.serving.max_batch=3", "site.slurm.kill_wait=9s", "site.name=there"]
    assert load_service(service, options, {}).value.serving.max_batch == 3
    loaded = load_site(site, options, {"FLEXSLURM_SITE__PARTITIONS__SCAV__GRACE": "20s"})
    assert loaded.value.slurm.kill_wait == 9
    assert loaded.value.name == "there"
    assert loaded.value.partitions["scav"].grace == 20


def test_values_of_options_are_yaml_where_they_can_be() -> None:
    def value(text: str) -> object:
        [(_, assignment)] = from_options([f"x={text}"])
        return assignment.read.value

    assert value("3") == 3
    assert value("[1, {a: b}]") == [1, {"a": "b"}]
    assert value("") is None
    assert value("a: b: c") == "a: b: c"
    assert value("@file") == "@file"
    assert value("k=v") == "k=v"
    with pytest.raises(ConfigError):
        value("[1")


@pytest.mark.parametrize("option", ["x", "=1", ".=1", "a..b=1", "site.=1", ""])
def test_options_that_are_none(option: str) -> None:
    with pytest.raises(ConfigError, match="write KEY=VALUE"):
        from_options([option])


def test_a_variable_for_no_file_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        from_environment({"FLEXSLURM_SERVIC__NAME": "x"})
    assert caught.value.hint == "did you mean 'FLEXSLURM_SERVICE__NAME'?"
    assert from_environment({"FLEXSLURM_DEBUG": "1", "FLEXSLURM_SITE": "x", "HOME": "y"}) == []


@pytest.mark.parametrize(
    ("option", "words", "hint"),
    [
        ("serving.max_batch=0", "--set: serving.max_batch", None),
        ("servin.max_batch=1", "--set: servin: unknown key", "did you mean 'serving'?"),
        ("serving.maxbatch=1", "--set: serving.maxbatch: unknown", "did you mean 'max_batch'?"),
        ("pool.9.gpus=1", "'9' is not the number of an entry", "entries here: 0 to 1"),
        ("pool.x.gpus=1", "'x' is not the number of an entry", "entries here: 0 to 1"),
        ("pool=[]", "--set: pool: list should have at least 1 item", None),
        ("name.x=1", "--set: name.x: name holds a value and no keys", None),
    ],
)
def test_errors_of_options_name_the_option(
    option: str, words: str, hint: str | None, files: tuple[Path, Path]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_service(files[0], [option], {})
    assert words in caught.value.message
    assert hint is None or caught.value.hint == hint


def test_an_override_leaves_what_an_alias_shares(tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    path.write_text("name: x\ngpu_types: {a: {}}\npartitions:\n  p: &p {grace: 5s}\n  q: *p\n")
    site = load_site(path, ["site.partitions.p.grace=9s"], {}).value
    assert (site.partitions["p"].grace, site.partitions["q"].grace) == (9, 5)


def test_keys_of_the_file_may_hold_dots_and_dashes(tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    path.write_text("name: x\ngpu_types: {a100.80: {}, l40-s: {}}\n")
    environ = {"FLEXSLURM_SITE__GPU_TYPES__L40_S__MEMORY": "2GiB"}
    site = load_site(path, ["site.gpu_types.a100.80.memory=1GiB"], environ).value
    assert site.gpu_types["a100.80"].memory == 2**30
    assert site.gpu_types["l40-s"].memory == 2**31


def test_paths_are_relative_to_what_names_them(
    files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("WORK", "/work space")

    def path(*options: str) -> str:
        return load_service(files[0], options, {}).value.model.path

    assert path() == str(tmp_path / "models/small")
    assert path("model.path=m") == str(elsewhere / "m")
    assert path("model.path=~/m") == "/home/me/m"
    assert path("model.path=$WORK/../m") == "/m"
    assert path("model.path=/a/./b/") == "/a/b"
    with pytest.raises(ConfigError, match="variable NOT_SET_ANYWHERE is not set"):
        path("model.path=/x/$NOT_SET_ANYWHERE/y")


@pytest.mark.parametrize(
    ("options", "block", "chunk", "notes"),
    [
        ([], 256, 256, 0),
        (["serving.block_tokens=16"], 16, 16, 0),
        (["executor.kvcache_chunk_size=32"], 32, 32, 0),
        (["serving.block_tokens=16", "executor.kvcache_chunk_size=16"], 16, 16, 0),
        (["serving.block_tokens=16", "executor.kvcache_chunk_size=32"], 16, 32, 1),
    ],
)
def test_one_block_size_under_two_names(
    options: list[str], block: int, chunk: int, notes: int, files: tuple[Path, Path]
) -> None:
    pair = load_pair(*files, overrides=options, environ={})
    service = pair.service.value
    assert service.serving.block_tokens == block
    assert service.executor.kvcache_chunk_size == chunk
    assert len(pair.notes) == notes


# --------------------------------------------------------------------------------------- the pair


def test_a_service_that_fits_its_site(files: tuple[Path, Path]) -> None:
    service, site = load_service_and_site(*files, environ={})
    assert (service.name, site.name) == ("chat", "here")


@pytest.mark.parametrize(
    ("option", "key", "words", "hint"),
    [
        ("pool.0.gpu_type=a10", "pool.0.gpu_type", "no GPU type 'a10'", "did you mean 'a100'?"),
        ("pool.0.gpu_type=tpu", "pool.0.gpu_type", "no GPU type 'tpu'", "legal here: a100, l40s"),
        ("pool.1.partition=scavv", "pool.1.partition", "no partition", "did you mean 'scav'?"),
        ("pool.1.partition=prio", "pool.1.partition", "has no l40s", "it is found in scav"),
        ("pool.0.partition=", "pool.0.partition", "which partition?", "--cluster local"),
        ("pool.0.gpus=5", "pool.0.gpus", "at most 4 GPUs, not 5", "more nodes"),
        ("pool.0.walltime=25h", "pool.0.walltime", "at most 24h", None),
        ("model.path=models/smal", "model.path", "no model at", "prepare"),
        ("gateway.api_keys_file=none", "gateway.api_keys_file", "no file at", None),
        ("scheduling={plans: [wide], default_plan: wid}", "scheduling.default_plan",
         "not among", "did you mean 'wide'?"),
    ],
)  # fmt: skip
def test_what_the_site_lacks(
    option: str, key: str, words: str, hint: str | None, files: tuple[Path, Path]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_pair(*files, overrides=[option], environ={})
    assert caught.value.key == key
    assert words in caught.value.message
    assert hint is None or hint in (caught.value.hint or "")


def test_errors_of_the_pair_name_file_and_line(files: tuple[Path, Path]) -> None:
    files[0].write_text(SERVICE.replace("gpu_type: a100", "gpu_type: a1000"))
    with pytest.raises(ConfigError) as caught:
        load_pair(*files, environ={})
    assert (caught.value.file, caught.value.line) == (str(files[0]), 6)


def test_a_model_near_the_name_is_named(files: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_pair(*files, overrides=[f"model.path={tmp_path}/models/smal"], environ={})
    assert caught.value.hint == "did you mean 'small'?"
    (tmp_path / "models/small/config.json").unlink()
    with pytest.raises(ConfigError, match=r"it has no config\.json"):
        load_pair(*files, environ={})


def test_partitions_do_not_matter_without_slurm(files: tuple[Path, Path]) -> None:
    load_pair(*files, overrides=["pool.0.partition=none-such"], cluster="local", environ={})


def test_a_head_that_may_be_preempted_is_said(files: tuple[Path, Path]) -> None:
    pair = load_pair(*files, overrides=["site.head.partition=scav"], environ={})
    assert "which Slurm may preempt" in pair.notes[0]


# --------------------------------------------------------------------------------------- the page


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
