"""Bytes of every GPU through a shift, to the byte, and the plan as a whole."""

from __future__ import annotations

import itertools
import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexslurm.engine import footprint
from flexslurm.engine.memory_plan import MemoryVerdict, memory_plan
from flexslurm.engine.ownership import Holding, KvBox, ReplicaAt
from flexslurm.engine.reshard import LinkKind
from flexslurm.engine.routing import LiveKv
from flexslurm.engine.shift_plan import LinkRates, ShiftFacts, plan_shift
from flexslurm.planner.model_spec import ALIGNMENT_BYTES, aligned
from flexslurm.planner.topology import Topology
from tests.reshard_cases import BLOCK_TOKENS, CONFIGS, LAYERS, at, replica, shard_map


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_pieces_are_what_a_stage_takes(kind: str, dtype: str) -> None:
    shards = shard_map(kind, dtype)
    for lo in range(LAYERS):
        for hi in range(lo + 1, LAYERS + 1):
            for tp in range(1, min(4, shards.info.num_kv_heads) + 1):
                for rank in range(tp):
                    held = Holding(lo, hi, tp, rank)
                    stage = footprint.stage_bytes(shards.info, lo, hi, tp, rank, dtype)
                    assert shards.weights_bytes(held) == stage
                    block = footprint.block_bytes(
                        shards.info, lo, hi, tp, rank, dtype, BLOCK_TOKENS
                    )
                    assert shards.block_bytes(held) == block


@given(st.sampled_from(sorted(CONFIGS)), st.integers(1, 4))
def test_ranks_tile_each_tensor_and_the_heads(kind: str, tp: int) -> None:
    shards = shard_map(kind)
    tp = min(tp, shards.info.num_kv_heads)
    ranks = [shards.pieces(Holding(0, LAYERS, tp, rank)) for rank in range(tp)]
    for pieces in zip(*ranks, strict=True):
        assert len({(p.tensor, p.dim, p.size, p.unit_bytes) for p in pieces}) == 1
        if all(p.is_whole for p in pieces):
            continue
        assert pieces[0].lo == 0
        assert pieces[-1].hi == pieces[-1].size
        assert all(a.hi == b.lo for a, b in itertools.pairwise(pieces))
    boxes = [shards.kv_box(Holding(2, 5, tp, rank)) for rank in range(tp)]
    assert [head for b in boxes for head in range(*b.heads)] == list(
        range(shards.info.num_kv_heads)
    )
    assert boxes[0].meet(KvBox((0, 3), (0, 1))) == KvBox((2, 3), (0, 1))
    assert boxes[0].meet(KvBox((0, 2), (0, 1))) is None


def one_gpu(arena: int, lo: int = 3) -> tuple[list[ReplicaAt], list[ReplicaAt], dict[str, int]]:
    """A pipeline of two that moves its cut from the middle to `lo`."""
    old = [at(1, 0, replica((1, 0, 3), (1, 3, 6)), ["a/0", "b/0"])]
    new = [at(2, 0, replica((1, 0, lo), (1, lo, 6)), ["a/0", "b/0"])]
    return old, new, {"a/0": arena, "b/0": arena}


def live(blocks: int, tokens: int | None = None, name: str = "s", home: int = 0) -> LiveKv:
    have = blocks * BLOCK_TOKENS if tokens is None else tokens
    return LiveKv(name, home, blocks, have, 1, have + 100)


