"""Where both gears do not fit, weights go from the old gear to the new one layer by layer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from flexslurm.control.actions import Send, SwitchOver
from flexslurm.control.holdings import Held, Holdings
from flexslurm.control.phases import Mode, Phase
from flexslurm.engine.arena import Arena
from flexslurm.engine.families import check_model
from flexslurm.engine.hand_over import LayersInTurn
from flexslurm.engine.memory_plan import MemoryPlan, MemoryVerdict, hand_over_peak, memory_plan
from flexslurm.engine.ownership import Holding, Piece, ShardMap
from flexslurm.engine.reshard import LinkKind
from flexslurm.engine.shift_plan import ShiftFacts, plan_shift
from flexslurm.engine.stage import StagePlan, build_stage
from flexslurm.engine.transfer_client import Cancel, Job
from flexslurm.engine.transfer_wire import AskWeights, PieceRange, Ranges
from flexslurm.engine.turns import turns_of
from flexslurm.engine.weight_runs import WeightSink
from flexslurm.messages import Install, Retire
from flexslurm.planner.model_spec import aligned
from tests.reshard_cases import LAYERS, at, replica, shard_map
from tests.transfer_sides import Side, two_sides
from tests.unit.control_world import World
from tests.unit.test_control_shift import leave, shift_world

# ------------------------------------------------------------------------------- on paper


@given(st.integers(1, 40), st.integers(1, 50))
def test_turns_are_all_layers_in_order_and_the_edges_last(layers: int, most: int) -> None:
    turns = turns_of(layers, most)
    assert [n for found, _ in turns for n in found] == list(range(layers))
    assert [edges for _, edges in turns] == [False] * (len(turns) - 1) + [True]
    assert all(len(found) <= most for found, _ in turns)


@st.composite
def holdings(draw: st.DrawFn) -> Holding:
    lo = draw(st.integers(0, LAYERS - 1))
    hi = draw(st.integers(lo + 1, LAYERS))
    tp = draw(st.integers(1, 3))
    return Holding(lo, hi, tp, draw(st.integers(0, tp - 1)))


# the second rank has no bytes of some small matrix, within what the first one has of it
@example("llama", Holding(0, LAYERS, 3, 0), Holding(0, LAYERS, 3, 1), 1)
@given(st.sampled_from(["llama", "opt"]), holdings(), holdings(), st.sampled_from([1, 2, LAYERS]))
def test_the_peak_is_what_an_arena_has_in_the_end(
    kind: str, held: Holding, need: Holding, turn_layers: int
) -> None:
    """Played with a real arena: claims of each turn, then the release of what was kept."""
    shards = shard_map(kind)
    arena = Arena(64 << 20)
    store = arena.weights
    store.open(1, "m")
    for piece in shards.pieces(held):
        store.filled(store.claim(1, piece, "w"))
    handing = LayersInTurn(shards, arena, [1], turn_layers, lambda name: None)
    store.open(2, "m")
    most = 0
    for number, (layers, edges) in enumerate(turns_of(LAYERS, turn_layers)):
        for piece in pieces_of(shards, need, layers, edges=edges):
            store.filled(store.claim(2, piece, "w"))
        most = max(most, arena.weights_bytes)
        handing.taken(number)
        arena.check_integrity()
        store.check_integrity()
    assert hand_over_peak(shards, [held], [need], turn_layers) == max(most, arena.weights_bytes)
    assert store.used_by(1) == 0, "all that was kept has been given up"
    assert arena.weights_bytes >= sum(piece.nbytes for piece in shards.pieces(need))
    arena.close()


def pieces_of(shards: ShardMap, need: Holding, layers: range, *, edges: bool) -> list[Piece]:
    mine = [n for n in layers if need.lo <= n < need.hi]
    found = [piece for n in mine for piece in shards.layer_pieces(n, need)]
    return [*found, *(shards.edge_pieces(need) if edges else ())]


def two_to_one(arena: int) -> ShiftFacts:
    """Two whole ranks of a TP group become a pipeline of two stages on the same GPUs."""
    old = (at(1, 0, replica((2, 0, LAYERS)), ["a/0", "a/1"]),)
    new = (at(2, 0, replica((1, 0, 3), (1, 3, LAYERS), nodes=[0, 0]), ["a/0", "a/1"], "a"),)
    return ShiftFacts(
        old=old, new=new, kept={}, live=(), arenas=dict.fromkeys(["a/0", "a/1"], arena)
    )


def test_the_plan_hands_over_what_does_not_fit_side_by_side() -> None:
    shards = shard_map()
    whole = memory_of(shards, 1 << 30)
    beside = max(gpu.most for gpu in whole.gpus)
    old = Holding(0, LAYERS, 2, 0)
    turns = {
        layers: max(
            hand_over_peak(shards, [Holding(0, LAYERS, 2, rank)], [need], layers)
            for rank, need in enumerate((Holding(0, 3, 1, 0), Holding(3, LAYERS, 1, 0)))
        )
        for layers in (1, 2, 3, LAYERS)
    }
    assert shards.weights_bytes(old) < turns[1] < turns[LAYERS] <= beside
    assert memory_of(shards, beside).verdict is MemoryVerdict.BESIDE
    for arena in (turns[LAYERS] - 1, turns[3] - 1, turns[2] - 1, turns[1] - 1):
        layers = max((n for n, most in turns.items() if most <= arena), default=0)
        plan = memory_of(shards, arena)
        assert (plan.verdict, plan.turn_layers) == (MemoryVerdict.STOP, layers)
        shift = plan_shift(shards, two_to_one(arena))
        read = shift.totals["weights"][LinkKind.CHECKPOINT]
        assert (read == 0) == (layers > 0)
        many = "layer by layer" if layers == 1 else f"up to {layers} layers at once"
        words = f"{many}, and not read" if layers else "are read from the files"
        assert any(words in line for line in shift.lines())


def memory_of(shards: ShardMap, arena: int) -> MemoryPlan:
    facts = two_to_one(arena)
    return memory_plan(shards, facts.old, facts.new, {}, (), {}, facts.arenas)


# ------------------------------------------------------------------------------ the controller


def handing_world(mode: Mode) -> World:
    world = shift_world(mode)
    world.turn_layers = 1
    return world


@pytest.mark.parametrize("mode", [Mode.PARK, Mode.RECOMPUTE])
def test_weights_stay_until_the_new_gear_is_installed(mode: Mode) -> None:
    world = handing_world(mode)
    leave(world, "b")
    world.run(1)
    sent = [
        (action.to, action.message)
        for action in world.log
        if isinstance(action, Send) and isinstance(action.message, Install | Retire)
    ]
    installs = [message for _, message in sent if isinstance(message, Install)]
    assert {message.hand_over for message in installs} == {2}
    assert {message.turn_layers for message in installs} == {1}
    old = world.control.epoch - 1
    for worker in {to for to, message in sent if isinstance(message, Retire)}:
        order = [m.keep_weights if isinstance(m, Retire) else "install" for to, m in sent
                 if to == worker and (isinstance(m, Install) or m.epoch == old)]  # fmt: skip
        assert order in ([True, "install", False], [True, False]), f"{worker}: {order}"
    kinds = [
        "SwitchOver" if isinstance(a, SwitchOver) else "let go"
        for a in world.log
        if isinstance(a, SwitchOver)
        or (isinstance(a, Send) and isinstance(a.message, Retire) and not a.message.keep_weights)
    ]
    assert kinds[0] == "SwitchOver" and "let go" in kinds, "streams go on first"
    assert not any(held.epoch == old for held in world.control.holdings)


def test_who_has_all_it_takes_from_others_meets_nobody() -> None:
    world = handing_world(Mode.PARK)
    world.staged = True
    leave(world, "b")
    world.run(1)
    installs = [send.message for send in world.told(Install)]
    assert [m.hand_over for m in installs if isinstance(m, Install)] == [1, 1]


def test_an_epoch_that_is_told_twice_to_close_is_closed_when_it_has_said_so_twice() -> None:
    holdings = Holdings()
    holdings.add("w", 1)
    assert holdings.close(0.0, 1, keep_weights=True)
    holdings.close_for_good(1.0, "w", 1, 0.0)
    holdings.closed("w", 1)
    assert holdings.closing() == {Held("w", 1)}
    holdings.closed("w", 1)
    assert not holdings.closing()
    holdings.close_for_good(2.0, "w", 2, 0.0)
    assert holdings.late(5.0, 3.0) == {"w"}
    holdings.closed("w", 2)
    assert not tuple(holdings)


def test_weights_are_let_go_where_the_install_fails() -> None:
    world = handing_world(Mode.PARK)
    world.slow.add("a")
    leave(world, "b")
    world.run(0.5)
    shift = world.control.shift
    assert shift is not None and shift.phase is Phase.INSTALL and shift.lingering
    kept, old = {worker for worker, _ in shift.lingering}, shift.epoch - 1
    world.log.clear()
    shift.fail(world.now, "for the test")
    world.run(0.2)
    told = {send.to for send in world.told(Retire) if send.message == Retire(epoch=old)}
    assert told == kept and not shift.lingering


def test_a_worker_that_dies_is_told_nothing_more() -> None:
    world = handing_world(Mode.PARK)
    world.slow.add("a")
    leave(world, "b", grace_s=60.0)
    world.run(0.5)
    shift = world.control.shift
    assert shift is not None and shift.phase is Phase.INSTALL
    dead = world.worker("b", 0)
    assert dead in {worker for worker, _ in shift.lingering}
    world.log.clear()
    world.kill_worker("b", 0)
    assert dead not in {worker for worker, _ in shift.lingering}
    shift.fail(world.now, "for the test")
    world.run(0.2)
    assert dead not in {send.to for send in world.told(Retire)}


def test_without_room_nothing_is_kept() -> None:
    world = shift_world(Mode.PARK)
    leave(world, "b")
    world.run(1)
    messages = [action.message for action in world.log if isinstance(action, Send)]
    assert not any(isinstance(one, Retire) and one.keep_weights for one in messages)
    assert {one.hand_over for one in messages if isinstance(one, Install)} == {0}


# --------------------------------------------------------------------------------- in a worker


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side]]:
    yield from two_sides()


def test_kept_weights_can_be_taken_until_they_are_let_go(sides: tuple[Side, Side]) -> None:
    one, two = sides
    piece = Piece("t", 0, 0, 10, 10, 40)
    one.store(1)
    one.arena.weights.open(1, "m")
    view = one.arena.weights.claim(1, piece, "w")
    with one.arena.weights.filling(view) as raw:
        raw.copy_(torch.arange(400) % 251)
    one.arena.weights.filled(view)
    assert one.transfers.close(1, 1.0)
    one.transfers.keep_weights(1, one.arena)
    assert one.transfers.kept == (1,)
    assert fetch(one, two, piece) == (torch.arange(400) % 251).tolist()
    assert one.transfers.let_go(1, 1.0)
    assert one.arena.weights_bytes == 0
    assert fetch(one, two, piece) is None, "nobody has them now"
    assert not one.transfers.let_go(1, 1.0)


def fetch(giver: Side, taker: Side, piece: Piece) -> list[int] | None:
    extent = taker.arena.take(piece.nbytes, "w")
    ranges = (PieceRange(piece.tensor, piece.dim, piece.lo, piece.hi, piece.nbytes),)

    def ask(spans: Ranges) -> AskWeights:
        return AskWeights(epoch=1, item_bytes=8, pieces=ranges, spans=spans)

    sink = WeightSink(taker.arena, ranges, [extent.data_start])
    address = ("127.0.0.1", giver.transfers.port)
    found = taker.transfers.fetcher.fetch(Job(address, ask, sink, float("inf"), Cancel()))
    data = None if found.left else taker.arena.bytes_of(extent).tolist()
    taker.arena.free([extent])
    return data


def test_a_stage_is_filled_in_turns_where_both_would_not_fit(tiny_model: Path) -> None:
    """From all layers to the second half, in an arena that cannot hold both."""
    info = check_model(tiny_model)
    shards = ShardMap(info, "float64", 4)
    whole, half = Holding(0, 6, 1, 0), Holding(3, 6, 1, 0)

    def plan(epoch: int, held: Holding) -> StagePlan:
        return StagePlan(str(tiny_model), epoch, held.lo, held.hi, 1, 0, "float64", 4, 2)

    pages = 2 * shards.block_bytes(whole)
    arena = Arena(aligned(shards.weights_bytes(whole) + pages))
    old = build_stage(plan(1, whole), arena)
    old.close(keep_weights=True)
    assert arena.weights_bytes == shards.weights_bytes(whole)
    met: list[str] = []
    handing = LayersInTurn(shards, arena, [1], 1, met.append)
    new = build_stage(plan(2, half), arena, hand_over=lambda: handing)
    assert met == [f"layers-{n}" for n in range(6)]
    assert arena.weights.used_by(1) == 0
    assert new.kept_bytes == sum(piece.nbytes for piece in shards.pieces(half))
    assert new.filled.read_bytes == 0, "all of it was here"
    new.close()
    assert arena.used_bytes == 0
