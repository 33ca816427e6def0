"""Where settings come from, in which order, and whether service and site fit each other."""

from __future__ import annotations

from pathlib import Path

import pytest
from settings_files import SERVICE, SITE

from flexslurm.config.check import load_pair
from flexslurm.config.service import Service
from flexslurm.config.site import Site
from flexslurm.config.sources import Loaded, from_environment, from_options, load_service, load_site
from flexslurm.config.yaml_text import Origin
from flexslurm.errors import ConfigError, ModelError


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    model = tmp_path / "models" / "small"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    service, site = tmp_path / "service.yaml", tmp_path / "site.yaml"
    service.write_text(SERVICE)
    site.write_text(SITE)
    return service, site


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
    pair = load_pair(*files, environ={})
    assert (pair.service.value.name, pair.site.value.name) == ("chat", "here")


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
    with pytest.raises(ModelError, match=r"--set: model\.path: no model at ") as caught:
        load_pair(*files, overrides=[f"model.path={tmp_path}/models/smal"], environ={})
    assert caught.value.hint == "did you mean 'small'?"
    with pytest.raises(ModelError) as far:
        load_pair(*files, overrides=["model.path=models/other"], environ={})
    assert "prepare" in (far.value.hint or "")
    (tmp_path / "models/small/config.json").unlink()
    with pytest.raises(ModelError, match=r"yaml:\d+: model\.path: .*it has no config\.json"):
        load_pair(*files, environ={})


def test_partitions_do_not_matter_without_slurm(files: tuple[Path, Path]) -> None:
    load_pair(*files, overrides=["pool.0.partition=none-such"], cluster="local", environ={})


def test_a_head_that_may_be_preempted_is_said(files: tuple[Path, Path]) -> None:
    pair = load_pair(*files, overrides=["site.head.partition=scav"], environ={})
    assert "which Slurm may preempt" in pair.notes[0]
