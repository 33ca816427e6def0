"""Gears that leave replicas as they are: what stays, what is added, and when they are gone to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexslurm.config.schema import parse_section
from flexslurm.config.service import Service
from flexslurm.config.site import Site
from flexslurm.control.choices import PolicySettings, ShiftPrice
from flexslurm.control.installed import InstalledGear, InstalledReplica, ReplicaKey, SeatedWorker
from flexslurm.control.members import AgentRecord, GpuAt
from flexslurm.control.preview import kept_replicas
from flexslurm.gear import Gear, Replica, Shape, Signature, check_gear, replica_slots
from flexslurm.head.planning import ServicePlanner
from flexslurm.messages import PROTOCOL, AgentHello, GpuInfo
from flexslurm.planner.keeping import KeptReplica, keeping_gear
from flexslurm.planner.model_spec import ModelSpec
from flexslurm.planner.placement import bare_replica
from flexslurm.planner.planner import Planner
from flexslurm.planner.published import config_of
from flexslurm.planner.table import GearTable
from flexslurm.planner.topology import Topology
from flexslurm.planner.workload import Goal, Workload
from tests.unit.control_world import World
from tests.unit.measured_world import SAFE, Table, gear, installed

SPEC = ModelSpec.from_config(config_of("llama-3.1-8b"), name="llama-3.1-8b")
GOAL = Goal(Workload(500, 100))


@cache
def planned(text: str) -> Gear | None:
    signature = Signature.parse(text)
    names = tuple(sorted({shape.gpu_type for shape, _ in signature.counts}))
    found = Planner(SPEC, Topology.from_catalogue(names), GOAL, signature).plan(signature)
    return found if isinstance(found, Gear) else None


def look_up(signature: Signature) -> Gear | None:
    return planned(str(signature))


def physical(signature: Signature) -> dict[str, Shape]:
    return {f"n{number}": shape for number, shape in enumerate(signature.nodes())}


def kept_of(current: Gear, numbers: Sequence[int]) -> list[KeptReplica]:
    each = current.estimates.tokens_per_s / len(current.replicas)
    return [
        KeptReplica(one, tuple(f"n{stage.node}" for stage in one.stages), each)
        for one in (current.replicas[n] for n in numbers)
    ]


SHAPES = st.lists(
    st.sampled_from([Shape("l4", 1), Shape("a10", 2), Shape("a10", 1), Shape("t4", 2)]),
    min_size=1, max_size=4,
)  # fmt: skip


@settings(max_examples=15, deadline=None)
@given(SHAPES, SHAPES, st.data())
def test_what_is_kept_stays_where_it_is_and_the_rest_is_planned(
    before: list[Shape], more: list[Shape], data: st.DataObject
) -> None:
    signature = Signature.of(before)
    current = look_up(signature)
    if current is None:
        return
    chosen = data.draw(st.sets(st.sampled_from(range(len(current.replicas)))))
    nodes = physical(signature) | {f"x{i}": shape for i, shape in enumerate(more)}
    kept = kept_of(current, sorted(chosen))
    found = keeping_gear(current, kept, nodes, look_up)
    if not kept:
        assert found is None
        return
    if found is None:
        assert len(kept) == len(current.replicas)
        return
    check_gear(found, SPEC.num_layers)
    assert found.signature == Signature.of(nodes.values()) and found.name == found.layout()
    ours = [bare_replica(one.replica) for one in kept]
    assert [bare_replica(one) for one in found.replicas[: len(kept)]] == ours
    # stages that were on one node are on one node, and others are not
    for one, old in zip(found.replicas, kept, strict=False):
        pairs = {(stage.node, name) for stage, name in zip(one.stages, old.nodes, strict=True)}
        assert len(pairs) == len({n for n, _ in pairs}) == len({name for _, name in pairs})
    assert found.estimates.tokens_per_s >= sum(one.tokens_per_s for one in kept) * (1 - 1e-9)


def test_new_gpus_get_the_best_gear_of_their_own() -> None:
    current = look_up(Signature.parse("l4:1"))
    assert current is not None
    nodes = {"n0": Shape("l4", 1), "n1": Shape("l4", 1), "n2": Shape("a10", 2)}
    found = keeping_gear(current, kept_of(current, [0]), nodes, look_up)
    rest = look_up(Signature.parse("a10:2,l4:1"))
    assert found is not None and rest is not None
    both = current.estimates.tokens_per_s + rest.estimates.tokens_per_s
    assert found.estimates.tokens_per_s == pytest.approx(both)
    assert found.reason == "leaves 1 of 1 replicas as they are"
    assert len(found.replicas) == 1 + len(rest.replicas)
    times = sorted((current.estimates.tpot_s, rest.estimates.tpot_s))
    assert times[0] <= found.estimates.tpot_s <= times[1]
    assert found.estimates.kv_tokens == current.estimates.kv_tokens + rest.estimates.kv_tokens


def test_what_is_left_of_a_node_counts_where_its_gear_is_known() -> None:
    current = look_up(Signature.parse("a10:1"))
    assert current is not None
    nodes = {"n0": Shape("a10", 3), "n1": Shape("a10", 2)}
    found = keeping_gear(current, kept_of(current, [0]), nodes, look_up)
    assert found is not None and found.gpus == 5
    alone = keeping_gear(
        current, kept_of(current, [0]), nodes,
        lambda s: look_up(s) if str(s) == "a10:2" else None,
    )  # fmt: skip
    assert alone is not None and alone.gpus == 3, "of the other node alone something is known"
    assert keeping_gear(current, kept_of(current, [0]), nodes, lambda s: None) is None


# ------------------------------------------------------------------------------- by the service

SITE = """
name: test
gpu_types:
  a100: {memory: 8MB, virtual: {}}
  l40s: {memory: 8MB, virtual: {}}
