"""Cards with less memory than the site file says, or more: what is planned, used and said."""

from __future__ import annotations

import sys as python
from pathlib import Path

import pytest

from flexslurm.config.schema import parse_section
from flexslurm.config.service import Service
from flexslurm.config.site import GpuType, Site
from flexslurm.control.cards import Cards
from flexslurm.control.inventory import gpus_of_node
from flexslurm.control.members import AgentState, Members
from flexslurm.errors import EnvironmentFault
from flexslurm.gear import Gear, NoGear, Signature
from flexslurm.head.card_memory import memory_option, memory_to_plan_with, read_memory
from flexslurm.head.planning import ServicePlanner
from flexslurm.messages import PROTOCOL, AgentHello, GpuInfo
from flexslurm.planner.table import GearTable
from tests.fake_node import FakeNvml

GIB = 2**30
PROMISED = {"a100": 80 * GIB, "l40s": 48 * GIB}
SITE = """
name: test
gpu_types:
  a100: {memory: 900kB, virtual: {}}
  l40s: {memory: 700kB, virtual: {}}
"""


def hello(name: str, *memory: int, gpu_type: str = "a100") -> AgentHello:
    return AgentHello(
        protocol=PROTOCOL,
        incarnation=name,
        fragment=f"{gpu_type}-{name}",
        node=f"node-{name}",
        address="127.0.0.1",
        gpu_type=gpu_type,
        gpus=tuple(GpuInfo(i, size) for i, size in enumerate(memory)),
    )


def members(*hellos: AgentHello) -> Members:
    found = Members(PROMISED)
    for one in hellos:
        found.join(one, 0.0)
    return found


# ------------------------------------------------------------------------------- which are used


def test_cards_as_promised_or_with_more_change_nothing() -> None:
    found = members(hello("1", 80 * GIB, 96 * GIB), hello("2", 200 * GIB))
    assert found.cards() == Cards()
    assert len(found.usable()) == 2


def test_a_type_that_nothing_is_promised_of_is_taken_as_it_comes() -> None:
    found = members(hello("1", 1, gpu_type="t4"))
    assert found.cards() == Cards() and len(found.usable()) == 1


def test_where_all_are_a_little_short_all_are_used_with_what_the_smallest_has() -> None:
    found = members(hello("1", 80 * GIB, 78 * GIB), hello("2", 79 * GIB, 80 * GIB))
    cards = found.cards()
    assert cards.memory == {"a100": 78 * GIB} and cards.left_out == {}
    assert "GPU 1 of a100-1 on node-1 has 83,751,862,272 bytes" in cards.words
    assert f"{2 * GIB:,} less than the {80 * GIB:,} of a a100" in cards.words


def test_one_bad_card_does_not_make_all_others_small() -> None:
    found = members(hello("1", 80 * GIB), hello("2", 80 * GIB), hello("3", 80 * GIB, 10 * GIB))
    cards = found.cards()
    assert cards.memory == {} and list(cards.left_out) == ["3"]
    assert "GPU 1 of a100-3 on node-3 has 10,737,418,240 bytes" in cards.left_out["3"]
    assert [agent.id for agent in found.usable()] == ["1", "2"]
    found.drop("1")
    found.drop("2")
    assert found.cards().memory == {"a100": 10 * GIB}, "alone it is used as it is"
    assert [agent.id for agent in found.usable()] == ["3"]


def test_more_memory_than_promised_does_not_push_others_out() -> None:
    found = members(hello("1", 500 * GIB), hello("2", 80 * GIB), hello("3", 80 * GIB))
    assert len(found.usable()) == 3 and found.cards() == Cards()


def test_types_are_looked_at_each_for_itself() -> None:
    found = members(hello("1", 80 * GIB), hello("2", 40 * GIB, gpu_type="l40s"))
    assert found.cards().memory == {"l40s": 40 * GIB}


