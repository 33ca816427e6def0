"""Gear tables: what is written is found, quickly; damaged ones are refused; byte for byte."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import msgspec
import pytest

from flexslurm.errors import ConfigError
from flexslurm.gear import Gear, NoGear, Shape, Signature, Stage, check_gear
from flexslurm.planner.columns import Column, key_worth
from flexslurm.planner.files import open_table
from flexslurm.planner.hashing import inputs_hash
from flexslurm.planner.integer import Programme
from flexslurm.planner.model_spec import ModelSpec
from flexslurm.planner.planner import Planner
from flexslurm.planner.problem import Tier
from flexslurm.planner.published import config_of
from flexslurm.planner.table import (
    GearTable,
    Header,
    OtherPlan,
    TableEntry,
    TablePipeline,
    encode,
)
from flexslurm.planner.tabulate import OTHER_SHARE, PilotKind, make_table, pilots_of
from flexslurm.planner.topology import Topology
from flexslurm.planner.workload import Goal, Slo, Workload

SPEC = ModelSpec.from_config(config_of("llama-3.1-8b"), name="llama-3.1-8b")
FIGURES = Topology.from_catalogue(("l4", "a10", "t4"))
GOAL = Goal(Workload(500, 100))
POOL = Signature.parse("a10:2x2,l4:1x3,t4:3x1")


def planner(pool: Signature = POOL, goal: Goal = GOAL) -> Planner:
    return Planner(SPEC, FIGURES, goal, pool)


@pytest.fixture(scope="module")
def data() -> bytes:
    return make_table(planner(), pilots_of(POOL))


def test_every_allocation_is_in_it(data: bytes) -> None:
    table, live = GearTable(data), planner()
    assert len(table) == 3 * 4 * 2
    for signature in table.signatures():
        found, expected = table.gear(signature), live.plan(signature)
        assert found == expected
        if isinstance(found, Gear):
            check_gear(found, SPEC.num_layers)
    assert table.header.model == "llama-3.1-8b"
    assert table.header.inputs == inputs_hash(SPEC, FIGURES, GOAL, POOL)


def test_the_same_inputs_give_the_same_bytes(data: bytes) -> None:
    assert make_table(planner(), pilots_of(POOL)) == data


def test_other_inputs_have_another_hash() -> None:
    hashes = {
        inputs_hash(SPEC, FIGURES, GOAL, POOL),
        inputs_hash(SPEC, FIGURES, Goal(Workload(501, 100)), POOL),
        inputs_hash(SPEC, FIGURES, Goal(GOAL.workload, Slo(tpot_s=1.0)), POOL),
        inputs_hash(SPEC, FIGURES, GOAL, Signature.parse("a10:2x2")),
        inputs_hash(SPEC, FIGURES.with_memory({"l4": 2**30}), GOAL, POOL),
    }
    assert len(hashes) == 5
    unused = FIGURES.with_memory({"t4": 2**30})
    some = Signature.parse("l4:1")
    assert inputs_hash(SPEC, unused, GOAL, some) == inputs_hash(SPEC, FIGURES, GOAL, some)


def test_why_there_is_none(data: bytes) -> None:
    small = Signature.parse("t4:3x1")
    table = GearTable(make_table(planner(small, Goal(Workload(9, 9))), pilots_of(small)))
    nothing = table.gear(Signature())
    assert isinstance(nothing, NoGear) and nothing.short_bytes > 0 and nothing.reason
    assert isinstance(table.gear(small), Gear)


def test_beyond_the_pool_the_best_dominated_gear_is_given_at_once(data: bytes) -> None:
    table = GearTable(data)
    more = Signature.parse("a10:2x2,l4:1x9,t4:3x5,h100:8x4")
    assert table.find(more) is None and table.gear(more) is None
    gear = table.dominated(more)
    assert gear is not None and gear.signature == POOL
    larger = Signature.parse("a10:5x1,l4:4x1")  # stand in for a10:2 and l4:1
    gear = table.dominated(larger)
    assert gear is not None and gear.signature == Signature.parse("a10:2,l4:1")
    assert table.dominated(Signature.parse("h100:8x4")) is None


def test_a_table_of_pilots_has_only_their_multiples() -> None:
    """Pilots of two nodes: the best dominated gear of three nodes is that of two."""
    pool = Signature.parse("l4:2x4")
    pilots = (PilotKind(Signature.parse("l4:2x2"), 2),)
    table = GearTable(make_table(planner(pool), pilots))
    assert [str(s) for s in table.signatures()] == ["", "l4:2x2", "l4:2x4"]
    assert table.gear(Signature.parse("l4:2x3")) is None
    gear = table.dominated(Signature.parse("l4:2x3"))
    assert gear is not None and gear.signature == Signature.parse("l4:2x2")


def test_the_fallback_fits_the_smallest_allocation(data: bytes) -> None:
    table = GearTable(data)
    fallback = table.fallback()
    assert fallback is not None
    fitting = [s for s in table.signatures() if isinstance(table.gear(s), Gear)]
    assert fallback.signature.gpus() == min(s.gpus() for s in fitting)


def test_losing_a_node_has_a_cost(data: bytes) -> None:
    table = GearTable(data)
    entry = table.find(POOL)
    assert entry is not None
    assert {cost.shape for cost in entry.shifts} == {0, 1, 2}
    for cost in entry.shifts:
        assert cost.moved_bytes >= 0 and cost.seconds >= 0
    # Whole copies on single GPUs: losing one moves nothing.
    singles = Signature.parse("l4:1x3")
    alike = GearTable(make_table(planner(singles), pilots_of(singles))).find(singles)
    assert alike is not None and alike.shifts[0].moved_bytes == 0


def test_the_next_best_gear_is_another_and_no_better(data: bytes) -> None:
    """Against all plans: no other set of pipelines with one that the best has not gives more."""
    table, live = GearTable(data), planner()
    solver = live.solver(Tier())
    seen = 0
    for signature in table.signatures():
        best, others = table.gear(signature), table.others(signature)
        assert isinstance(best, Gear) or not others
        for other in others:
            assert isinstance(best, Gear)
            check_gear(other, SPEC.num_layers)
            seen += 1
            assert other.signature == signature and other.name == other.layout() != best.layout()
            assert other.estimates.tokens_per_s <= best.estimates.tokens_per_s * (1 + 1e-6)
            assert other.estimates.tokens_per_s >= OTHER_SHARE * best.estimates.tokens_per_s * 0.999
        choice = live.choose(signature)
        if not others or choice is None or choice.tier != Tier():
            continue
        # each pipeline that the best plan lacks, forced into a plan, by an integer programme
        rest = [c for c in solver.columns if c not in choice.plan]
        most = max(
            key_worth(c.key) + best_of(solver.columns, left)
            for c in rest
            for left in lefts(signature, c)
        )
        assert others[0].estimates.tokens_per_s == pytest.approx(most, rel=1e-3)
    assert seen > 5


@pytest.fixture
def no_lattice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pool has too many states, as large ones have."""
    monkeypatch.setattr("flexslurm.planner.lattice.MOST_CELLS", 0)