"""


@pytest.fixture(scope="module")
def planner(tiny_model: Path) -> ServicePlanner:
    text = f"""
name: tiny
model: {{path: {tiny_model}, dtype: float64, name: tiny}}
pool: [{{gpu_type: a100, gpus: 1, count: 3}}, {{gpu_type: l40s, gpus: 1}}]
serving: {{block_tokens: 16, max_batch: 16, max_batch_tokens: 64, max_context: 512}}
workload: {{prompt_tokens: 32, output_tokens: 32}}
"""
    made = ServicePlanner(
        parse_section(Service, text, "service.yaml"), parse_section(Site, SITE, "site.yaml")
    )
    made.book.use(GearTable(made.make_table(lambda *_: None)))
    return made


def agents(*types: str) -> list[AgentRecord]:
    return [
        AgentRecord(
            AgentHello(
                protocol=PROTOCOL, incarnation=f"p{n}", fragment=f"p{n}", node=f"node{n}",
                address="127.0.0.1", gpu_type=kind, gpus=(GpuInfo(0, 8_000_000),),
            ),
            0.0,
        )
        for n, kind in enumerate(types)
    ]  # fmt: skip


def in_place(gear: Gear, numbers: Sequence[int] | None = None) -> InstalledGear:
    """Stage by stage on nodes of one GPU, in the order of the signature's."""
    replicas = {}
    for number, one in enumerate(gear.replicas):
        seats = tuple(
            SeatedWorker(GpuAt(f"p{one.stages[slot.stage].node}", 0), f"w{slot}", "n", "a", 1)
            for slot in replica_slots(one, number)
        )
        replicas[number] = InstalledReplica(ReplicaKey(1, number), one, seats)
    left = replicas if numbers is None else {n: replicas[n] for n in numbers}
    return InstalledGear(gear, left)


def test_the_service_offers_what_is_cheap_to_reach_and_the_next_best(
    planner: ServicePlanner,
) -> None:
    two = planner.choose(Signature.parse("a100:1x2"))
    assert isinstance(two, Gear)
    here = agents("a100", "a100", "a100", "l40s")
    offered = planner.others(here, in_place(two))
    best = planner.choose(Signature.parse("a100:1x3,l40s:1"))
    assert isinstance(best, Gear) and offered
    assert "as they are" in offered[0].reason
    mine = [bare_replica(one) for one in two.replicas]
    assert [bare_replica(one) for one in offered[0].replicas[: len(mine)]] == mine
    assert all("next best by estimate" in one.reason for one in offered[1:])
    for one in offered:
        check_gear(one, planner.spec.num_layers)
        assert one.estimates.tokens_per_s <= best.estimates.tokens_per_s * (1 + 1e-6)


