"""Converts a GGUF file to an ordinary safetensors checkpoint; never downloads anything.

Run as its own process (`python -m flexslurm.engine.prepare GGUF OUT DTYPE`), since transformers
takes seconds to import and gigabytes to convert, and the caller is to stay light. Each line on
standard output says what happens next.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flexslurm.errors import FlexslurmError, ModelError

Say = Callable[[str], None]


def convert_gguf(file: Path, out: Path, dtype: str, say: Say) -> None:
    """Write config, weights and tokenizer of `file` into the empty directory `out`.

    Quantised weights are written out in `dtype`. Raises ModelError when transformers cannot read
    the file.
    """
    say("loading transformers")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        say("reading the tokenizer")
        tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
        say("reading the weights")
        model = AutoModelForCausalLM.from_pretrained(
            str(file.parent), gguf_file=file.name, dtype=torch.float32
        )
    except (ValueError, OSError, KeyError, NotImplementedError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if isinstance(error, KeyError):
            reason = f"it lacks {reason}"
        raise ModelError(f"transformers cannot read {file.name}: {reason}") from error
    _forget_quantization(model)
    say("writing the checkpoint")
    model.to(getattr(torch, dtype)).save_pretrained(out)
    tokenizer.save_pretrained(out)
    _clean_config(out / "config.json", dtype)


def _forget_quantization(model: Any) -> None:
    """The weights are plain now; what still says otherwise keeps the model from being saved."""
    vars(model.config).pop("quantization_config", None)
    model.hf_quantizer = None
    model.is_quantized = False
    vars(model).pop("quantization_method", None)


def _clean_config(file: Path, dtype: str) -> None:
    config = json.loads(file.read_text(encoding="utf-8"))
    config.pop("_model_name_or_path", None)
    config["dtype"] = dtype
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(file: str, out: str, dtype: str) -> int:
    try:
        convert_gguf(Path(file), Path(out), dtype, _say)
    except FlexslurmError as error:
        sys.stderr.write(f"{error.message}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:4]))