def test_a_cut_that_moves_by_one_layer_takes_one_layer() -> None:
    shards = shard_map()
    old, new, arenas = one_gpu(1 << 30, lo=4)
    plan = memory_plan(shards, old, new, {}, [live(2)], {"s": 0}, arenas, grow_blocks=0)
    first, second = plan.of("a/0"), plan.of("b/0")
    layer = footprint.stage_bytes(shards.info, 1, 2, 1, 0, "float32")
    assert first.old_weights == shards.weights_bytes(Holding(0, 3, 1, 0))
    assert (first.new_weights, second.new_weights) == (layer, 0)
    assert second.weights_after == shards.weights_bytes(Holding(4, 6, 1, 0))
    # 3 heads and one layer more, for two full blocks; what stays is shared.
    assert (first.new_pages, second.new_pages) == (2 * 3 * shards.page_bytes, 0)
    assert first.pages_after == 4 * 3 * 2 * shards.page_bytes
    assert plan.verdict is MemoryVerdict.BESIDE
    assert plan.short_bytes == plan.parked_bytes == 0
    assert re.fullmatch(r"both gears fit: at least [\d.]+ MiB stay free on every GPU", plan.why)


def test_partial_blocks_are_not_shared() -> None:
    shards = shard_map()
    old, new, arenas = one_gpu(1 << 30)
    plan = memory_plan(
        shards, old, new, {}, [live(2, BLOCK_TOKENS + 1)], {"s": 0}, arenas, grow_blocks=0
    )
    assert plan.of("a/0").new_pages == 3 * 3 * shards.page_bytes


def test_widening_takes_the_whole_piece_anew() -> None:
    shards = shard_map()
    old = [at(1, 0, replica((2, 0, 6)), ["a/0", "a/1"])]
    new = [at(2, 0, replica((1, 0, 6)), ["a/0"])]
    plan = memory_plan(shards, old, new, {}, [], {}, {"a/0": 1 << 30, "a/1": 1 << 30})
    split = sum(
        aligned(piece.nbytes)
        for piece in shards.pieces(Holding(0, 6, 1, 0))
        if not any(p.holds(piece) for p in shards.pieces(Holding(0, 6, 2, 0)))
    )
    assert plan.of("a/0").new_weights == split > 0
    assert plan.of("a/1").weights_after == 0


def test_narrowing_takes_nothing_and_keeps_the_span() -> None:
    shards = shard_map()
    old = [at(1, 0, replica((1, 0, 6)), ["a/0"])]
    new = [at(2, 0, replica((3, 0, 6)), ["a/1", "a/0", "a/2"])]
    plan = memory_plan(shards, old, new, {}, [], {}, dict.fromkeys(["a/0", "a/1", "a/2"], 1 << 30))
    here = plan.of("a/0")
    assert here.new_weights == 0
    least = sum(piece.nbytes for piece in shards.pieces(Holding(0, 6, 3, 1)))
    count = len(shards.pieces(Holding(0, 6, 3, 1)))
    assert least <= here.weights_after <= least + 2 * ALIGNMENT_BYTES * count


def test_what_does_not_fit_beside_is_said_to_the_byte() -> None:
    shards = shard_map()
    old, new, arenas = one_gpu(1 << 30, lo=5)
    most = memory_plan(shards, old, new, {}, [live(9)], {"s": 0}, arenas).of("a/0").most
    fits = memory_plan(shards, old, new, {}, [live(9)], {"s": 0}, {"a/0": most, "b/0": most})
    assert fits.verdict is MemoryVerdict.BESIDE
    tight = {"a/0": most - 10, "b/0": most}
    short = memory_plan(shards, old, new, {}, [live(9)], {"s": 0}, tight)
    assert short.verdict is MemoryVerdict.STOP
    assert short.short_bytes == 10
    assert short.why.endswith(": 10 B are short")
    assert short.parked_bytes == 9 * 6 * 3 * shards.page_bytes


def test_growth_is_bounded_by_the_pool_and_the_context() -> None:
    shards = shard_map()
    old, new, arenas = one_gpu(1 << 30)
    page = shards.page_bytes * 9

    def pages(one: LiveKv, grow: int) -> int:
        plan = memory_plan(shards, old, new, {}, [one], {"s": 0}, arenas, grow_blocks=grow)
        return plan.of("a/0").old_pages // page

    assert pages(live(2), 3) == 5
    assert pages(LiveKv("s", 0, 2, 8, 1, 9), 3) == 3, "9 tokens are three blocks"
    assert pages(LiveKv("s", 0, 63, 252, 1, 1000), 5) == 64, "the gear's bound"


