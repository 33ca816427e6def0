"""The controller's decisions: joins, losses, notices, hangs and failures, each to its end."""

from __future__ import annotations

import pytest

from flexslurm.control.actions import Detach, Record, Say, Send
from flexslurm.control.events import (
    Cordon,
    Heard,
    PilotGone,
    PilotLeaving,
    Tick,
    Unreachable,
)
from flexslurm.control.installed import ReplicaKey
from flexslurm.messages import (
    AgentBeat,
    AgentBye,
    AgentHello,
    LeaveNotice,
    Refused,
    ReleaseAgent,
    Welcome,
    WorkerBeat,
    WorkerExit,
)
from tests.unit.control_world import World


def test_joins_are_gathered_into_one_gear() -> None:
    world = World()
    world.join("a")
    world.run(0.5)
    world.join("b", "l40s", 1)
    world.run(3)
    assert world.serving() == "a100:2,l40s:1"
    assert len(world.opened()) == 1
    assert world.control.state == "serving"


def test_before_the_first_gear_the_reason_says_what_is_short() -> None:
    world = World(least=3)
    world.join("a")
    world.run(3)
    assert world.control.state == "starting"
    assert "3 GPUs are needed, 2 are here" in world.control.reason


def test_a_killed_worker_pauses_at_once_and_is_replaced() -> None:
    world = World()
    world.join("a")
    world.join("b")
    world.run(3)
    world.kill_worker("b", 1)
    assert world.detached() == [ReplicaKey(1, 0)] and world.control.current is None
    world.run(1)
    assert world.serving() == "a100:2x2"
    assert [opened.epoch for opened in world.opened()] == [1, 2]


def test_only_a_worker_that_dies_by_itself_may_have_died_of_its_sequences() -> None:
    for what in ("worker", "node", "worker on notice"):
        world = World(least=3)
        world.join("a")
        world.join("b")
        world.run(3)
        if what == "node":
            world.take(Unreachable("b"))
        else:
            if what != "worker":
                world.take(Heard("b", LeaveNotice(incarnation="b", source="SIGTERM", grace_s=9.0)))
            world.kill_worker("b", 1)
        [detach] = [action for action in world.log if isinstance(action, Detach)]
        assert detach.failed == (what == "worker"), detach


def test_a_silent_agent_is_lost_within_its_bound() -> None:
    world = World(lost_s=2.0)
    world.join("a")
    world.join("b", "l40s", 2)
    world.run(3)
    world.dead.add("b")
    world.run(1.8)
    assert world.serving() == "a100:2,l40s:2"
    world.run(1.0)
    assert world.serving() == "a100:2"


def test_a_notice_moves_off_while_the_old_gear_still_serves() -> None:
    world = World()
    world.join("a")
    world.join("b")
    world.run(3)
    notice = LeaveNotice(incarnation="b", source="SIGTERM", grace_s=15)
    world.take(Heard("b", notice))
    world.take(Heard("b", notice))  # Slurm sends it two or three times
    assert world.serving() == "a100:2x2"
    world.run(1)
    assert world.serving() == "a100:2"
    assert "b on node-b must leave" in world.control.history[-1].why
    released = [a for a in world.log if isinstance(a, Send) and isinstance(a.message, ReleaseAgent)]
    assert [release.to for release in released] == ["b"]
    assert all(release.message.give_back for release in released)  # type: ignore[union-attr]


def test_a_notice_when_nothing_else_fits_is_sat_out() -> None:
    world = World(least=3)
    world.join("a")
    world.join("b")
    world.run(3)
    world.take(PilotLeaving("b", "PreemptTime", 20.0))
    world.run(5)
    assert world.serving() == "a100:2x2"
    assert "serving until then" in world.control.reason
    world.take(Heard("b", AgentBye(incarnation="b", reason="killed")))
    world.run(2)
    assert world.serving() is None and world.control.state == "waiting"
    world.join("b2", fragment="b")
    world.run(3)
    assert world.serving() == "a100:2x2" and world.control.state == "serving"


def test_a_small_gain_is_not_worth_a_shift() -> None:
    world = World()
    world.join("a", gpus=8)
    world.run(3)
    world.join("b", gpus=1)
    world.run(5)
    assert world.serving() == "a100:8"
    assert "below the benefit ratio" in world.control.reason


def test_a_restarted_agent_replaces_its_ghost() -> None:
    world = World()
    world.join("a1", fragment="a")
    world.run(3)
    world.join("a2", fragment="a")
    world.run(3)
    assert list(world.control.members.agents) == ["a2"]
    assert world.serving() == "a100:2"
    # the ghost speaks up: it is told to say hello, which its fragment's newer agent has done
    world.take(Heard("a1", AgentBeat(incarnation="a1", number=9)))
    assert list(world.control.members.agents) == ["a2"]


def test_a_worker_that_hangs_in_a_collective_is_killed_and_the_shift_goes_on() -> None:
    world = World()
    world.join("a")
    world.join("b")
    world.run(3)
    survivor = world.control.members.agents["a"].workers[0].worker
    world.hung.add(survivor)
    world.break_replica()
    world.run(1)
    assert world.serving() is None
    world.run(5)
    assert world.serving() == "a100:2x2"
    assert world.control.members.agents["a"].workers[0].worker != survivor


def test_failing_installs_end_with_the_faulty_node_left_out() -> None:
    world = World()
    world.join("a")
    world.join("b", "l40s", 2)
    world.failing["b"] = "out of memory"
    world.run(20)
    assert world.serving() == "a100:2"
    assert world.control.members.agents["b"].state == "faulty"
    assert world.control.members.agents["b"].failure == "out of memory"