def test_what_must_leave_does_not_decide_for_what_stays() -> None:
    found = members(hello("1", 80 * GIB), hello("2", 80 * GIB), hello("3", 10 * GIB))
    for name in ("1", "2"):
        found.agents[name].state = AgentState.LEAVING
    assert found.cards().memory == {"a100": 10 * GIB}
    assert [agent.id for agent in found.usable()] == ["3"]
    assert len(found.usable(leaving=True)) == 3
    found.cordoned.add("a100-3")
    assert found.cards().memory == {}, "nothing that can be used is short"


def test_many_nodes_are_told_by_a_few() -> None:
    found = members(*(hello(str(n), 79 * GIB) for n in range(9)))
    assert found.cards().words.endswith("and 6 more nodes")


# ------------------------------------------------------------------------- what is planned with


def test_up_to_a_hundredth_less_is_not_planned_anew() -> None:
    promised = {"a100": 1000, "l40s": 1000}
    assert memory_to_plan_with({"a100": 990, "l40s": 989}, promised) == {"l40s": 980}
    assert memory_to_plan_with({"a100": 0}, promised) == {"a100": 0}


def test_memory_goes_to_the_planning_process_and_back() -> None:
    memory = {"a100": 5, "b=c": 7}
    options = memory_option(memory)
    assert read_memory([option.removeprefix("--memory=") for option in options]) == memory


# ------------------------------------------------------------------------------------ the planner


@pytest.fixture
def service(tiny_model: Path) -> Service:
    text = f"""
name: tiny
model: {{path: {tiny_model}, dtype: float64, name: tiny}}
pool: [{{gpu_type: a100, gpus: 2, count: 2}}, {{gpu_type: l40s, gpus: 2, nodes: 2}}]
serving: {{block_tokens: 16, max_batch: 16, max_batch_tokens: 64, max_context: 512}}
workload: {{prompt_tokens: 32, output_tokens: 32}}
"""
    return parse_section(Service, text, "service.yaml")


@pytest.fixture
def site() -> Site:
    return parse_section(Site, SITE, "site.yaml")


def fits(planner: ServicePlanner, gear: Gear, memory: dict[str, int]) -> bool:
    """Whether weights and KV of every rank fit, counted anew."""
    spec, limits = planner.spec, planner.goal.limits
    page = spec.page_bytes(limits.block_tokens)
    return all(
        spec.stage_weight_bytes(s.lo, s.hi, s.tp, rank)
        + s.kv_blocks * s.layers * spec.kv_heads_on(s.tp, rank) * page
        <= limits.arena_bytes(memory[s.gpu_type])
        for replica in gear.replicas
        for s in replica.stages
        for rank in range(s.tp)
    )


def test_gears_are_cut_at_once_and_planned_anew_beside(service: Service, site: Site) -> None:
    asked: list[Signature] = []
    told: list[str] = []
    planner = ServicePlanner(service, site, asked.append)
    planner.on_other_memory = lambda: told.append("other")
    planner.book.use(GearTable(planner.make_table(lambda *_: None)))
    full = Signature.parse("a100:2x2,l40s:2x2")
    before = planner.choose(full)
    less = {"a100": 800_000, "l40s": 700_000}
    planner.meet(Cards({"a100": 800_000}, "GPU 0 of a100-1 has less"))
    assert told == ["other"] and planner.planned_memory == {"a100": 792_000}
    cut = planner.choose(full)
    assert isinstance(before, Gear) and isinstance(cut, Gear) and asked == []
    assert not fits(planner, before, less) and fits(planner, cut, less)
    assert cut.layout() == before.layout() and cut.reason.endswith("really have")
    assert cut.estimates.kv_tokens < before.estimates.kv_tokens

    table = GearTable(planner.make_table(lambda *_: None))
    planner.book.use(table)
    planned = planner.choose(full)
    assert (
        isinstance(planned, Gear) and planned == table.gear(full) and fits(planner, planned, less)
    )
    exact = ServicePlanner(service, site, memory=planner.planned_memory).exact(full)
    assert exact == planned, "the planning process comes to the same"
    planner.meet(Cards())
    assert told == ["other", "other"] and planner.planned_memory == {}