@pytest.mark.usefixtures("no_lattice")
def test_without_a_lattice_there_is_a_next_best_gear_too(data: bytes) -> None:
    live = planner()
    assert live.solver(Tier()).lattice is None
    made = make_table(live, pilots_of(POOL))
    assert made == make_table(planner(), pilots_of(POOL)), "byte for byte"
    table, exact = GearTable(made), GearTable(data)
    assert list(table.signatures()) == list(exact.signatures())
    seen, near = 0, 0
    for signature in table.signatures():
        best, others = table.gear(signature), table.others(signature)
        assert isinstance(best, Gear) or not others
        for other in others:
            assert isinstance(best, Gear)
            seen += 1
            check_gear(other, SPEC.num_layers)
            assert other.signature == signature and other.name == other.layout() != best.layout()
            assert other.estimates.tokens_per_s >= OTHER_SHARE * best.estimates.tokens_per_s * 0.999
            # no better than the next best among all plans, which the lattice tells
            (told,) = exact.others(signature)
            most = told.estimates.tokens_per_s
            assert other.estimates.tokens_per_s <= most * (1 + 1e-6)
            near += other.estimates.tokens_per_s == pytest.approx(most, rel=0.02)
    assert seen >= 10 and near >= 0.8 * seen, (seen, near)


def best_of(columns: list[Column], signature: Signature) -> float:
    if not signature.counts:
        return 0.0
    return key_worth(Programme(columns, [s for s, _ in signature.counts]).solve(signature).key)


