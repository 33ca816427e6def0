"""The least bytes that a shift has to move, from what a service says of itself; moves nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from flexslurm.engine.families import check_model
from flexslurm.engine.kv_cache import blocks_for
from flexslurm.engine.ownership import Holding, ShardMap
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
    computed: Sequence[int],
    dtype: str = "float64",
) -> int | None:
    """Weights and KV that must come from elsewhere, for the best placement of the new gear.

    `computed`: tokens of each sequence whose KV is there. None where the old gear has several
    replicas: who had which sequence is not told.
    """
    old, new = before.gear, after.gear
    if old is None or new is None or len(old.replicas) != 1:
        return None
    shards = ShardMap(check_model(model), dtype, block_tokens)
    nodes = [PhysicalNode(f.name, f.gpu_type, _indices(f)) for f in before.fragments]
    current = Current(old, dict(_placement(old, before.fragments)))
    live = [
        LiveKv(
            seq_id=str(number),
            replica=0,
            blocks=max(blocks_for(tokens, block_tokens), 1),
            tokens=tokens,
            arrival=number,
            context=tokens,
        )
        for number, tokens in enumerate(computed)
    ]
    return place_gear(shards, new, nodes, current, live).moved_bytes


def padding_bytes(
    model: Path, block_tokens: int, after: StatusAnswer, padded: int, dtype: str = "float64"
) -> int:
    """What alignment adds to the weights of a gear's new replicas, of `padded` bytes in all.

    Replicas that stayed were not installed: the last ones of the gear that make up `padded` are
    the new ones.
    """
    assert after.gear is not None, "a gear that was shifted to is in place"
    shards = ShardMap(check_model(model), dtype, block_tokens)
    whole = exact = 0
    for replica in reversed(after.gear.replicas):
        for stage, found in enumerate(replica.stages):
            for rank in range(found.tp if whole < padded else 0):
                held = Holding.of_slot(replica, stage, rank)
                whole += shards.weights_bytes(held)
                exact += sum(piece.nbytes for piece in shards.pieces(held))
    return padded - exact if whole == padded else 0


def _indices(fragment: FragmentStatus) -> tuple[int, ...]:
    return tuple(gpu.index for gpu in fragment.gpus)


def _placement(gear: Gear, fragments: Iterable[FragmentStatus]) -> Iterable[tuple[Slot, GpuRef]]:
    named = {str(slot): slot for slot in slots(gear)}
    for fragment in fragments:
        for gpu in fragment.gpus:
            if gpu.slot is not None:
                yield named[gpu.slot], GpuRef(fragment.name, gpu.index)
