"""Writes small random checkpoints of every supported family; never trains and never downloads.

The tests, the demo's acted timing and `flexslurm model prepare --tiny` need models whose head and
layer counts divide in every way and whose arithmetic is exact in float64. The weights are drawn
wide enough that greedy decoding does not fall into one token, and biases and norms are not the
zeros and ones of a fresh model, so that forgetting one shows.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexslurm.errors import EnvironmentFault, ModelError

if TYPE_CHECKING:
    import torch

TINY_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "opt", "gpt_neox")
DTYPES = ("float64", "float32", "bfloat16", "float16")

_BYTES = 256
# Bytes that no UTF-8 text contains lend their ids to the special tokens, so 256 ids are enough.
SPECIAL_TOKENS = {
    "<|pad|>": 0xF7,
    "<|bos|>": 0xF8,
    "<|eos|>": 0xF9,
    "<|system|>": 0xFA,
    "<|user|>": 0xFB,
    "<|assistant|>": 0xFC,
}
_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@dataclass(frozen=True, slots=True)
class _Sizes:
    """What a tiny model is made of; checked before anything heavy is imported."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    vocab: int
    dtype: str
    max_position: int
    intermediate: int
    tied: bool


def write_tiny_model(
    path: str | os.PathLike[str],
    family: str = "llama",
    layers: int = 6,
    hidden: int = 48,
    heads: int = 6,
    kv_heads: int = 3,
    vocab: int = _BYTES,
    dtype: str = "float64",
    seed: int = 0,
    max_position: int = 2048,
    *,
    intermediate: int | None = None,
    tied: bool = False,
    max_shard_bytes: int | None = None,
) -> Path:
    """Write a checkpoint directory (config, safetensors, tokenizer) and return it.

    The same arguments give the same bytes. `vocab` ids beyond 256 have weights and no text. Greedy
    answers run to the length asked for: the end token's output row is zero, so it is never the
    best. `kv_heads` is ignored by the families without grouped queries (opt, gpt_neox).
    `max_shard_bytes` splits the weights into several files with an index.

    Raises ModelError for an unknown family or dtype, or sizes that do not fit together. A
    directory that exists is replaced whole.
    """
    sizes = _Sizes(
        family=family, layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, vocab=vocab,
        dtype=dtype, max_position=max_position, intermediate=intermediate or 3 * hidden, tied=tied,
    )  # fmt: skip
    _check(sizes)
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from flexslurm.engine.backend import deepspeed

    deepspeed()  # saving imports it, and by itself it would talk on standard output
    target = Path(path)
    config = AutoConfig.for_model(family, **_common(sizes), **_own(sizes))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    _draw(model, seed)
    config.architectures = [type(model).__name__]
    _save(model, target, max_shard_bytes)
    return target


def _save(model: Any, target: Path, max_shard_bytes: int | None) -> None:
    """Write model and tokenizer beside `target`, then in its place: it is whole or absent."""
    from safetensors import SafetensorError

    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        limit = {} if max_shard_bytes is None else {"max_shard_size": max_shard_bytes}
        with quiet_progress():
            model.save_pretrained(scratch, **limit)
        byte_tokenizer().save_pretrained(scratch)
        scratch.chmod(0o755)
        if target.is_dir():
            shutil.rmtree(target)
        scratch.replace(target)
    except SafetensorError as error:  # how it tells of a full disk
        raise EnvironmentFault(
            f"cannot write {target}: {error}", hint="choose a place with more space with --out"
        ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def quiet_progress() -> Iterator[None]:
    """Keep transformers' progress bars off standard error for a while."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def byte_tokenizer() -> Any:
    """A transformers tokenizer with one token per byte of UTF-8 and a chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    taken = {number: token for token, number in SPECIAL_TOKENS.items()}
    vocabulary = {taken.get(byte, text): byte for byte, text in enumerate(_byte_texts())}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<|bos|>",  # noqa: S106 - a token of text
        eos_token="<|eos|>",  # noqa: S106
        pad_token="<|pad|>",  # noqa: S106
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _byte_texts() -> list[str]:
    """The printable character that stands for each byte in a byte-level vocabulary (as GPT-2's)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(spare)) for byte in range(_BYTES)]


def _check(sizes: _Sizes) -> None:
    hidden, heads = sizes.hidden, sizes.heads
    if sizes.family not in TINY_FAMILIES:
        raise ModelError(
            f"no tiny model of the family '{sizes.family}'",
            hint=f"there is {', '.join(TINY_FAMILIES)}",
        )
    if sizes.dtype not in DTYPES:
        raise ModelError(f"no dtype '{sizes.dtype}'", hint=f"there is {', '.join(DTYPES)}")
    if min(sizes.layers, hidden, heads, sizes.kv_heads, sizes.max_position) < 1:
        raise ModelError("the sizes of a tiny model are at least 1")
    if hidden % heads or (hidden // heads) % 2:
        raise ModelError(f"hidden {hidden} over {heads} heads does not give an even head size")
    if heads % sizes.kv_heads:
        raise ModelError(f"{heads} heads cannot be shared by {sizes.kv_heads} KV heads")
    if sizes.vocab < _BYTES:
        raise ModelError(f"the byte tokenizer needs at least {_BYTES} ids, not {sizes.vocab}")


def _common(sizes: _Sizes) -> dict[str, Any]:
    return {
        "num_hidden_layers": sizes.layers,
        "hidden_size": sizes.hidden,
        "num_attention_heads": sizes.heads,
        "vocab_size": sizes.vocab,
        "max_position_embeddings": sizes.max_position,
        "tie_word_embeddings": sizes.tied,
        "dtype": sizes.dtype,
        "bos_token_id": SPECIAL_TOKENS["<|bos|>"],
        "eos_token_id": SPECIAL_TOKENS["<|eos|>"],
        "pad_token_id": SPECIAL_TOKENS["<|pad|>"],
    }


def _own(sizes: _Sizes) -> dict[str, Any]:
    """The configuration keys in which the families differ."""
    if sizes.family == "opt":
        return {
            "ffn_dim": sizes.intermediate,
            "word_embed_proj_dim": sizes.hidden,
            "dropout": 0.0,
        }
    if sizes.family == "gpt_neox":
        return {"intermediate_size": sizes.intermediate}
    own: dict[str, Any] = {
        "intermediate_size": sizes.intermediate,
        "num_key_value_heads": sizes.kv_heads,
    }
    if sizes.family in ("mistral", "qwen3"):
        own["head_dim"] = sizes.hidden // sizes.heads
    return own | ({"sliding_window": None} if sizes.family == "mistral" else {})


def _draw(model: Any, seed: int) -> None:
    """Fill every parameter, in the order of names, from one seeded float64 stream."""
    import torch

    stream = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            noise = torch.randn(weight.shape, generator=stream, dtype=torch.float64)
            weight.copy_(noise * _spread(name, weight) + _centre(name))
        model.get_output_embeddings().weight[SPECIAL_TOKENS["<|eos|>"]] = 0.0


def _spread(name: str, weight: torch.Tensor) -> float:
    """The standard deviation a parameter is drawn with."""
    if weight.dim() == 1:
        return 0.1
    if "embed" in name:
        return 1.0
    # A wide fan-in keeps the residual stream from settling on one direction.
    return float(3.0 / weight.shape[-1] ** 0.5)


def _centre(name: str) -> float:
    return 1.0 if "norm" in name and name.endswith("weight") else 0.0
