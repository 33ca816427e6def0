"""What lives where after a shift, on disk: gears in their places, weights' versions, block tables.

It holds no weights, no KV and no tokens: it is what one must know to find them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import msgspec

from flexslurm.control.installed import InstalledGear, ReplicaKey
from flexslurm.engine.load import RunningKv

FORMAT = 1


class StagePlace(msgspec.Struct, frozen=True):
    """One worker's part of a replica."""

    worker: str
    node: str
    lo: int
    hi: int
    tp: int
    tp_rank: int
    weights: str
    """The version of the weights of all its layers."""


class ReplicaPlace(msgspec.Struct, frozen=True):
    """A replica of the gear that serves."""

    number: int
    """In the gear."""
    epoch: int
    index: int
    """The epoch it was installed under, and its number there: what the workers know it by."""
    stages: tuple[StagePlace, ...]


class BlockTable(msgspec.Struct, frozen=True):
    """A sequence's blocks, and how many of its tokens have their KV in them."""

    sequence: str
    epoch: int
    index: int
    blocks: tuple[int, ...]
    computed: int


class LightCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """What lives where after a shift; no weights and no KV."""

    format: int = FORMAT
    head: str
    epoch: int
    model: str
    layout: str
    block_tokens: int
    replicas: tuple[ReplicaPlace, ...]
    tables: tuple[BlockTable, ...]


def take_checkpoint(
    head: str,
    epoch: int,
    model: str,
    weights: str,
    gear: InstalledGear,
    running: Mapping[ReplicaKey, list[RunningKv]],
) -> LightCheckpoint:
    """What is in place now; `weights`: the version of the model's files."""
    replicas = []
    for number, one in sorted(gear.replicas.items()):
        shape = one.replica.stages
        stages = tuple(
            StagePlace(
                worker=seat.worker,
                node=seat.node,
                lo=shape[slot.stage].lo,
                hi=shape[slot.stage].hi,
                tp=shape[slot.stage].tp,
                tp_rank=slot.tp_rank,
                weights=weights,
            )
            for slot, seat in zip(one.slots, one.seats, strict=True)
        )
        replicas.append(ReplicaPlace(number, one.key.epoch, one.key.index, stages))
    tables = tuple(
        BlockTable(kv.seq_id, key.epoch, key.index, kv.blocks, kv.computed)
        for key, sequences in sorted(running.items())
        for kv in sequences
    )
    return LightCheckpoint(
        head=head,
        epoch=epoch,
        model=model,
        layout=gear.gear.layout(),
        block_tokens=gear.gear.block_tokens,
        replicas=tuple(replicas),
        tables=tables,
    )


def weights_version(model: Path) -> str:
    """Tells one set of weight files from another: their names, sizes and times, hashed.

    Raises OSError.
    """
    digest = hashlib.sha256()
    for path in sorted((*model.glob("*.safetensors"), *model.glob("*.json"))):
        state = path.stat()
        digest.update(f"{path.name}\0{state.st_size}\0{state.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]
