"""One end of a pilot is one event, whoever tells of it and how often."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexslurm.control.actions import Record
from flexslurm.control.endings import Cause, Endings
from flexslurm.control.events import PREEMPT_TIME, Heard, PilotEnds, PilotGone, PilotLeaving
from flexslurm.control.members import AgentState
from flexslurm.messages import LeaveNotice
from tests.unit.control_world import World

SOURCES = ("SIGTERM", PREEMPT_TIME, "prolog", "SIGUSR1")


def take(endings: Endings, now: float, source: str, grace_s: float) -> tuple[bool, bool]:
    _, fresh, news = endings.take(now, "a-1", "a", source, grace_s, None)
    return fresh, news


@pytest.mark.parametrize("order", itertools.permutations(SOURCES))
def test_whichever_comes_first_there_is_one_event(order: tuple[str, ...]) -> None:
    endings = Endings()
    answers = [take(endings, 10.0 + i, source, 20.0) for i, source in enumerate(order)]
    assert [fresh for fresh, _ in answers] == [True, False, False, False]
    assert all(news for _, news in answers)
    assert take(endings, 15.0, order[0], 20.0) == (False, False)


words = st.tuples(st.sampled_from(SOURCES), st.floats(0, 100), st.floats(0, 10))


@given(st.lists(words, min_size=1, max_size=20))
def test_later_words_never_lengthen_a_deadline_but_slurm_s_own(
    told: list[tuple[str, float, float]],
) -> None:
    endings, now, fresh_ones = Endings(), 0.0, 0
    for source, grace_s, pause_s in told:
        now += pause_s
        before = endings.deadline("a")
        fresh, _ = take(endings, now, source, grace_s)
        fresh_ones += fresh
        after = endings.deadline("a")
        assert after is not None and after <= now + 100
        if before is not None and source != PREEMPT_TIME:
            assert after <= before
    assert fresh_ones == 1


def test_the_warning_of_a_walltime_carries_the_walltime_s_end() -> None:
    endings = Endings()
    taken, _, _ = endings.take(0.0, "a-1", "a", "SIGUSR1", 20.0, 90.0)
    assert (taken.cause, taken.ends_at) == (Cause.WALLTIME, 90.0)
    preempted, fresh, _ = endings.take(1.0, "a-1", "a", PREEMPT_TIME, 20.0, 90.0)
    assert fresh and preempted.cause is Cause.TAKEN
    assert endings.deadline("a") == 21.0


def records(world: World, kind: str) -> list[dict[str, object]]:
    found = [a.record for a in world.log if isinstance(a, Record)]
    return [record for record in found if record["event"] == kind]


def test_a_preemption_that_is_told_before_the_agents_come_is_known_when_they_do() -> None:
    world = World(least=3)
    world.join("a")
    world.take(PilotLeaving("b", PREEMPT_TIME, 20.0))
    world.run(2)
    world.join("b")
    agent = world.control.members.agents["b"]
    assert agent.state is AgentState.LEAVING
    assert agent.leaves_at == pytest.approx(world.now + 18.0, abs=0.5)


@pytest.mark.parametrize("after", ["gone", "late"])
def test_another_run_is_not_what_was_meant(after: str) -> None:
    world = World(least=3)
    world.join("a")
    world.take(PilotLeaving("b", PREEMPT_TIME, 5.0))
    if after == "gone":
        world.take(PilotGone("b", "PREEMPTED"))
    else:
        world.run(6)
    world.join("b")
    assert world.control.members.agents["b"].state is AgentState.READY


def test_slurm_s_word_on_a_walltime_reaches_agents_of_any_release() -> None:
    world = World(least=3)
    world.take(PilotEnds("b", 600.0))
    world.join("b")
    ends_at = world.control.members.agents["b"].walltime_ends_at
    assert ends_at == pytest.approx(world.now + 600, abs=1)
    world.take(PilotEnds("b", 300.0))
    assert world.control.members.agents["b"].walltime_ends_at == pytest.approx(world.now + 300)


def test_each_source_is_journalled_once_with_the_deadline_it_left() -> None:
    world = World(least=3)
    world.join("a")
    world.join("b")
    for source, grace_s in (("SIGTERM", 5.0), ("SIGTERM", 5.0), (PREEMPT_TIME, 19.0)):
        if source == PREEMPT_TIME:
            world.take(PilotLeaving("b", source, grace_s))
        else:
            world.take(Heard("b", LeaveNotice(incarnation="b", source=source, grace_s=grace_s)))
    assert len(records(world, "leaving")) == 1
    too = records(world, "leaving too")
    assert [(r["source"], r["cause"], r["ends_in_s"]) for r in too] == [
        (PREEMPT_TIME, "taken", 19.0)
    ]


def test_a_run_that_is_being_ended_says_nothing_of_the_next() -> None:
    world = World(least=3)
    world.join("a")
    world.take(PilotLeaving("b", "COMPLETING", 30.0, present=True))
    world.join("b")
    assert world.control.members.agents["b"].state is AgentState.READY
    world.take(PilotLeaving("b", "COMPLETING", 30.0, present=True))
    assert world.control.members.agents["b"].state is AgentState.LEAVING
