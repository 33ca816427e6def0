"""Gears at run time: exact ones from the table, stand-ins at once, and what is planned beside."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from flexslurm.config.schema import parse_section
from flexslurm.config.service import Service
from flexslurm.config.site import Site
from flexslurm.errors import ConfigError
from flexslurm.gear import Gear, NoGear, Signature
from flexslurm.head import gear_tables
from flexslurm.head.gear_book import MOST_ASKED, GearBook
from flexslurm.head.gear_tables import entries, full_pool, pilot_kinds, selections
from flexslurm.head.moves import MovePlanner
from flexslurm.head.plan_worker import Answer, PlanWorker
from flexslurm.head.planning import ServicePlanner, check_plans, plan_name
from flexslurm.planner.table import GearTable
from flexslurm.wire.service_dir import ServiceDir

SITE = """
name: test
gpu_types:
  a100: {memory: 900kB, virtual: {}}
  l40s: {memory: 700kB, virtual: {}}
  toy: {memory: 1kB, virtual: {}}
"""
POOL = "[{gpu_type: a100, gpus: 2, count: 2}, {gpu_type: l40s, gpus: 2, nodes: 2}]"


def service(model: Path, pool: str = POOL, more: str = "") -> Service:
    text = f"""
name: tiny
model: {{path: {model}, dtype: float64, name: tiny}}
pool: {pool}
serving: {{block_tokens: 16, max_batch: 16, max_batch_tokens: 64, max_context: 512}}
workload: {{prompt_tokens: 32, output_tokens: 32}}
{more}"""
    return parse_section(Service, text, "service.yaml")


@pytest.fixture(scope="module")
def site() -> Site:
    return parse_section(Site, SITE, "site.yaml")


@pytest.fixture(scope="module")
def table(tiny_model: Path, site: Site) -> GearTable:
    return GearTable(ServicePlanner(service(tiny_model), site).make_table(lambda *_: None))


def sig(text: str) -> Signature:
    return Signature.parse(text)


# --------------------------------------------------------------------------------- the book


def test_allocations_of_the_pool_are_looked_up_and_nothing_is_asked(table: GearTable) -> None:
    asked: list[Signature] = []
    book = GearBook(asked.append)
    book.use(table)
    for signature in table.signatures():
        assert book.choose(signature) == table.gear(signature)
    assert asked == []


def test_looking_up_again_takes_microseconds(table: GearTable) -> None:
    book = GearBook(lambda signature: None)
    book.use(table)
    signature = sig("a100:2x2,l40s:2x2")
    book.choose(signature)
    times = []
    for _ in range(200):
        started = time.perf_counter()
        book.choose(signature)
        times.append(time.perf_counter() - started)
    assert min(times) < 50e-6  # whatever else this machine does


def test_what_the_table_lacks_gets_a_stand_in_at_once_and_is_asked_for_once(
    table: GearTable,
) -> None:
    asked: list[Signature] = []
    book = GearBook(asked.append)
    book.use(table)
    more = sig("a100:2x3,l40s:2x2")
    stand_in = book.choose(more)
    assert isinstance(stand_in, Gear) and more.covers(stand_in.signature)
    assert stand_in == table.gear(sig("a100:2x2,l40s:2x2"))
    assert book.choose(more) is stand_in and asked == [more]
    exact = NoGear(more, "planned")
    book.learn(more, exact)
    assert book.choose(more) is exact and asked == [more]


def test_without_a_table_it_says_that_the_gear_is_being_planned() -> None:
    book = GearBook(lambda signature: None)
    found = book.choose(sig("a100:2"))
    assert isinstance(found, NoGear) and "still being planned" in found.reason
    book.learn(sig("a100:2"), None)
    failed = book.choose(sig("a100:2"))
    assert isinstance(failed, NoGear) and "could not be planned" in failed.reason


def test_a_stand_in_stays_where_planning_failed(table: GearTable) -> None:
    asked: list[Signature] = []
    book = GearBook(asked.append)
    book.use(table)
    stand_in = book.choose(sig("a100:2x5"))
    book.learn(sig("a100:2x5"), None)
    assert book.choose(sig("a100:2x5")) == stand_in and len(asked) == 1


def test_questions_have_a_bound() -> None:
    asked: list[Signature] = []
    book = GearBook(asked.append)
    for count in range(1, 3 * MOST_ASKED):
        book.choose(sig(f"a100:1x{count}"))
    assert len(asked) == MOST_ASKED
    book.learn(asked[0], None)
    book.choose(sig(f"a100:1x{3 * MOST_ASKED}"))
    assert len(asked) == MOST_ASKED + 1


# --------------------------------------------------------------------------------- the tables


def test_the_table_has_the_allocations_of_whole_pilots(table: GearTable) -> None:
    assert table.header.pool == sig("a100:2x2,l40s:2x2")
    assert len(table) == 6  # 0 to 2 pilots of one node, 0 or 1 of two
    assert table.find(sig("l40s:2")) is None and table.find(sig("l40s:2x2")) is not None


def test_like_pilots_in_two_entries_are_of_one_kind(tiny_model: Path) -> None:
    twice = service(tiny_model, "[{gpu_type: a100, gpus: 2}, {gpu_type: a100, gpus: 2, count: 3}]")
    kinds = pilot_kinds(twice)
    assert [(str(kind.nodes), kind.count) for kind in kinds] == [("a100:2", 4)]
    assert full_pool(twice) == sig("a100:2x4")


def test_a_large_pool_gets_its_neighbourhood(tiny_model: Path) -> None:
    pool = ", ".join(f"{{gpu_type: t{i}, gpus: 8, count: 50}}" for i in range(3))
    kinds = pilot_kinds(service(tiny_model, f"[{pool}]"))
    chosen = list(selections(kinds, 10_000))
    assert entries(kinds) == 51**3
    assert [entries(some) for some in chosen] == [2 * 3**3, 2 * 2**3, 2]
    for some in chosen:
        assert gear_tables._all_of(some) == sig("t0:8x50,t1:8x50,t2:8x50")
    assert entries(next(selections(kinds, 200_000))) == 51**3


def test_a_table_that_takes_too_long_becomes_a_smaller_one(tiny_model: Path, site: Site) -> None:
    wide = service(tiny_model, "[{gpu_type: a100, gpus: 2, count: 300}]")
    planner = ServicePlanner(wide, site)
    clock = iter(range(1_000_000))

    def slow() -> float:
        return 100.0 * next(clock)

    engine = gear_tables.Planner(
        planner.spec, planner.topology, planner.goal, full_pool(wide), acted={}
    )
    data = gear_tables.make_service_table(
        engine, pilot_kinds(wide), lambda done, total: None, most_s=60.0, now=slow
    )
    found = GearTable(data)
    assert len(found) == 6  # 0 to 2 pilots, and as many less than all
    assert isinstance(found.gear(sig("a100:2x298")), Gear)


# --------------------------------------------------------------------------------- the service


def test_a_table_is_used_only_for_what_it_was_made_for(
    tiny_model: Path, site: Site, tmp_path: Path
) -> None:
    path = tmp_path / "gears.table"
    planner = ServicePlanner(service(tiny_model), site)
    assert planner.fitting_table(path) == (None, "there is no gear table")
    path.write_bytes(planner.make_table(lambda *_: None))
    found, why_not = planner.fitting_table(path)
    assert found is not None and why_not == ""
    for other in (
        service(tiny_model, "[{gpu_type: a100, gpus: 2, count: 2}]"),
        service(tiny_model, more="slo: {tpot: 50ms}"),
        service(tiny_model, POOL.replace("nodes: 2", "count: 2")),
    ):
        found, why_not = ServicePlanner(other, site).fitting_table(path)
        assert found is None and "was made for another" in why_not
    path.write_bytes(path.read_bytes()[:-7])
    found, why_not = planner.fitting_table(path)
    assert found is None and "cut short" in why_not


def test_what_cannot_hold_the_model_is_not_planned_for(tiny_model: Path, site: Site) -> None:
    asked: list[Signature] = []
    planner = ServicePlanner(service(tiny_model), site, asked.append)
    short = planner.choose(sig("toy:1x3"))
    assert isinstance(short, NoGear) and short.short_bytes > 0
    nothing = planner.choose(Signature())
    assert isinstance(nothing, NoGear) and "there are no GPUs" in nothing.reason
    assert asked == []


def test_looking_asks_nobody(tiny_model: Path, site: Site, table: GearTable) -> None:
    asked: list[Signature] = []
    planner = ServicePlanner(service(tiny_model), site, asked.append)
    planner.book.use(table)
    assert planner.look(sig("a100:2x3")) is None and asked == []
    assert planner.look(sig("a100:2x2")) == table.gear(sig("a100:2x2"))
    short = planner.look(sig("toy:1x3"))
    assert isinstance(short, NoGear) and short.short_bytes > 0
    assert isinstance(planner.choose(sig("a100:2x3")), Gear) and asked == [sig("a100:2x3")]
    assert planner.look(sig("a100:2x3")) is None, "a stand-in is not what is known"


def test_the_service_looks_up_in_microseconds(
    tiny_model: Path, site: Site, table: GearTable
) -> None:
    planner = ServicePlanner(service(tiny_model), site)
    planner.book.use(table)
    planner.choose(sig("a100:2x2,l40s:2x2"))
    times = []
    for _ in range(200):
        started = time.perf_counter()
        planner.choose(table.header.pool)
        times.append(time.perf_counter() - started)
    assert min(times) < 50e-6


PLANS = "scheduling: {plans: ['l40s:2x2,a100:2'], fallback_plan: 'a100:2x2'}"


def test_plans_of_the_service_file_are_allocations_of_the_table(
    tiny_model: Path, site: Site, table: GearTable
) -> None:
    named = service(tiny_model, more=PLANS)
    check_plans(named, table)
    planner = ServicePlanner(named, site)
    planner.book.use(table)
    assert plan_name("l40s:2x2,a100:2") == "a100:2,l40s:2x2"
    names = [gear.name for gear in planner.options(sig("a100:2x2,l40s:2x2"))]
    assert names == ["a100:2,l40s:2x2", "a100:2x2"]
    assert [gear.name for gear in planner.options(sig("a100:2x2"))] == ["a100:2x2"]


@pytest.mark.parametrize(
    ("plans", "message"),
    [
        ("{default_plan: 'h100:8'}", "scheduling.default_plan: 'h100:8' is not an allocation"),
        ("{fallback_plan: fast}", "cannot read the pool item 'fast'"),
        ("{plans: ['a100:2x0']}", "plans"),
    ],
)
def test_a_plan_that_there_is_not_is_told_before_anything_is_submitted(
    tiny_model: Path, table: GearTable, plans: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_plans(service(tiny_model, more=f"scheduling: {plans}"), table)


def test_the_moves_know_what_computing_kv_anew_costs(tiny_model: Path, site: Site) -> None:
    planner = ServicePlanner(service(tiny_model), site)
    gear = planner.exact(sig("a100:2,l40s:2x2"))
    assert isinstance(gear, Gear)
    cost = MovePlanner.of(planner).recompute(gear)
    assert cost.chunk_tokens == 32, "a prompt of the workload fits into one step"
    assert cost.lost_tokens > 1


# ---------------------------------------------------------------------------- planned beside


@pytest.mark.cluster
def test_gears_and_the_table_are_planned_by_a_process_beside(
    tiny_model: Path, site: Site, tmp_path: Path
) -> None:
    directory, wanted = ServiceDir(tmp_path), service(tiny_model)
    directory.service.write_text(wanted.model_dump_json())
    directory.site.write_text(site.model_dump_json())
    answers: dict[Signature | None, Answer] = {}
    turns = 0

    async def run() -> None:
        nonlocal turns
        worker = PlanWorker(tmp_path)
        task = asyncio.create_task(worker.run(answers.__setitem__))
        for signature in (None, sig("a100:2x3"), sig("toy:1"), sig("a100:2x3")):
            worker.ask(signature)
        async with asyncio.timeout(200):
            while len(answers) < 3:
                await asyncio.sleep(0.005)
                turns += 1
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())
    planner = ServicePlanner(wanted, site)
    assert answers[sig("a100:2x3")] == planner.exact(sig("a100:2x3"))
    assert isinstance(answers[sig("toy:1")], NoGear)
    assert planner.fitting_table(directory.gears)[0] is not None
    assert turns > 20  # the loop went on meanwhile


@pytest.mark.cluster
def test_planning_that_fails_is_told_as_no_answer(tmp_path: Path) -> None:
    answers: dict[Signature | None, Answer] = {}

    async def run() -> None:
        worker = PlanWorker(tmp_path / "nothing here")
        task = asyncio.create_task(worker.run(answers.__setitem__))
        worker.ask(sig("a100:2"))
        async with asyncio.timeout(200):
            while not answers:
                await asyncio.sleep(0.005)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())
    assert answers == {sig("a100:2"): None}


def test_a_gear_that_does_not_fit_the_cards_is_not_planned_without_end(table: GearTable) -> None:
    asked: list[Signature] = []
    book = GearBook(asked.append, lambda gear: None)
    signature, gear = sig("a100:2"), table.gear(sig("a100:2"))
    assert isinstance(gear, Gear)
    for _ in range(3):
        found = book.choose(signature)
        book.learn(signature, gear)
    found = book.choose(signature)
    assert isinstance(found, NoGear) and "does not fit the memory" in found.reason
    assert asked == [signature]
    book.forget()  # there are other cards
    book.choose(signature)
    assert asked == [signature, signature]
