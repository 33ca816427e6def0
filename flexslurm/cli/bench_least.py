"""The least bytes that a shift has to move, from what a service says of itself; moves nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flexslurm.engine.families import check_model
from flexslurm.engine.kv_cache import blocks_for
from flexslurm.engine.ownership import ShardMap
from flexslurm.engine.placing import place_gear
from flexslurm.engine.routing import LiveKv
from flexslurm.gear import Gear, Slot, slots
from flexslurm.messages import FragmentStatus, StatusAnswer
from flexslurm.planner.placement import Current, GpuRef, PhysicalNode


def least_bytes(
    model: Path,
    block_tokens: int,
    before: StatusAnswer,
    after: StatusAnswer,
    kv: Sequence[tuple[int, int]],
    dtype: str = "float64",
) -> int:
    """Weights and KV that must come from elsewhere, for the best placement of the new gear.

    `kv`: of each sequence that moves, its replica's number in the old gear, and its tokens.
    """
    old, new = before.gear, after.gear
    assert old is not None and new is not None, "a service that serves has a gear"
    shards = ShardMap(check_model(model), dtype, block_tokens)
    nodes = [PhysicalNode(f.name, f.gpu_type, _indices(f)) for f in before.fragments]
    current = Current(old, dict(_placement(old, before.fragments)))
    live = [
        LiveKv(
            seq_id=str(number),
            replica=replica,
            blocks=max(blocks_for(tokens, block_tokens), 1),
            tokens=tokens,
            arrival=number,
            context=tokens,
        )
        for number, (replica, tokens) in enumerate(kv)
    ]
    return place_gear(shards, new, nodes, current, live).moved_bytes


def moved_bytes(line: Mapping[str, Any]) -> int:
    """What the head's history says of a shift: weights and KV that came from elsewhere."""
    return sum(int(line[key]) for key in ("moved_bytes", "read_bytes", "kv_bytes"))


def _indices(fragment: FragmentStatus) -> tuple[int, ...]:
    return tuple(gpu.index for gpu in fragment.gpus)


def _placement(gear: Gear, fragments: Iterable[FragmentStatus]) -> Iterable[tuple[Slot, GpuRef]]:
    named = {str(slot): slot for slot in slots(gear)}
    for fragment in fragments:
        for gpu in fragment.gpus:
            if gpu.slot is not None:
                yield named[gpu.slot], GpuRef(fragment.name, gpu.index)