def test_placed_it_touches_none_of_the_replicas_that_stay(planner: ServicePlanner) -> None:
    """Wherever they are: the nodes' numbers in the gear say nothing of where its replicas are."""
    two = planner.choose(Signature.parse("a100:1x2"))
    assert isinstance(two, Gear) and len(two.replicas) == 2
    here = agents("l40s", "a100", "a100", "a100")
    moved = [
        replace(one, seats=tuple(s._replace(at=GpuAt(f"p{3 - n}", 0)) for s in one.seats))
        for n, one in sorted(in_place(two).replicas.items())
    ]
    current = InstalledGear(two, dict(enumerate(moved)))
    offered = planner.others(here, current)[0]
    placement = planner.place(offered, here, current)
    assert kept_replicas(current, offered, placement) == {0: moved[0], 1: moved[1]}
    assert len(offered.replicas) > 2
    assert {at.agent for at in placement.values()} == {"p0", "p1", "p2", "p3"}


def test_after_a_loss_only_what_keeps_the_others_is_offered(planner: ServicePlanner) -> None:
    three = planner.choose(Signature.parse("a100:1x3"))
    assert isinstance(three, Gear) and len(three.replicas) == 3
    [offered] = planner.others(agents("a100", "a100"), in_place(three, [0, 1]))
    assert [bare_replica(one) for one in offered.replicas] == [
        bare_replica(one) for one in three.replicas[:2]
    ]
    assert planner.others(agents("a100"), None) == planner.book.others(Signature.parse("a100:1"))


# -------------------------------------------------------------------------------- as decided

KEEPS = gear("a100:2,l40s:2", 1400.0, "keeps")


class Offers(Table):
    """A table with another gear that is offered besides the best."""

    more: tuple[Gear, ...] = ()

    def others(
        self, agents: Sequence[AgentRecord], current: InstalledGear | None
    ) -> Sequence[Gear]:
        held = Signature.of(Shape(a.hello.gpu_type, len(a.hello.gpus)) for a in agents)
        return [one for one in self.more if held.covers(one.signature)]


@pytest.mark.parametrize(("seconds", "wanted"), [(5.0, "a100:2,l40s:2"), (500.0, "keeps")])
def test_the_gear_that_is_cheaper_to_reach_is_taken_where_that_is_worth_it(
    seconds: float, wanted: str
) -> None:
    """A pilot comes for an hour; the best gear for it stops the service for a while."""
    other = msgspec.structs.replace(KEEPS, reason="leaves 1 of 1 replicas as they are")
    best = gear("a100:2,l40s:2", 1500.0)
    prices = {"a100:2,l40s:2": ShiftPrice(seconds, 0.0), "keeps": ShiftPrice(5.0, 900.0)}
    table = Offers({"a100:2": SAFE, "a100:2,l40s:2": best}, prices=prices)
    table.more = (other,)
    world = World(planner=table, policy=PolicySettings(0.0, 1.3))
    world.join("a")
    world.run(3)
    assert installed(world) == "a100:2"
    world.join("b", "l40s", 2)
    world.run(3)
    assert installed(world) == wanted
    why = world.control.history[-1].why
    assert ("keeps (leaves 1 of 1 replicas as they are) is estimated at" in why) == (
        wanted == "keeps"
    )


def test_one_that_is_no_better_is_not_gone_to_even_where_no_gain_is_asked_for() -> None:
    best, twin = gear("a100:2", 1000.0), gear("a100:2", 1000.0, "twin")
    other = Replica(twin.replicas[0].stages, 999, 64, 256)
    table = Offers({"a100:2": best})
    table.more = (msgspec.structs.replace(twin, replicas=(other,), reason="next best"),)
    world = World(planner=table, policy=PolicySettings(0.0, 1.0))
    world.join("a")
    world.measure(1300, 900.0, waiting=9)
    assert installed(world) == "a100:2" and len(world.control.history) == 1
    assert world.control.reason.startswith("a100:2 is the best gear for this allocation (")
