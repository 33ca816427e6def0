"""Jobs shaped to holes: free GPUs until something else is to start there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from flexslurm.config.schema import parse_section
from flexslurm.config.service import Service
from flexslurm.config.site import Site
from flexslurm.control.keeper import PoolKeeper
from flexslurm.control.keeper_values import Look, Submit
from flexslurm.errors import SlurmUnavailable
from flexslurm.head.hole_looks import HoleLooks
from flexslurm.head.pilot_specs import entries_of, first_pilots, keeper_settings, pilot_spec
from flexslurm.slurm.backfill import Hole, NodeRoom, fill, holes, node_room, wanted_from
from flexslurm.slurm.gpu_request import GpuRequest
from flexslurm.slurm.jobs import JobInfo
from flexslurm.slurm.script import pilot_options
from flexslurm.slurm.states import JobState
from flexslurm.wire.service_dir import ServiceDir

NOW = 1_800_000_000.0
A100 = GpuRequest("gpu", "a100")


def at(seconds: float) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(NOW + seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")


def room(name: str, used: int = 0, state: str = "MIXED", partition: str = "p") -> NodeRoom:
    return node_room({
        "NodeName": name, "Partitions": f"other,{partition}", "State": state,
        "Gres": "gpu:a100:4(S:0-1),nic:2", "GresUsed": f"gpu:a100:{used}(IDX:N/A)",
    })  # fmt: skip


def test_free_gpus_until_something_else_starts() -> None:
    rooms = [
        room("n1", 1), room("n2", 4), room("n3", 0, "IDLE"), room("n4", 0, "IDLE+DRAIN"),
        room("n5", 0, "IDLE", "q"), room("n6", 0, "IDLE"),
    ]  # fmt: skip
    reservations = [{"StartTime": at(3600), "Nodes": "n[1-2]"}]
    starts = [(at(1800), "n3"), ("N/A", "n6"), (at(7200), "n1"), (at(30), "(null)")]
    wanted = wanted_from(reservations, starts)
    found = holes(rooms, wanted, A100, "p", NOW)
    assert found == [Hole("n6", 4, None), Hole("n1", 3, 3540.0), Hole("n3", 4, 1740.0)]


def test_a_node_that_is_wanted_at_once_is_no_hole() -> None:
    wanted = wanted_from([{"StartTime": at(-100), "Nodes": "n1"}], [(at(30), "n2")])
    assert holes([room("n1"), room("n2")], wanted, A100, "p", NOW) == []


def test_the_longest_job_that_fits_in_whole_minutes() -> None:
    found = [Hole("n6", 4, None), Hole("n1", 3, 3550.0), Hole("n3", 4, 1740.0)]
    one = fill(found, 3, 1, 600.0, 14400.0)
    assert one is not None and (one.walltime_s, one.nodes) == (14400.0, ("n6",))
    two = fill(found, 3, 2, 600.0, 14400.0)
    assert two is not None and (two.walltime_s, two.nodes) == (3540.0, ("n6", "n1"))
    assert fill(found, 4, 2, 600.0, 14400.0) is not None
    assert fill(found, 4, 2, 1800.0, 14400.0) is None
    assert fill(found, 4, 3, 60.0, 14400.0) is None
    assert fill([], 1, 1, 60.0, 14400.0) is None


lengths = st.one_of(st.none(), st.floats(0, 1e6))


@given(
    st.lists(st.builds(Hole, st.uuids().map(str), st.integers(1, 8), lengths), max_size=8),
    st.integers(1, 8), st.integers(1, 4), st.floats(60, 1e4), st.floats(60, 1e5),
)  # fmt: skip
def test_what_is_asked_for_ends_before_its_holes_do(
    found: list[Hole], gpus: int, nodes: int, least_s: float, most_s: float
) -> None:
    ordered = sorted(found, key=lambda h: -(float("inf") if h.length_s is None else h.length_s))
    made = fill(ordered, gpus, nodes, least_s, most_s)
    if made is None:
        return
    used = [hole for hole in found if hole.node in made.nodes]
    assert len(used) == nodes and all(hole.gpus >= gpus for hole in used)
    assert all(hole.length_s is None or made.walltime_s <= hole.length_s for hole in used)
    assert least_s <= made.least_s <= made.walltime_s <= most_s and made.walltime_s % 60 == 0


# -------------------------------------------------------------------------------- the looks


class FakeClient:
    """Three questions, counted."""

    def __init__(self, rooms: list[NodeRoom]) -> None:
        self.room, self.asked = rooms, list[str]()
        self.silent = False

    def _ask(self, what: str) -> None:
        self.asked.append(what)
        if self.silent:
            raise SlurmUnavailable("no answer")

    def rooms(self) -> list[NodeRoom]:
        self._ask("rooms")
        return self.room

    def reservations(self) -> list[dict[str, str]]:
        self._ask("reservations")
        return []

    def starts(self) -> list[tuple[str, str]]:
        self._ask("starts")
        return [(at(1800), "n1")]


def service(**keeping: Any) -> Service:
    text = """