def test_failures_with_success_between_them_leave_no_node_out() -> None:
    world = World()
    world.join("a")
    world.join("b", "l40s", 2)
    world.run(20)
    for _ in range(4):
        world.failing["b"] = "a worker was killed"
        world.kill_worker("a")
        world.run(0.4)
        world.failing.clear()
        world.run(20)
        assert world.serving() == "a100:2,l40s:2"
    aborted = [report for report in world.control.history if "killed" in report.outcome]
    assert len(aborted) >= 4
    assert world.control.members.agents["b"].state == "ready"


def test_a_model_that_cannot_be_installed_anywhere_is_not_tried_for_ever() -> None:
    world = World()
    world.join("a")
    world.failing["a"] = "fatal: model.safetensors is cut short"
    world.run(30)
    assert world.control.state == "failed"
    assert world.control.epoch == 1
    assert "cut short" in world.control.reason


def test_a_member_lost_during_the_install_restarts_the_decision() -> None:
    world = World()
    world.join("a")
    world.join("b")
    world.run(1.0)
    world.dead.add("b")  # it has joined, and now neither starts workers nor beats
    world.run(8)
    assert world.serving() == "a100:2"
    assert any("aborted" in report.outcome for report in world.control.history)


def test_a_cordon_that_ends_with_its_pilot_is_journalled_and_not_said() -> None:
    world = World()
    world.take(Cordon("b", cordon=True, drain=True))
    before = len(world.log)
    world.take(Cordon("b", cordon=False, gone=True))
    assert not world.control.members.cordoned and not world.control.members.draining
    assert [type(action) for action in world.log[before:]] == [Record]


def test_cordon_moves_off_a_fragment_and_back() -> None:
    world = World()
    world.join("a")
    world.join("b")
    world.run(3)
    world.take(Cordon("b", True))
    world.run(1)
    assert world.serving() == "a100:2"
    world.take(Cordon("b", False))
    world.run(1)
    assert world.serving() == "a100:2x2"


def test_slurm_ending_a_pilot_is_believed_before_its_heartbeat_stops() -> None:
    world = World(lost_s=60.0)
    world.join("a")
    world.join("b")
    world.run(3)
    world.dead.add("b")
    world.take(PilotGone("b", "NODE_FAIL"))
    world.run(1)
    assert world.serving() == "a100:2"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"protocol": 99}, "speaks protocol 99"),
        ({"gpu_type": "h100"}, "not in the site file"),
        ({"incarnation": "somebody-else"}, "not the sender's own"),
    ],
)
def test_agents_that_do_not_fit_are_refused_with_the_reason(
    change: dict[str, object], said: str
) -> None:
    world = World()
    fields = {
        "protocol": 1, "incarnation": "a", "fragment": "a", "node": "n", "address": "x",
        "gpu_type": "a100", "gpus": (),
    }  # fmt: skip
    actions = world.take(Heard("a", AgentHello(**{**fields, **change})))  # type: ignore[arg-type]
    refusal = actions[0]
    assert isinstance(refusal, Send) and isinstance(refusal.message, Refused)
    assert said in refusal.message.reason
    assert not world.control.members.agents


def test_strangers_are_told_to_introduce_themselves_or_end() -> None:
    world = World()
    told = world.take(Heard("x", AgentBeat(incarnation="x", number=1)))
    assert [type(a.message) for a in told if isinstance(a, Send)] == [Welcome]
    assert told[0].message.head != world.control.settings.head  # type: ignore[union-attr]
    told = world.take(Heard("w", WorkerBeat(worker="w")))
    assert [type(a.message) for a in told if isinstance(a, Send)] == [WorkerExit]


def test_every_epoch_is_in_the_journal_before_its_messages() -> None:
    world = World()
    world.join("a")
    world.run(3)
    world.kill_worker("a")
    world.run(3)
    events = [
        a.record["event"] if isinstance(a, Record) else type(a.message).__name__
        for a in world.log
        if (isinstance(a, Record) and a.sync)
        or (isinstance(a, Send) and "Install" in type(a.message).__name__)
    ]
    assert events == [
        "epoch", "planned", "Install", "Install", "committed", "switched",
        "broken", "epoch", "planned", "Install", "Install", "committed", "switched",
    ]  # fmt: skip


def test_what_is_said_names_the_fragment_and_the_reason() -> None:
    world = World(lost_s=2.0)
    world.join("a")
    world.dead.add("a")
    world.run(3)
    world.take(Tick())
    said = [a.text for a in world.log if isinstance(a, Say) and a.warning]
    assert any(text.startswith("a on node-a is gone: silent for 2") for text in said)


def test_a_closed_connection_is_a_loss_without_waiting_for_the_heartbeat() -> None:
    world = World(lost_s=60.0)
    world.join("a")
    world.join("b")
    world.run(3)
    world.dead.add("b")
    world.cut.add("b")
    world.break_replica()
    world.run(0.5)
    assert world.serving() == "a100:2"
    assert [opened.epoch for opened in world.opened()][-1] == world.control.epoch


def test_a_member_whose_connection_breaks_but_lives_rejoins() -> None:
    world = World()
    world.join("a")
    world.join("b")
    world.run(3)
    world.take(Unreachable("b"))
    world.run(1)
    assert world.serving() == "a100:2"
    world.join("b")  # its beat is answered by a stranger's welcome, so it says hello
    world.run(3)
    assert world.serving() == "a100:2x2"
