"""A checkpoint's safetensors files: which tensor is where, and whether the files are whole.

Reads headers only, never weights, and needs no torch: the launcher checks a model with it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from flexslurm.engine.families import ModelInfo
from flexslurm.engine.layout import TensorLayout, edge_tensors, layer_tensors
from flexslurm.errors import ModelError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1,
    "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
_FLOATS = ("F64", "F32", "F16", "BF16")
_MOST_HEADER_BYTES = 100 << 20


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor is."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str
    """As safetensors writes it, such as `BF16`."""


class Checkpoint:
    """The tensors of one checkpoint directory, by name."""

    def __init__(self, path: str, tensors: Mapping[str, StoredTensor]) -> None:
        self.path = path
        self.tensors = tensors

    @classmethod
    def open(cls, path: str) -> Checkpoint:
        """Read the index and every file's header.

        Raises ModelError naming the file that is missing, truncated or damaged.
        """
        directory = Path(path)
        if not directory.is_dir():
            raise ModelError(f"{directory}: no such directory", hint="give a checkpoint directory")
        index = directory / INDEX
        if index.is_file():
            return cls(path, _from_index(index))
        single = directory / SINGLE
        if not single.is_file():
            others = sorted(p.name for p in directory.iterdir() if p.suffix in (".bin", ".pt"))
            raise ModelError(
                f"{single}: no such file"
                + (f" (there is {others[0]}, which is pickled)" if others else ""),
                hint=f"weights are read from {SINGLE}, or from shards listed in {INDEX}",
            )
        return cls(path, read_header(single))

    def find(self, names: Iterable[str]) -> StoredTensor:
        """The first of these names that there is; raises ModelError naming the one missing."""
        wanted = list(names)
        for name in wanted:
            if name in self.tensors:
                return self.tensors[name]
        raise ModelError(f"{self.path}: the checkpoint has no tensor {wanted[0]}")

    def locate(self, info: ModelInfo, tensor: TensorLayout, layer: int | None) -> StoredTensor:
        """Where a tensor of the stage is, with its shape and type checked.

        `layer` is the number in the whole model, None for what is outside the layers. Raises
        ModelError naming the file.
        """
        found = self.find(stored_names(info, tensor.name, layer))
        if found.shape != tensor.shape:
            raise ModelError(
                f"{found.file}: {found.name} has the shape {list(found.shape)}, but config.json "
                f"makes it {list(tensor.shape)}"
            )
        if found.dtype not in _FLOATS:
            raise ModelError(
                f"{found.file}: {found.name} is stored as {found.dtype}; "
                "plain floating-point weights are needed"
            )
        return found

    def check(self, info: ModelInfo) -> int:
        """Check that every tensor of the model is there in its shape; returns their bytes."""
        own = layer_tensors(info)
        edges = [(tensor, None) for tensor in edge_tensors(info, True, True)]
        layers = [(tensor, number) for number in range(info.num_layers) for tensor in own]
        found = [self.locate(info, tensor, layer) for tensor, layer in (*edges, *layers)]
        return sum(prod(t.shape) * _ITEM_BYTES[t.dtype] for t in found)


def check_files(info: ModelInfo) -> int:
    """Check a model's weight files without reading weights; returns their bytes.

    Raises ModelError naming the file, for the launcher to say before anything is submitted.
    """
    return Checkpoint.open(info.path).check(info)


def stored_names(info: ModelInfo, name: str, layer: int | None) -> tuple[str, ...]:
    """What a stage's tensor may be called in a checkpoint, the usual name first.

    Old checkpoints of OPT were saved from the bare model, without the leading `model.`.
    """
    family = info.family
    own: tuple[str, ...]
    if layer is not None:
        own = (f"{family.prefix}layers.{layer}.{name}",)
    elif name == "lm_head.weight":
        # A tied head is the embedding under another name, and often not stored twice.
        tied = (f"{family.prefix}{family.embed}.weight",) if info.tied else ()
        own = tied or family.head_names
    else:
        part, _, rest = name.partition(".")
        inner = {"embed": family.embed, "norm": family.norm, "positions": family.positions}
        own = (f"{family.prefix}{inner.get(part, part)}.{rest}",)
    bare = f"{family.base}."
    return own + tuple(n.removeprefix(bare) for n in own if n.startswith(bare))


def _from_index(index: Path) -> dict[str, StoredTensor]:
    try:
        listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        places = {str(name): str(file) for name, file in listed.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index}: cannot be read as an index of shards: {error!r}") from None
    headers: dict[str, dict[str, StoredTensor]] = {}
    for file in sorted(set(places.values())):
        if Path(file).name != file:
            raise ModelError(f"{index}: the shard '{file}' is not a plain file name")
        if not (index.parent / file).is_file():
            raise ModelError(f"{index.parent / file}: no such file, but {INDEX} lists it")
        headers[file] = read_header(index.parent / file)
    for name, file in places.items():
        if name not in headers[file]:
            raise ModelError(f"{index.parent / file}: has no tensor {name}, but {INDEX} says so")
    return {name: headers[file][name] for name, file in places.items()}


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file; raises ModelError if it is truncated or damaged."""
    try:
        with file.open("rb") as stream:
            size = file.stat().st_size
            head = stream.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
            if len(head) < 8 or 8 + length > size:
                raise _truncated(file, size, 8 + max(length, 2))
            if length > _MOST_HEADER_BYTES:
                raise ModelError(f"{file}: is no safetensors file (a header of {length} bytes)")
            header = json.loads(stream.read(length))
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error.strerror}") from None
    except ValueError:
        raise ModelError(f"{file}: is no safetensors file (its header is not JSON)") from None
    try:
        return _tensors(file, header, size - 8 - length)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"{file}: has a damaged header: {error!r}") from None


def _tensors(file: Path, header: dict[str, Any], data_bytes: int) -> dict[str, StoredTensor]:
    found, end = {}, 0
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        start, stop = entry["data_offsets"]
        shape, dtype = tuple(int(n) for n in entry["shape"]), str(entry["dtype"])
        item = _ITEM_BYTES.get(dtype)
        if item is not None and stop - start != prod(shape) * item:
            raise ModelError(f"{file}: {name} has {stop - start} bytes, not those of its shape")
        end = max(end, stop)
        found[name] = StoredTensor(name, file, shape, dtype)
    if end > data_bytes:
        raise _truncated(file, data_bytes, end)
    return found


def _truncated(file: Path, have: int, need: int) -> ModelError:
    return ModelError(
        f"{file}: is truncated: {need - have} of {need} bytes are missing",
        hint="copy or download the file again",
    )