def test_a_kept_replica_takes_nothing() -> None:
    shards = shard_map()
    first = at(1, 0, replica((1, 0, 6)), ["a/0"])
    second = at(2, 1, replica((1, 0, 6)), ["b/0"])
    arenas = {"a/0": 1 << 30, "b/0": 1 << 30}
    stays = live(3, 9)
    plan = memory_plan(shards, [first], [first, second], {0: 0}, [stays], {}, arenas)
    here, there = plan.of("a/0"), plan.of("b/0")
    assert (here.new_weights, here.new_pages) == (0, 0)
    assert here.most == here.prepare == here.after
    assert there.old_weights == there.old_pages == 0
    assert there.new_weights == there.weights_after == shards.weights_bytes(Holding(0, 6, 1, 0))


# ------------------------------------------------------------------------------------ the whole


def facts(**more: object) -> ShiftFacts:
    """Two GPUs of node a as a pipeline, to one GPU of node a and one of b; two sequences."""
    old = (at(1, 0, replica((1, 0, 3), (1, 3, 6)), ["a/0", "a/1"]),)
    new = (at(2, 0, replica((1, 0, 3), (1, 3, 6)), ["a/0", "b/0"]),)
    known: dict[str, object] = {
        "old": old, "new": new, "kept": {},
        "live": (live(4, name="x"), live(2, 5, name="y")),
        "arenas": dict.fromkeys(["a/0", "a/1", "b/0"], 1 << 30),
        "rates": LinkRates(network=1000.0, node=4000.0, checkpoint=500.0),
        **more,
    }  # fmt: skip
    return ShiftFacts(**known)  # type: ignore[arg-type]


def test_the_plan_of_a_shift_adds_up() -> None:
    shards = shard_map()
    plan = plan_shift(shards, facts())
    weights, kv = plan.totals["weights"], plan.totals["kv"]
    half = sum(piece.nbytes for piece in shards.pieces(Holding(3, 6, 1, 0)))
    assert weights[LinkKind.NETWORK] == half
    assert weights[LinkKind.CHECKPOINT] == weights[LinkKind.NODE] == 0
    assert kv[LinkKind.NETWORK] == kv[LinkKind.HELD] == 6 * 9 * shards.page_bytes
    assert plan.transfer_s == pytest.approx((half + kv[LinkKind.NETWORK]) / 600.0)
    last = 2 * 9 * shards.page_bytes / 1000.0
    assert plan.pause_s == pytest.approx(last + 3 * 0.05)
    text = "\n".join(plan.lines())
    assert "over the network" in text
    assert "0 stay, 2 move, 0 are recomputed, 0 are evicted" in text
    assert plan.scheduled == ()


def test_a_limit_in_bytes_per_second_wins_over_the_share() -> None:
    shards = shard_map()
    slow = LinkRates(network=1000.0, limit=100.0)
    ratio = (
        plan_shift(shards, facts(rates=slow)).transfer_s / plan_shift(shards, facts()).transfer_s
    )
    assert ratio == pytest.approx(6.0)


def test_a_lost_member_means_recompute_and_is_no_source() -> None:
    shards = shard_map()
    case = facts(gone=frozenset({"a/1"}), arenas={"a/0": 1 << 30, "b/0": 1 << 30})
    plan = plan_shift(shards, case)
    assert plan.recomputed == ("x", "y")
    assert plan.routes.to == {}
    assert "a/1" not in {flow.source for flow in plan.weights}
    assert plan.totals["weights"][LinkKind.CHECKPOINT] > 0
    assert plan.totals["weights"][LinkKind.NETWORK] == 0


