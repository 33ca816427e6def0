"""When a pilot that is on notice must be empty: what each source promises, and which one wins."""

from __future__ import annotations

import pytest

from flexslurm.control.agent_options import AgentOptions
from flexslurm.control.events import PREEMPT_TIME, Heard, PilotLeaving
from flexslurm.messages import LeaveNotice
from tests.unit.control_world import World


def options(grace_s: float, kill_wait_s: float) -> AgentOptions:
    return AgentOptions("a-1", "a100", 4, grace_s, kill_wait_s, "a", "n1")


@pytest.mark.parametrize(
    ("grace_s", "kill_wait_s", "sigterm_s", "sigusr1_s"),
    [
        (0, 5, 5, 30),  # no grace: SIGUSR1 can only be the time limit's
        (20, 5, 5, 20),  # SIGTERM may be a cancel's; SIGUSR1 comes with the whole grace time
        (20, 1000, 20, 20),
        (3600, 30, 30, 30),  # the time limit's warning may be shorter than the grace time
    ],
)
def test_what_a_signal_promises(
    grace_s: float, kill_wait_s: float, sigterm_s: float, sigusr1_s: float
) -> None:
    given = options(grace_s, kill_wait_s)
    assert given.notice_s("SIGTERM") == sigterm_s
    assert given.notice_s("SIGUSR1") == given.notice_s("SIGUSR2") == sigusr1_s


def leaves_in(world: World, name: str) -> float:
    leaves_at = world.control.members.agents[name].leaves_at
    assert leaves_at is not None
    return leaves_at - world.now


def notice(world: World, grace_s: float, source: str = "SIGTERM") -> None:
    world.take(Heard("b", LeaveNotice(incarnation="b", source=source, grace_s=grace_s)))


@pytest.fixture
def world() -> World:
    """Two agents that are both needed: a notice is sat out."""
    made = World(least=3)
    made.join("a")
    made.join("b")
    made.run(3)
    return made


def test_slurm_s_own_word_on_a_preemption_wins_over_the_least_a_signal_promises(
    world: World,
) -> None:
    notice(world, 5.0)
    assert leaves_in(world, "b") == pytest.approx(5.0)
    world.take(PilotLeaving("b", PREEMPT_TIME, 19.0))
    assert leaves_in(world, "b") == pytest.approx(19.0)


def test_a_cancel_in_the_grace_time_shortens_it(world: World) -> None:
    world.take(PilotLeaving("b", PREEMPT_TIME, 20.0))
    world.run(2)
    notice(world, 5.0)
    assert leaves_in(world, "b") == pytest.approx(5.0)


def test_signals_that_come_again_change_nothing(world: World) -> None:
    """Each of Slurm's two or three would end later than the first."""
    notice(world, 5.0)
    world.run(2)
    notice(world, 5.0)
    assert leaves_in(world, "b") == pytest.approx(3.0, abs=0.1)
    notice(world, 30.0, "SIGUSR1")
    assert leaves_in(world, "b") == pytest.approx(3.0, abs=0.1)


def test_a_preemption_whose_end_is_past_is_now(world: World) -> None:
    notice(world, 5.0)
    world.take(PilotLeaving("b", PREEMPT_TIME, 0.0))
    assert leaves_in(world, "b") == pytest.approx(0.0)
