"""A load that lasts brings a pilot, a lull lets one go, and what is needed stays."""

from __future__ import annotations

import pytest

from flexslurm.control.keeper_load import LoadJudge, LoadSettings, ServiceLoad, resize
from flexslurm.control.keeper_values import (
    Present,
)
from flexslurm.slurm.states import JobState
from tests.keeper_world import World, entry


def test_a_load_that_lasts_asks_for_more_up_to_the_maximum_one_at_a_time() -> None:
    world = World(entry(1, 1, 3))
    judge = LoadJudge(LoadSettings(high_for_s=60))
    sizes = []
    for _ in range(100):
        world.step()
        step, why = judge.take(world.queue.now, ServiceLoad(16, 5, 16, 0.5))
        resize(world.keeper, step, why)
        sizes.append(len(world.names()))
    assert sizes[0] == 1 and max(sizes) == sizes[-1] == 3
    assert sizes.index(2) >= 11 and sizes.index(3) >= sizes.index(2) + 11


def test_idle_pilots_are_let_go_down_to_the_minimum() -> None:
    world = World(entry(1, 3, 3))
    world.step(times=5)
    world.join()
    world.present["a100-2"] = Present(True, serving=False)
    world.keeper.present(world.queue.now, world.present)
    judge = LoadJudge(LoadSettings(low_for_s=300))
    for _ in range(200):
        world.step()
        step, why = judge.take(world.queue.now, ServiceLoad(1, 0, 16, 0.1))
        resize(world.keeper, step, why)
        for name in world.drains:
            if name in world.keeper.kept:
                world.queue.end(world.job(name), JobState.COMPLETED, 0)
    assert world.drains[0] == "a100-2" and len(world.drains) == 2
    assert len(world.names()) == 1


@pytest.mark.parametrize("waiting", [0, 3])
def test_a_short_peak_or_lull_changes_nothing(waiting: int) -> None:
    judge = LoadJudge(LoadSettings(high_for_s=60, low_for_s=60))
    answers = set()
    for second in range(0, 1000, 10):
        busy = second % 50 == 0
        load = ServiceLoad(16, waiting, 16, 0.5) if busy else ServiceLoad(0, 0, 16, 0.1)
        answers.add(judge.take(float(second), load)[0])
    assert answers == {0}


def test_requests_that_have_just_come_do_not_make_a_lull_a_load() -> None:
    """Each waits for a moment, and a look may see it."""
    judge = LoadJudge(LoadSettings(low_for_s=60))
    answers = [judge.take(float(s), ServiceLoad(1, s % 3 == 0, 16, 0.1))[0] for s in range(62)]
    assert answers.index(-1) == 60


def test_what_is_needed_is_not_let_go_and_what_still_waits_is() -> None:
    world = World(entry(1, 2, 2))
    world.step()
    resize(world.keeper, -1, "idle", lambda name: False)
    assert world.keeper.wanted == [2], "a100-1 runs, and is needed"
    world.begin = False
    world.step(times=2)
    resize(world.keeper, -1, "idle", lambda name: False)
    assert world.keeper.wanted == [1], "a100-2 has not begun"


def test_a_service_that_waits_for_gpus_lets_none_go() -> None:
    judge = LoadJudge(LoadSettings(low_for_s=60))
    assert {judge.take(float(s), ServiceLoad(0, 0, 0, 0.0))[0] for s in range(1000)} == {0}
