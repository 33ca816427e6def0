"""What can be staged, told from config.json alone, and what is refused with the reason."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flexslurm.engine.families import DTYPE_BYTES, FAMILIES, check_model, tp_degrees
from flexslurm.engine.footprint import block_bytes, page_bytes, stage_bytes
from flexslurm.engine.layout import grained_share, layer_tensors, share
from flexslurm.engine.tiny import TINY_FAMILIES
from flexslurm.errors import ModelError
from flexslurm.planner.model_spec import GRAIN

TinyModels = Callable[..., Path]
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "vocab_size": 500, "max_position_embeddings": 77,
    "eos_token_id": [3, 5],
}  # fmt: skip


def write(path: Path, **changes: object) -> Path:
    path.mkdir(exist_ok=True)
    config = {key: v for key, v in (LLAMA | changes).items() if v is not None}
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_sizes_are_read(tmp_path: Path) -> None:
    info = check_model(write(tmp_path / "m"))
    assert (info.num_layers, info.hidden_size, info.intermediate_size) == (4, 64, 128)
    assert (info.num_heads, info.num_kv_heads, info.head_dim) == (8, 2, 8)
    assert (info.vocab_size, info.max_context, info.tied) == (500, 77, False)
    assert info.architecture == "LlamaForCausalLM"


def test_the_file_itself_may_be_given(tmp_path: Path) -> None:
    assert check_model(write(tmp_path / "m") / "config.json").num_layers == 4


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_defaults_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """A configuration saved by transformers leaves out what equals its defaults."""
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[family]()
    path = tmp_path / family
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": family}))
    info = check_model(path)
    kv = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    inner = config.ffn_dim if family == "opt" else config.intermediate_size
    bias = config.enable_bias if family == "opt" else getattr(config, "attention_bias", False)
    assert info.num_layers == config.num_hidden_layers
    assert info.hidden_size == config.hidden_size
    assert info.intermediate_size == inner
    assert (info.num_heads, info.num_kv_heads) == (config.num_attention_heads, kv)
    assert info.head_dim == dim
    assert info.vocab_size == config.vocab_size
    assert info.max_context == config.max_position_embeddings
    assert info.tied == config.tie_word_embeddings
    assert info.attention_bias == bias


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_what_transformers_saves_is_read_back(family: str, tiny_models: TinyModels) -> None:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(tiny_models(family))
    info = check_model(tiny_models(family))
    assert info.num_heads == config.num_attention_heads
    assert info.head_dim * info.num_heads == config.hidden_size


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "mixtral", "num_local_experts": 8}, "mixture of experts"),
        ({"model_type": "qwen3_moe", "num_experts": 128}, "mixture of experts"),
        ({"model_type": "deepseek_v3", "n_routed_experts": 256}, "mixture of experts"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "encoder-decoder"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised (awq)"),
        ({"quantization_config": "odd"}, "quantised (?)"),
        ({"model_type": "phi3", "architectures": ["Phi3ForCausalLM"]}, "Phi3ForCausalLM keeps"),
        ({"model_type": "falcon"}, "one weight"),
        ({"model_type": "rwkv", "architectures": ["RwkvForCausalLM"]}, "RwkvForCausalLM"),
        ({"model_type": None, "architectures": None}, "model_type ?"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "SequenceClassification"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "'longrope'"),
        ({"architectures": 5}, "the architecture 5"),
        ({"architectures": {"a": 1}}, "the architecture {'a': 1}"),
    ],
)
def test_what_cannot_be_staged_is_refused_with_the_reason(
    changes: dict[str, object], reason: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "m", **changes)
    with pytest.raises(ModelError) as caught:
        check_model(path)
    assert reason in caught.value.message
    assert str(path / "config.json") in caught.value.message
    assert caught.value.hint is not None
    for family in FAMILIES.values():
        assert family.causal_lm in caught.value.hint


@pytest.mark.parametrize("value", [0, -1, 2.5, "x", True, float("inf"), 10**9, 10**40])
def test_a_number_of_layers_that_cannot_be_is_refused_at_once(
    value: object, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match="num_hidden_layers"):
        check_model(write(tmp_path / "m", num_hidden_layers=value))


@pytest.mark.parametrize("scaling", ["default", "linear", "yarn", "llama3"])
def test_other_rotary_scalings_pass(scaling: str, tmp_path: Path) -> None:
    check_model(write(tmp_path / "m", rope_scaling={"rope_type": scaling, "factor": 2.0}))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers must be"),
        ({"hidden_size": "64"}, "hidden_size must be"),
        ({"vocab_size": True}, "vocab_size must be"),
        ({"num_key_value_heads": 3}, "cannot be shared by 3"),
        ({"model_type": "opt", "architectures": None, "hidden_size": 65}, "not a multiple"),
    ],
)
def test_sizes_that_make_no_sense(changes: dict[str, object], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=reason):
        check_model(write(tmp_path / "m", **changes))


@pytest.mark.parametrize("content", ["", "{", "[]", "3", "\x00\xff"])
def test_files_that_are_no_configuration(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(ModelError, match=r"config\.json"):
        check_model(tmp_path)


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such directory"):
        check_model(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"config\.json: no such file"):
        check_model(tmp_path)


def test_degrees_leave_every_rank_a_head(tmp_path: Path) -> None:
    info = check_model(write(tmp_path / "m", num_key_value_heads=4))
    assert tp_degrees(info, 8) == (1, 2, 3, 4)
    assert tp_degrees(info, 2) == (1, 2)
    assert tp_degrees(info, 1) == (1,)


def test_no_torch_is_needed() -> None:
    """The launcher checks models on login nodes, and answers in 150 ms."""
    names = "families", "layout", "footprint", "checkpoint"
    code = "import sys\n" + "\n".join(f"import flexslurm.engine.{name}" for name in names)
    code += "\nassert not {'torch', 'transformers', 'deepspeed', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)


# ------------------------------------------------------------------- figures


@pytest.mark.parametrize("total", [1, 7, 63, 64, 65, 130, 1000, 11008])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_shares_add_up(total: int, ranks: int) -> None:
    for split in (share, grained_share):
        assert sum(split(total, ranks, rank) for rank in range(ranks)) == total
    own = [grained_share(total, ranks, rank) for rank in range(ranks)]
    if total >= GRAIN:
        assert all(size % GRAIN == 0 for size in own[:-1])


@pytest.mark.parametrize("family", TINY_FAMILIES)
@pytest.mark.parametrize("tp", [1, 2, 3])
def test_stages_add_up_to_the_model(family: str, tp: int, tiny_models: TinyModels) -> None:
    info = check_model(tiny_models(family))
    whole = sum(stage_bytes(info, 0, 6, tp, rank, "bfloat16") for rank in range(tp))
    cut = sum(
        stage_bytes(info, lo, hi, tp, rank, "bfloat16")
        for lo, hi in ((0, 1), (1, 5), (5, 6))
        for rank in range(tp)
    )
    assert whole == cut
    pages = sum(block_bytes(info, 0, 6, tp, rank, "bfloat16", 4) for rank in range(tp))
    assert pages == 6 * info.num_kv_heads * page_bytes(info, "bfloat16", 4)


def test_every_layer_tensor_is_in_the_checkpoint_once(tiny_models: TinyModels) -> None:
    from safetensors.torch import load_file

    for family in TINY_FAMILIES:
        info = check_model(tiny_models(family))
        stored = load_file(tiny_models(family) / "model.safetensors")
        prefix = f"{info.family.prefix}layers.3."
        below = {name.removeprefix(prefix): t for name, t in stored.items() if prefix in name}
        assert {t.name: t.shape for t in layer_tensors(info)} == {
            name: tuple(t.shape) for name, t in below.items()
        }


def test_dtypes_are_those_of_the_service_file() -> None:
    from typing import get_args

    from flexslurm.config.service import ModelSettings

    assert set(get_args(ModelSettings.model_fields["dtype"].annotation)) == set(DTYPE_BYTES)
