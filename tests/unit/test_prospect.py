"""What may become of a gear's pilots, each with its own end and risk, and what serves then."""

from __future__ import annotations

import pytest

from flexslurm.control.horizon import Outlook, RiskGroup
from flexslurm.control.installed import InstalledGear
from flexslurm.control.prospect import MOST_ENDS, outlook_of
from flexslurm.gear import Gear, NoGear, Signature
from tests.unit.control_planners import OneReplicaPerNode
from tests.unit.control_world import World
from tests.unit.measured_world import POLICY, Table, gear, installed

HOUR = 3600.0


def served(*pilots: tuple[str, str, float | None]) -> World:
    """Pilots by name, GPU type and walltime; each node is a replica of 200 tokens per second."""
    world = World(planner=OneReplicaPerNode())
    for name, kind, walltime_s in pilots:
        world.join(name, kind, walltime_s=walltime_s)
    world.run(5)
    assert world.control.current is not None
    assert len(world.control.current.replicas) == len(pilots)
    return world


def outlook(world: World, gear: InstalledGear | None = None, horizon_s: float = HOUR) -> Outlook:
    control = world.control
    installed = gear or control.current
    assert installed is not None
    return outlook_of(
        world.now, control.members, control.planner, control.watch, installed, horizon_s
    )


def rates(found: Outlook) -> dict[tuple[int, ...], float]:
    return {
        gone: gear.estimates.tokens_per_s if isinstance(gear, Gear) else gear
        for gone, gear in found.after.items()
    }


def test_where_nothing_ends_and_nothing_was_lost_there_is_nothing_to_weigh() -> None:
    assert outlook(served(("a", "a100", None), ("b", "a100", None))) == Outlook()


def test_each_known_end_counts_with_what_serves_after_it() -> None:
    world = served(("a", "a100", 1000.0), ("b", "a100", 2000.0), ("c", "a100", None))
    found = outlook(world)
    assert [round(end) for end in found.ends_s] == [995, 1995]
    assert rates(found) == {(1, 0): 400.0, (1, 1): 200.0}
    assert [group.count for group in found.groups] == [1, 1], "the third neither ends nor is lost"
    assert outlook(world, horizon_s=1500.0).ends_s == found.ends_s[:1]
    assert outlook(world, horizon_s=500.0) == Outlook()


def test_pilots_that_end_together_are_one_end() -> None:
    world = served(("a", "a100", 1000.0), ("b", "a100", 1030.0), ("c", "a100", 1200.0))
    found = outlook(world)
    assert [round(end) for end in found.ends_s] == [995, 1195]
    assert rates(found) == {(2, 0): 200.0}, "without all three nothing serves"


def test_ends_beyond_the_most_that_are_told_apart_fall_on_the_last() -> None:
    many = [(f"p{n}", "a100", 300.0 * (n + 1)) for n in range(MOST_ENDS + 3)]
    found = outlook(served(*many))
    assert len(found.ends_s) == MOST_ENDS
    assert sum(group.count for group in found.groups) == len(many)


def test_like_pilots_share_a_group_and_their_risks_add_up() -> None:
    world = served(("a", "l40s", None), ("b", "l40s", None), ("c", "a100", None))
    world.control.watch.lives.remember({"l40s": (4 * HOUR, 20.0)})
    found = outlook(world)
    [group] = found.groups
    hazard = 20.0 / (10 * HOUR)
    assert group == RiskGroup(2, None, pytest.approx(hazard), True)
    assert found.hazard_per_s == pytest.approx(2 * hazard)
    assert rates(found) == {(1,): 400.0, (2,): 200.0}
    assert found.recovery_s == pytest.approx(1.0 / 3), "two of three replicas serve on meanwhile"


def test_pilots_that_stand_by_are_told_apart_from_those_that_serve() -> None:
    world = served(("a", "l40s", 1000.0), ("b", "l40s", 2000.0))
    current = world.control.current
    assert current is not None
    one = next(key for key in current.keys if current.find(key).agents == {"a"})  # type: ignore[union-attr]
    [other] = current.keys - {one}
    small = current.without([other])
    assert small is not None
    found = outlook(world, small)
    assert [(group.used, round(group.ends_in_s or 0)) for group in found.groups] == [
        (True, 995), (False, 1995),
    ]  # fmt: skip
    assert rates(found) == {(1, 0): 200.0}


class Forgetful(OneReplicaPerNode):
    """Knows no gear but for what is here."""

    def look(self, signature: Signature) -> Gear | NoGear | None:
        return None


def test_of_what_may_come_nobody_is_asked_and_what_is_not_known_falls_with_the_gpus() -> None:
    world = served(("a", "a100", 1000.0), ("b", "a100", 2000.0), ("c", "l40s", None))
    world.control.planner = Forgetful()
    found = outlook(world)
    assert rates(found) == {(1, 0): pytest.approx(2 / 3), (1, 1): pytest.approx(1 / 3)}


def test_pilots_that_end_one_after_the_other_are_not_gone_for() -> None:
    """Two come, for 5 and for 10 minutes: by the first end alone they would be worth it."""
    gears = {
        "a100:2": gear("a100:2", 1000.0),
        "a100:2,l40s:2": gear("a100:2,l40s:2", 1500.0),
        "a100:2,l40s:2x2": gear("a100:2,l40s:2x2", 2000.0),
    }
    for walltimes, wanted in (((305.0, 605.0), "a100:2"), ((305.0, None), "a100:2,l40s:2x2")):
        world = World(planner=Table(gears), policy=POLICY)
        world.join("a")
        world.run(3)
        assert installed(world) == "a100:2"
        for name, walltime_s in zip(("s", "t"), walltimes, strict=True):
            world.join(name, "l40s", 2, walltime_s=walltime_s)
        world.run(3)
        assert installed(world) == wanted, world.control.reason
        if wanted == "a100:2":
            assert "pilots of it ending in 5" in world.control.reason
            assert "is estimated at 1.13 times a100:2: 4,05" in world.control.reason
