"""Tiny models: reproducible, complete, and with nothing that hides a mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flexslurm.engine.tiny import (
    SPECIAL_TOKENS,
    TINY_FAMILIES,
    byte_tokenizer,
    write_tiny_model,
)
from flexslurm.errors import EnvironmentFault, ModelError


def _contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())}


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_same_arguments_give_the_same_bytes(family: str, tmp_path: Path) -> None:
    first = write_tiny_model(tmp_path / "a", family, layers=2)
    again = write_tiny_model(tmp_path / "b", family, layers=2)
    other = write_tiny_model(tmp_path / "c", family, layers=2, seed=1)
    assert _contents(first) == _contents(again)
    assert _contents(first)["model.safetensors"] != _contents(other)["model.safetensors"]


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_transformers_reads_it_and_answers_vary(family: str, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    path = write_tiny_model(tmp_path / "m", family)
    model = AutoModelForCausalLM.from_pretrained(path)
    assert model.dtype == torch.float64
    prompt = torch.tensor([[SPECIAL_TOKENS["<|bos|>"], 72, 105]])
    answer = model.generate(prompt, max_new_tokens=48, do_sample=False)[0, 3:].tolist()
    assert len(answer) == 48, "the end token must not win in a greedy answer"
    assert len(set(answer)) >= 12, "a model stuck on few tokens hides mistakes"


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_no_parameter_is_trivial(family: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    path = write_tiny_model(tmp_path / "m", family, layers=1)
    for name, weight in load_file(path / "model.safetensors").items():
        assert float(weight.std()) > 0.01, f"{name} is constant"


def test_shards_come_with_an_index(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m", max_shard_bytes=300_000)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert len(files) > 1
    assert all((path / file).is_file() for file in files)


def test_text_round_trips_and_specials_are_outside_of_text() -> None:
    tokenizer = byte_tokenizer()
    text = "Grüße, 世界 ∑ \U0001f600\n\ttab"
    ids = tokenizer.encode(text)
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode("<|user|>") == [SPECIAL_TOKENS["<|user|>"]]
    assert not set(SPECIAL_TOKENS.values()) & {
        byte for point in range(0, 0x110000, 61) if not 0xD800 <= point < 0xE000
        for byte in chr(point).encode()
    }  # fmt: skip


def test_chat_template_marks_roles() -> None:
    text = byte_tokenizer().apply_chat_template(
        [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
        add_generation_prompt=True,
        tokenize=False,
    )
    assert text == "<|bos|><|system|>s<|eos|><|user|>u<|eos|><|assistant|>"


def test_replaces_a_directory_whole(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m", layers=1)
    (path / "stale").write_text("x")
    write_tiny_model(path, layers=1)
    assert not (path / "stale").exists()
    assert [entry.name for entry in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ({"family": "rwkv"}, "'rwkv'"),
        ({"dtype": "int8"}, "'int8'"),
        ({"heads": 5}, "head size"),
        ({"heads": 16}, "head size"),
        ({"kv_heads": 4}, "KV heads"),
        ({"kv_heads": 0}, "at least 1"),
        ({"layers": 0}, "at least 1"),
        ({"vocab": 100}, "256"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(
    arguments: dict[str, object], part: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=part):
        write_tiny_model(tmp_path / "m", **arguments)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_said_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors import SafetensorError
    from transformers import PreTrainedModel

    def full(*_: object, **__: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", full)
    with pytest.raises(EnvironmentFault, match="No space left"):
        write_tiny_model(tmp_path / "m", layers=2)
    assert list(tmp_path.iterdir()) == []