def test_with_a_deadline_the_longest_sequence_goes_first() -> None:
    shards = shard_map()
    block = 9 * shards.page_bytes
    half = sum(piece.nbytes for piece in shards.pieces(Holding(3, 6, 1, 0)))
    seconds = (half + 5 * block) / 600.0
    plan = plan_shift(shards, facts(leaving_s={"a/1": seconds + 1e-6}))
    assert [(one.seq_id, one.blocks) for one in plan.scheduled] == [("x", 4), ("y", 1)]


def test_the_rates_of_a_site_are_those_of_its_slowest_gpus() -> None:
    topology = Topology.from_catalogue(("a100-80", "l4"))
    rates = LinkRates.of(topology, ["a100-80", "l4", "l4"], limit_mbps=250)
    slow = topology.gpu("l4")
    assert rates.rate(LinkKind.CHECKPOINT) == slow.storage_bandwidth
    assert rates.node == slow.link.bandwidth
    assert rates.rate(LinkKind.NETWORK) == 250e6
    free = LinkRates.of(topology, ["a100-80"])
    assert free.rate(LinkKind.NETWORK) == pytest.approx(0.6 * topology.node_link.bandwidth)
    assert free.rate(LinkKind.NETWORK, paced=False) == topology.node_link.bandwidth


def test_receivers_do_not_crowd_on_one_source() -> None:
    """Two holders of everything, eight receivers of everything: each sends half."""
    shards = shard_map()
    whole = replica((1, 0, 6))
    old = tuple(at(1, i, whole, [f"o{i}/0"]) for i in range(2))
    new = tuple(at(2, i, whole, [f"n{i}/0"]) for i in range(8))
    workers = [f"o{i}/0" for i in range(2)] + [f"n{i}/0" for i in range(8)]
    plan = plan_shift(
        shards, facts(old=old, new=new, live=(), arenas=dict.fromkeys(workers, 1 << 30))
    )
    sent = Counter[str]()
    for flow in plan.weights:
        sent[flow.source] += flow.nbytes
    assert set(sent) == {"o0/0", "o1/0"}
    assert max(sent.values()) <= 1.1 * min(sent.values())


def test_while_a_gear_serves_beside_most_of_its_throughput_is_left() -> None:
    shards = shard_map()
    beside = plan_shift(shards, facts())
    assert 0.5 < beside.served_share <= 0.85
    tight = plan_shift(shards, facts(arenas=dict.fromkeys(["a/0", "a/1", "b/0"], 1000)))
    assert tight.served_share == 0.0
    assert tight.pause_s > beside.pause_s
    assert any("serving stops" in line for line in tight.lines())
    # The old gear is retired first: nobody is left to give weights.
    assert tight.holders == ()
    assert tight.totals["weights"][LinkKind.CHECKPOINT] == sum(tight.totals["weights"].values())
    assert len(beside.holders) == 2


def test_a_shift_that_only_adds_a_replica_moves_no_kv() -> None:
    shards = shard_map()
    first = at(1, 0, replica((1, 0, 6)), ["a/0"])
    second = at(2, 1, replica((1, 0, 6)), ["b/0"])
    plan = plan_shift(
        shards,
        facts(old=(first,), new=(first, second), kept={0: 0}, live=(live(4, name="x"),)),
    )
    assert plan.staying == ("x",)
    assert plan.kv == ()
    assert [one.worker for one in plan.slots] == ["b/0"]
    assert plan.lines()[0] == "replicas that stay: 0 → 0"


def test_where_the_room_shrinks_the_newest_are_named() -> None:
    shards = shard_map()
    small = (at(2, 0, replica((1, 0, 6), kv_blocks=5), ["b/0"]),)
    sequences = tuple(LiveKv(f"s{i}", 0, 2, 8, i, 20) for i in range(4))
    plan = plan_shift(shards, facts(new=small, live=sequences))
    assert plan.routes.evicted == ("s3", "s2")
    assert sorted(plan.routes.to) == ["s0", "s1"]
