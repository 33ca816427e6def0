"""Checkpoints: damaged files are named, sharded ones are read, only owned slices are loaded."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from flexslurm.engine.arena import Arena
from flexslurm.engine.checkpoint import Checkpoint, check_files
from flexslurm.engine.families import check_model
from flexslurm.engine.shard import Part
from flexslurm.engine.stage import StagePlan, build_stage
from flexslurm.engine.tiny import TINY_FAMILIES
from flexslurm.engine.weights import FileSource, _pieces
from flexslurm.errors import ModelError

TinyModels = Callable[..., Path]


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def refused(path: Path, *parts: str) -> None:
    """The check of the files and the building of a stage refuse alike, and name what is wrong."""
    arena = Arena(16 << 20)
    for attempt in (
        lambda: check_files(check_model(path)),
        lambda: build_stage(StagePlan(str(path), 1, 0, 6, 1, 0, "float64", 4, 4), arena),
    ):
        with pytest.raises(ModelError) as caught:
            attempt()
        for part in parts:
            assert part in str(caught.value)
    assert arena.used_bytes == 0
    arena.close()


@pytest.mark.parametrize("family", TINY_FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_whole_models_pass(family: str, tied: bool, tiny_models: TinyModels) -> None:
    path = tiny_models(family, tied=tied)
    stored = load_file(path / "model.safetensors")
    assert check_files(check_model(path)) == sum(t.nbytes for t in stored.values())


def test_a_missing_directory(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "nowhere", "no such directory")


def test_missing_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()
    refused(model, "model.safetensors", "no such file", "model.safetensors.index.json")
    (model / "pytorch_model.bin").write_bytes(b"x")
    refused(model, "pytorch_model.bin, which is pickled")


@pytest.mark.parametrize("keep", [0, 3, 8, 500, -1, -4096])
def test_truncated_weights(keep: int, model: Path) -> None:
    file = model / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:keep])
    refused(model, str(file), "truncated", "copy or download")
    if keep == -1:
        refused(model, "1 of", "bytes are missing")


@pytest.mark.parametrize(
    "content",
    [
        struct.pack("<Q", 4) + b"abcd" * 20,
        struct.pack("<Q", 2) + b"[]" * 20,
        struct.pack("<Q", 8) + b'{"a": 1}',
        struct.pack("<Q", 2**63) + b"{}",
    ],
    ids=["not-json", "a-list", "no-entry", "absurd-length"],
)
def test_damaged_headers(content: bytes, model: Path) -> None:
    (model / "model.safetensors").write_bytes(content)
    refused(model, "model.safetensors")


def test_sizes_that_do_not_match_their_shape(model: Path) -> None:
    file = model / "model.safetensors"
    content = file.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = content[8 : 8 + length].replace(b'"shape":[256,48]', b'"shape":[256,49]', 1)
    assert header != content[8 : 8 + length]
    file.write_bytes(content[:8] + header + content[8 + length :])
    refused(model, str(file), "not those of its shape")


def test_a_tensor_that_is_missing(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    del tensors["model.layers.4.mlp.up_proj.weight"]
    save_file(tensors, model / "model.safetensors")
    refused(model, str(model), "no tensor model.layers.4.mlp.up_proj.weight")


def test_a_shape_that_the_config_does_not_give(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"intermediate_size": 145}))
    refused(model, "model.safetensors", "[144, 48]", "[145, 48]", "config.json")


def test_weights_that_are_no_floats(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)
    save_file(tensors, model / "model.safetensors")
    refused(model, "model.norm.weight is stored as I8")


# ------------------------------------------------------------------- shards of files


@pytest.fixture
def sharded(tiny_models: TinyModels, tmp_path: Path) -> Path:
    source = tiny_models("llama", max_shard_bytes=300_000)
    return Path(shutil.copytree(source, tmp_path / "sharded"))


def test_sharded_checkpoints_load_like_single_ones(sharded: Path, tiny_model: Path) -> None:
    assert check_files(check_model(sharded)) == check_files(check_model(tiny_model))
    arena = Arena(32 << 20)
    one, other = (
        build_stage(StagePlan(str(path), number, 1, 6, 1, 0, "float64", 4, 4), arena)
        for number, path in enumerate((sharded, tiny_model))
    )
    theirs = dict(other._engine.module.named_parameters())
    for name, weight in one._engine.module.named_parameters():
        assert torch.equal(weight, theirs[name]), name
    arena.close()


def test_a_missing_shard_is_named(sharded: Path) -> None:
    victim = sorted(sharded.glob("model-*.safetensors"))[1]
    victim.unlink()
    refused(sharded, victim.name, "no such file")


def test_a_truncated_shard_is_named(sharded: Path) -> None:
    victim = sorted(sharded.glob("model-*.safetensors"))[-1]
    victim.write_bytes(victim.read_bytes()[:-10])
    refused(sharded, victim.name, "truncated: 10 of")


@pytest.mark.parametrize(
    "content",
    ["{", "{}", '{"weight_map": 3}', '{"weight_map": {"a": "../x.safetensors"}}'],
)
def test_a_damaged_index_is_named(content: str, sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").write_text(content)
    refused(sharded, "model.safetensors.index.json")


def test_an_index_that_lies_is_caught(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    places = listed["weight_map"]
    name = "model.norm.weight"
    places[name] = next(file for file in places.values() if file != places[name])
    index.write_text(json.dumps(listed))
    refused(sharded, places[name], f"has no tensor {name}")


# ------------------------------------------------------------------- other names


def rename(path: Path, change: Callable[[str], str]) -> None:
    tensors = load_file(path / "model.safetensors")
    save_file({change(name): t for name, t in tensors.items()}, path / "model.safetensors")


def test_old_names_are_known(tiny_models: TinyModels, tmp_path: Path) -> None:
    opt = Path(shutil.copytree(tiny_models("opt", tied=True), tmp_path / "opt"))
    rename(opt, lambda name: name.removeprefix("model."))
    check_files(check_model(opt))
    neox = Path(shutil.copytree(tiny_models("gpt_neox"), tmp_path / "neox"))
    rename(neox, lambda name: name.replace("lm_head", "embed_out"))
    check_files(check_model(neox))


def test_a_tied_head_that_is_stored_as_well_is_not_read(
    tiny_models: TinyModels, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(tiny_models("llama", tied=True), tmp_path / "m"))
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"] = torch.zeros_like(tensors["model.embed_tokens.weight"])
    save_file(tensors, path / "model.safetensors")
    arena = Arena(16 << 20)
    last = build_stage(StagePlan(str(path), 1, 5, 6, 1, 0, "float64", 4, 4), arena)
    head = last._engine.module.get_parameter("lm_head.weight")
    assert torch.equal(head, tensors["model.embed_tokens.weight"])
    arena.close()


# ------------------------------------------------------------------- slices


@pytest.mark.parametrize("dim", [0, 1, None])
@pytest.mark.parametrize("piece_bytes", [1, 1000, 1 << 20])
def test_slices_are_read_in_pieces(
    dim: int | None, piece_bytes: int, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flexslurm.engine.weights._PIECE_BYTES", piece_bytes)
    name, shape = "self_attn.o_proj.weight", (48, 48)
    part = Part("layers.0." + name, 2, name, shape, dim, () if dim is None else (16, 24, 8))
    axis, lo, hi = (0, 0, 48) if dim is None else (dim, *part.range(1))
    whole = load_file(tiny_model / "model.safetensors")[f"model.layers.2.{name}"]
    wanted = whole if dim is None else whole.narrow(dim, 16, 24)
    for transposed in (False, True):
        out = torch.zeros(wanted.shape[::-1] if transposed else wanted.shape, dtype=torch.float32)
        view = out.t() if transposed else out
        with FileSource(check_model(tiny_model)) as source:
            done = list(source.read(part, axis, lo, hi, view))
        assert torch.equal(view, wanted.float())
        assert sum(done) == out.nbytes
        assert max(done) <= max(piece_bytes, wanted.shape[1] * 4)


def test_an_empty_slice_has_no_pieces() -> None:
    assert list(_pieces(torch.empty(0, 5))) == []
    assert list(_pieces(torch.empty(5, 0))) == [(0, 5)]


def test_headers_tell_where_tensors_are(sharded: Path) -> None:
    checkpoint = Checkpoint.open(str(sharded))
    found = checkpoint.find(["nothing", "model.norm.weight"])
    assert found.shape == (48,)
    assert found.dtype == "F64"
    assert found.file.parent == sharded
