"""What a shift makes do again: whose KV, how much of it, and what that costs in tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_replica import make_request
from hypothesis import given
from hypothesis import strategies as st

from flexslurm.control.actions import PlanShift
from flexslurm.control.choices import ShiftPrice
from flexslurm.gear import Estimates, Gear, Replica, Signature, Stage
from flexslurm.head.redone import redone_tokens
from flexslurm.planner.layouts import replica_tokens_per_s
from flexslurm.planner.model_spec import ModelSpec
from flexslurm.planner.planner import Planner
from flexslurm.planner.problem import Problem, StageKind
from flexslurm.planner.published import config_of
from flexslurm.planner.recompute import RecomputeCost, gear_recompute_cost, recompute_cost
from flexslurm.planner.topology import Topology
from flexslurm.planner.workload import Goal, Workload
from tests.head_world import CONTEXT, HeadWorld
from tests.reshard_cases import BLOCK_TOKENS, LAYERS

ALL = Signature.parse("a:3")
COST = RecomputeCost(chunk_tokens=10, lost_tokens=3.0)


def gear(name: str, degrees: tuple[int, ...], blocks: int = 64) -> Gear:
    ends = [LAYERS * n // len(degrees) for n in range(len(degrees) + 1)]
    stages = tuple(Stage("a", tp, ends[n], ends[n + 1], blocks, 0) for n, tp in enumerate(degrees))
    made = (Replica(stages, 6, 20, CONTEXT),)
    return Gear(name, ALL, BLOCK_TOKENS, made, Estimates(100.0, 0.1, 0.01, 1000, 7.0))


ONE, PIPELINE, SMALL = gear("one", (1,)), gear("pipeline", (1, 1)), gear("small", (1, 1), blocks=6)


class Service(HeadWorld):
    """One node of three GPUs, some requests, and what shifts would cost."""

    def __init__(self) -> None:
        super().__init__(seed=5, memory_bytes=64 << 20)
        self.planner._known[ALL] = ONE
        self.join("f", 3)
        self.run_until(self.serves, 60)
        self.effects.moves._planner.recompute = lambda gear: COST

    def load(self, prompts: tuple[int, ...]) -> None:
        for number, prompt in enumerate(prompts):
            tokens = [(number * 7 + n) % 23 for n in range(prompt)]
            self.submit(make_request(f"r{number}", tokens, CONTEXT - prompt, seed=number))
        self.run(0.15)

    def ask(self, to: Gear) -> PlanShift:
        ask = self.control.preview(self.now, to)
        assert ask is not None
        return ask

    def price(self, ask: PlanShift) -> ShiftPrice:
        return self.effects.moves.price(ask)

    def held(self) -> dict[str, int]:
        drivers = self.effects.replicas.open.values()
        return {kv.seq_id: kv.computed for driver in drivers for kv in driver.running_kv()}

    def redone(self, ask: PlanShift) -> dict[str, int]:
        moves = self.effects.moves
        return redone_tokens(moves._planned(ask), moves._running(), BLOCK_TOKENS)


def test_what_moves_costs_no_recompute() -> None:
    world = Service()
    world.load((9, 9, 9))
    ask = world.ask(PIPELINE)
    assert world.redone(ask) == {}
    price = world.price(ask)
    assert (price.lost_tokens, price.redone) == (0.0, 0) and price.seconds > 0


def test_what_finds_no_room_is_recomputed_and_counts() -> None:
    world = Service()
    world.load((20, 20, 20, 20))
    ask, held = world.ask(SMALL), world.held()
    price, redone = world.price(ask), world.redone(ask)
    assert price.evicted and set(redone) == set(price.evicted)
    assert redone == {seq_id: held[seq_id] for seq_id in price.evicted}
    assert price.lost_tokens == sum(COST.of(tokens) for tokens in redone.values()) > 0
    assert price.redone == len(redone)


def test_where_nothing_can_be_moved_all_that_goes_counts_and_the_weights_are_read() -> None:
    world = Service()
    world.load((9, 9))
    ask = world.ask(PIPELINE)
    assert ask.old is not None
    [one] = ask.old.replicas.values()
    blind = replace(one, seats=tuple(seat._replace(data_port=0) for seat in one.seats))
    ask = replace(ask, old=replace(ask.old, replicas={0: blind}))
    price = world.price(ask)
    assert world.redone(ask) == world.held() and price.redone == 2
    assert price.seconds == PIPELINE.estimates.load_s and price.tokens_per_s == 0


def test_a_notice_that_is_too_short_leaves_what_is_not_moved_in_time() -> None:
    world = Service()
    world.load((20, 20, 20))
    ask = world.ask(PIPELINE)
    assert ask.old is not None
    workers = [w for one in ask.old.replicas.values() for w in one.workers]
    at_once = replace(ask, leaving_s=dict.fromkeys(workers, 0.0))
    enough = replace(ask, leaving_s=dict.fromkeys(workers, 1e6))
    assert world.redone(enough) == {}
    late, held = world.redone(at_once), world.held()
    assert late.keys() <= held.keys() and all(late[s] <= held[s] for s in late)
    assert world.price(at_once).lost_tokens >= world.price(enough).lost_tokens == 0
    assert late, "the half of the layers that moves cannot go in no time"


def test_without_anything_that_serves_there_is_nothing_to_lose() -> None:
    world = Service()
    world.load((9,))
    assert world.price(replace(world.ask(PIPELINE), old=None)) == ShiftPrice()


# ----------------------------------------------------------------------------------- what it costs

SPEC = ModelSpec.from_config(config_of("llama-3.1-8b"), name="llama-3.1-8b")
FIGURES = Topology.from_catalogue(("h100", "l4"))
GOAL = Goal(Workload(1000, 100))
POOL = Signature.parse("h100:2,l4:2")


def test_a_chunk_costs_what_the_step_is_longer() -> None:
    problem = Problem(SPEC, FIGURES, GOAL)
    planned = Planner(SPEC, FIGURES, GOAL, Signature.parse("h100:1")).plan(
        Signature.parse("h100:1")
    )
    assert isinstance(planned, Gear)
    [replica] = planned.replicas
    cost, kind = recompute_cost(problem, replica), StageKind("h100", 1)
    slots, layers = replica.max_batch, SPEC.num_layers
    longer = (
        problem.full_times(kind, slots)[0, layers] - problem.decode_times(kind, slots)[0, layers]
    )
    assert longer > 0
    assert cost.chunk_tokens == GOAL.limits.max_batch_tokens
    expected = replica_tokens_per_s(problem, replica) * longer + 1
    assert cost.lost_tokens == pytest.approx(expected)
    assert cost.of(0) == 0 and cost.of(1) == cost.of(512) == cost.of(513) / 2


def test_a_gears_cost_lies_between_those_of_its_replicas() -> None:
    planned = Planner(SPEC, FIGURES, GOAL, POOL).plan(POOL)
    assert isinstance(planned, Gear) and len(planned.replicas) > 1
    problem = Problem(SPEC, FIGURES, GOAL)
    each = [recompute_cost(problem, one).lost_tokens for one in planned.replicas]
    found = gear_recompute_cost(problem, planned).lost_tokens
    assert min(each) <= found <= max(each) and min(each) < max(each)


@given(st.integers(0, 10_000), st.integers(0, 10_000), st.integers(1, 900), st.floats(0, 1e6))
def test_more_to_recompute_never_costs_less(one: int, more: int, chunk: int, lost: float) -> None:
    cost = RecomputeCost(chunk, lost)
    assert cost.of(one) <= cost.of(one + more) <= cost.of(one) + cost.of(more) + 1e-6
