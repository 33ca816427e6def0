"""Models, gears and places for the tests of shifts on paper."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import strategies as st

from flexslurm.engine.families import check_model
from flexslurm.engine.ownership import ReplicaAt, Seat, ShardMap
from flexslurm.engine.routing import LiveKv
from flexslurm.gear import Estimates, Gear, Replica, Shape, Signature, Slot, Stage, replica_slots
from flexslurm.planner.placement import Current, GpuRef, PhysicalNode

LAYERS = 6
BLOCK_TOKENS = 4
CONFIGS = {
    "llama": {
        "model_type": "llama", "hidden_size": 72, "intermediate_size": 200,
        "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8, "vocab_size": 101,
        "num_hidden_layers": LAYERS, "max_position_embeddings": 512,
    },
    "tied": {
        "model_type": "llama", "hidden_size": 80, "intermediate_size": 200,
        "num_attention_heads": 10, "num_key_value_heads": 5, "head_dim": 8, "vocab_size": 515,
        "num_hidden_layers": LAYERS, "max_position_embeddings": 512, "tie_word_embeddings": True,
    },
    "opt": {
        "model_type": "opt", "hidden_size": 40, "ffn_dim": 100, "num_attention_heads": 5,
        "vocab_size": 101, "num_hidden_layers": LAYERS, "max_position_embeddings": 512,
        "word_embed_proj_dim": 24,
    },
    "neox": {
        "model_type": "gpt_neox", "hidden_size": 40, "intermediate_size": 104,
        "num_attention_heads": 4, "vocab_size": 101, "num_hidden_layers": LAYERS,
        "max_position_embeddings": 512,
    },
}  # fmt: skip


@cache
def shard_map(kind: str = "llama", dtype: str = "float32") -> ShardMap:
    with TemporaryDirectory() as where:
        (Path(where) / "config.json").write_text(json.dumps(CONFIGS[kind]))
        return ShardMap(check_model(where), dtype, BLOCK_TOKENS)


def replica(
    *stages: tuple[int, int, int], nodes: Sequence[int] | None = None, kv_blocks: int = 64
) -> Replica:
    """`stages`: `(tp, lo, hi)` each, every one on a node of its own unless `nodes` says."""
    numbers = nodes or range(len(stages))
    return Replica(
        tuple(
            Stage("a", tp, lo, hi, kv_blocks, node)
            for (tp, lo, hi), node in zip(stages, numbers, strict=True)
        ),
        max_batch=16,
        max_batch_tokens=64,
        max_context=256,
    )


def at(
    epoch: int, index: int, one: Replica, workers: Sequence[str], node: str | None = None
) -> ReplicaAt:
    """A replica on workers called `NODE/GPU`, or all on one node."""
    seats = tuple(
        Seat(w, node or w.split("/")[0], f"10.0.0.{i}", 1000 + i) for i, w in enumerate(workers)
    )
    return ReplicaAt(epoch, index, one, seats)


def gear_of(name: str, shapes: Sequence[int], *replicas: Replica) -> Gear:
    """A gear over nodes of type `a`; `shapes[i]`: GPUs of the abstract node i, rising."""
    assert list(shapes) == sorted(shapes)
    signature = Signature.of(Shape("a", gpus) for gpus in shapes)
    return Gear(name, signature, BLOCK_TOKENS, replicas, Estimates(100.0, 0.1, 0.01, 1000, 1.0))


@st.composite
def placed_gears(
    draw: st.DrawFn, name: str, most_nodes: int = 4, most_tp: int = 3
) -> tuple[Gear, list[PhysicalNode]]:
    """A random gear and nodes that hold it exactly, some of them with a GPU to spare."""
    sizes = sorted(draw(st.lists(st.integers(1, most_tp), min_size=1, max_size=most_nodes)))
    free = [(node, gpus) for node, gpus in enumerate(sizes)]
    replicas = []
    while free and len(replicas) < 3:
        count = draw(st.integers(1, min(3, len(free))))
        chosen, free = free[:count], free[count:]
        cuts = draw(
            st.lists(
                st.integers(1, LAYERS - 1), min_size=count - 1, max_size=count - 1, unique=True
            )
        )
        ends = [0, *sorted(cuts), LAYERS]
        tps = [draw(st.integers(1, gpus)) for _, gpus in chosen]
        stages = [(tp, ends[i], ends[i + 1]) for i, tp in enumerate(tps)]
        blocks = draw(st.sampled_from([8, 24]))
        replicas.append(replica(*stages, nodes=[node for node, _ in chosen], kv_blocks=blocks))
        if draw(st.booleans()):
            break
    gear = gear_of(name, sizes, *replicas)
    spare = draw(st.integers(0, 1))
    nodes = [
        PhysicalNode(f"n{i}", "a", tuple(range(gpus + (spare if i == 0 else 0))))
        for i, gpus in enumerate(sizes)
    ]
    return gear, nodes


def in_place(gear: Gear, slots: dict[Slot, GpuRef], epoch: int) -> list[ReplicaAt]:
    """Its replicas with the GPUs' names for workers."""
    found = []
    for number, one in enumerate(gear.replicas):
        seats = tuple(
            Seat(str(ref), ref.node) for ref in (slots[slot] for slot in replica_slots(one, number))
        )
        found.append(ReplicaAt(epoch, number, one, seats))
    return found


def current_of(gear: Gear, slots: dict[Slot, GpuRef]) -> Current:
    return Current(gear, slots)


@st.composite
def live_sequences(draw: st.DrawFn, gear: Gear, most: int = 6) -> list[LiveKv]:
    """Sequences that fit the gear's replicas."""
    found: list[LiveKv] = []
    left = [one.kv_blocks for one in gear.replicas]
    for number in range(draw(st.integers(0, most))):
        home = draw(st.integers(0, len(left) - 1))
        blocks = draw(st.integers(1, 4))
        if blocks > left[home]:
            continue
        left[home] -= blocks
        tokens = blocks * BLOCK_TOKENS - draw(st.integers(0, BLOCK_TOKENS - 1))
        found.append(LiveKv(f"s{number}", home, blocks, tokens, number, tokens + 8))
    return found