def test_a_gear_that_cannot_be_cut_is_asked_for(service: Service, site: Site) -> None:
    asked: list[Signature] = []
    planner = ServicePlanner(service, site, asked.append)
    planner.book.use(GearTable(planner.make_table(lambda *_: None)))
    one = Signature.parse("a100:2x2")
    before = planner.choose(one)
    assert isinstance(before, Gear)
    # replicas of two cards do not fit any more, one of all four does
    planner.meet(Cards({"a100": 500_000}, "GPU 0 of a100-1 has less"))
    assert isinstance(planner.choose(one), NoGear) and asked == [one]
    answer = ServicePlanner(service, site, memory=planner.planned_memory).exact(one)
    assert isinstance(answer, Gear)
    planner.book.learn(one, answer)
    assert planner.choose(one) == answer and fits(planner, answer, {"a100": 500_000})


def test_an_answer_for_cards_that_are_gone_is_asked_for_again(service: Service, site: Site) -> None:
    asked: list[Signature] = []
    planner = ServicePlanner(service, site, asked.append)
    one = Signature.parse("a100:2x2")
    planner.choose(one)
    late = planner.exact(one)
    planner.meet(Cards({"a100": 500_000}, "less"))
    planner.book.learn(one, late)
    assert isinstance(planner.choose(one), NoGear) and asked == [one, one]


def test_where_nothing_fits_the_card_and_the_bytes_are_named(service: Service, site: Site) -> None:
    planner = ServicePlanner(service, site)
    found = Members(planner.promised)
    found.join(hello("1", 50_000, 900_000), 0.0)
    planner.meet(found.cards())
    answer = planner.choose(Signature.parse("a100:2"))
    assert isinstance(answer, NoGear) and answer.short_bytes > 0
    assert f"{answer.short_bytes:,} bytes short" in answer.reason
    assert "GPU 0 of a100-1 on node-1 has 50,000 bytes, 850,000 less" in answer.reason


def test_a_hundredth_less_cuts_but_plans_nothing(service: Service, site: Site) -> None:
    told: list[str] = []
    planner = ServicePlanner(service, site)
    planner.on_other_memory = lambda: told.append("other")
    planner.book.use(GearTable(planner.make_table(lambda *_: None)))
    planner.meet(Cards({"a100": 895_000}, "a little less"))
    gear = planner.choose(Signature.parse("a100:2x2"))
    assert told == [] and isinstance(gear, Gear) and fits(planner, gear, {"a100": 895_000})


# -------------------------------------------------------------------------------- the inventory


def test_what_others_hold_of_a_card_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeNvml(
        {"uuid": "GPU-a", "memory": 80 * GIB, "used": GIB},
        {"uuid": "GPU-b", "memory": 80 * GIB, "used": 30 * GIB},
    )
    monkeypatch.setitem(python.modules, "pynvml", driver)  # type: ignore[arg-type]
    waits: list[float] = []
    found = gpus_of_node("a100", GpuType(), 2, {}, sleep=waits.append)
    assert [gpu.memory_bytes for gpu in found] == [80 * GIB, 50 * GIB]
    assert waits == [1.0] * 10, "what a job before us held may take a moment to be free"


def test_what_is_freed_while_we_wait_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    card = {"uuid": "GPU-a", "memory": 80 * GIB, "used": 79 * GIB}
    monkeypatch.setitem(python.modules, "pynvml", FakeNvml(card))  # type: ignore[arg-type]
    (found,) = gpus_of_node("a100", GpuType(), 1, {}, sleep=lambda _: card.update(used=0))
    assert found.memory_bytes == 80 * GIB


def test_a_virtual_card_can_be_made_to_have_less() -> None:
    virtual = GpuType.model_validate({"memory": "1MiB", "virtual": {}})
    env = {"FLEXSLURM_VIRTUAL_MEMORY": "b-1=5, b-2=9999999999"}
    sizes = [
        gpus_of_node("b", virtual, 1, env, fragment=f"b-{n}")[0].memory_bytes for n in (1, 2, 3)
    ]
    assert sizes == [5, 2**20, 2**20]
    with pytest.raises(EnvironmentFault, match="cannot read 'b-1=much'"):
        gpus_of_node("b", virtual, 1, {"FLEXSLURM_VIRTUAL_MEMORY": "b-1=much"}, fragment="b-1")