def lefts(signature: Signature, column: Column) -> list[Signature]:
    """What may be left of an allocation when one pipeline has taken its groups."""
    found = [list(signature.nodes())]
    for kind, count in column.need:
        for _ in range(count):
            found = [
                [*nodes[:i], Shape(one.gpu_type, one.gpus - kind.tp), *nodes[i + 1 :]]
                for nodes in found
                for i, one in enumerate(nodes)
                if one.gpu_type == kind.gpu_type and one.gpus >= kind.tp
            ]
    return list({Signature.of(s for s in nodes if s.gpus) for nodes in found})


def test_tables_of_the_version_before_are_read_and_have_no_others(data: bytes) -> None:
    table = GearTable(data)
    header, entries = table.header, {}
    for signature in table.signatures():
        entry = table.find(signature)
        assert entry is not None
        entries[signature] = msgspec.structs.replace(entry, others=())
    plain = encode(header, entries)
    cut = msgspec.msgpack.Encoder()
    old_entries = {s: cut.encode(list(msgspec.to_builtins(e))[:6]) for s, e in entries.items()}
    assert all(
        msgspec.msgpack.decode(blob, type=TableEntry) == entries[s]
        for s, blob in old_entries.items()
    )
    old = GearTable(plain[:7] + b"\x01" + plain[8:-4])
    assert old.gear(POOL) == table.gear(POOL) and old.others(POOL) == ()


def test_damage_is_seen(data: bytes) -> None:
    for bad, words in (
        (b"", "not a gear table"),
        (b"hello, this is no table at all", "not a gear table"),
        (data[:-1], "cut short"),
        (data + b"x", "cut short"),
        (data[:7] + b"\x09" + data[8:], "version 9"),
        (data[:33] + bytes(10) + data[43:], "damaged"),
        (data[:7] + b"\x02" + data[8:33] + bytes(10) + data[43:-4], "damaged"),
    ):
        with pytest.raises(ConfigError, match=words):
            GearTable(bad, "gears.bin")


def test_one_wrong_byte_anywhere_is_seen(data: bytes) -> None:
    """A gear that is not the planner's is worse than none."""
    for at in (*range(32), *range(32, len(data), 37), len(data) - 1):
        with pytest.raises(ConfigError):
            GearTable(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], "gears.bin")
        with pytest.raises(ConfigError):
            GearTable(data[:at], "gears.bin")


def test_a_file_is_mapped(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "gears.bin"
    path.write_bytes(data)
    table = open_table(path)
    assert table.gear(POOL) == GearTable(data).gear(POOL)
    with pytest.raises(ConfigError, match="cannot read it"):
        open_table(tmp_path / "none.bin")
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(ConfigError, match="not a gear table"):
        open_table(tmp_path / "empty")


def test_a_hundred_thousand_signatures_load_and_answer_quickly(tmp_path: Path) -> None:
    """Under 50 ms to load and 50 us to find a gear."""
    pool = Signature.parse("a:4x16,b:2x20,c:1x279")
    stages = tuple(Stage("a", 2, 8 * i, 8 * i + 8, 100, 0) for i in range(4))
    pipeline = TablePipeline(stages, 64, 4096, 100, 10.0, 0.1, 0.02, 3.0, (1, 2, 3, 4))
    other = OtherPlan(((0, 3),), tuple(range(12)))
    entry = TableEntry(((0, 4),), tuple(range(16)), 0, 0.0, others=(other,))
    shapes = (Shape("a", 4), Shape("b", 2), Shape("c", 1))
    every = itertools.product(range(17), range(21), range(280))
    entries = {
        Signature(tuple((s, n) for s, n in zip(shapes, counts, strict=True) if n)): entry
        for counts in every
    }
    header = Header("0", "m", pool, 256, 512, (pipeline,), ("because",), None)
    path = tmp_path / "gears.bin"
    path.write_bytes(encode(header, entries))
    assert len(entries) == 99_960
    loads, finds = [], []
    wanted = [Signature.parse(f"a:4x{1 + i % 16},b:2x{1 + i % 20},c:1x{1 + i}") for i in range(200)]
    for _ in range(5):
        began = time.perf_counter()
        table = open_table(path)
        loads.append(time.perf_counter() - began)
        for signature in wanted:
            began = time.perf_counter()
            gear = table.gear(signature)
            finds.append(time.perf_counter() - began)
            assert gear is not None
    assert all(len(table.others(signature)) == 1 for signature in wanted)
    assert min(loads) < 0.05
    assert min(finds) < 50e-6