name: chat
model: {path: /m}
pool: [{gpu_type: a100, gpus: 4, partition: p, count: 1, min_count: 0, max_count: 2}]
"""
    return parse_section(Service, text, "f", {"keeping.backfill": True})


SITE = parse_section(
    Site, "name: s\ngpu_types: {a100: {}}\npartitions: {p: {max_walltime: 20min}}\n", "f"
)


class Bench:
    def __init__(self, rooms: list[NodeRoom]) -> None:
        self.client, self.now = FakeClient(rooms), 1000.0
        made = service()
        self.keeper = PoolKeeper(entries_of(made), keeper_settings(made, SITE), (), self.now)
        self.looks = HoleLooks(
            made,
            SITE,
            self.client,
            now=lambda: self.now,
            clock=lambda: NOW,  # type: ignore[arg-type]
        )

    def run(self, seconds: float) -> list[Submit]:
        made = []
        for _ in range(int(seconds / 5)):
            self.now += 5
            if self.looks.due(self.keeper):
                self.looks.step()
            submit = self.looks.submission(self.now, self.keeper)
            if submit is not None:
                made.append(submit)
                self.keeper.submitted(self.now, submit.pilot.fragment, str(len(made)))
        return made


def test_a_launch_with_backfill_submits_the_minimum_only() -> None:
    assert first_pilots(service()) == []


def test_a_hole_is_filled_with_a_short_job_and_the_next_waits_for_it() -> None:
    bench = Bench([room("n1", 0, "IDLE")])
    made = bench.run(600)
    assert bench.client.asked[:3] == ["rooms", "reservations", "starts"]
    assert len(made) == 1  # of two: the first still waits
    pilot = made[0].pilot
    assert (pilot.fills_hole, pilot.walltime_s, pilot.least_s) == (True, 1200.0, 900.0)
    spec = pilot_spec(pilot, service(), SITE, ServiceDir(Path("/s")), "slurm")
    options = pilot_options(spec, SITE)
    assert "--time=0-00:20:00" in options and "--time-min=0-00:15:00" in options


def test_without_holes_they_are_sought_ever_more_rarely() -> None:
    bench = Bench([room("n1", 4)])
    assert bench.run(3600) == []
    assert 9 <= len(bench.client.asked) <= 40 and len(bench.client.asked) % 3 == 0


def test_a_hole_that_is_gone_is_given_up() -> None:
    bench = Bench([room("n1", 0, "IDLE")])
    bench.run(30)
    info = JobInfo("1", JobState.PENDING, "waits for nodes", name="chat.a100-1")
    bench.now += 130
    bench.keeper.looked(bench.now, Look({"1": info}, (info,)))
    assert bench.keeper.kept["a100-1"].cancel
    ended = JobInfo("1", JobState.CANCELLED)
    bench.keeper.looked(bench.now, Look({"1": ended}))
    assert bench.keeper.next_call(bench.now) is None  # nothing takes its place but another hole
