"""Whatever happens in whatever order, the controller keeps its invariants and ends up serving."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from flexslurm.control.actions import BeginCutover, BeginTransfer, ParkAll
from flexslurm.control.events import Cordon, Heard, PilotGone, PilotStays
from flexslurm.control.phases import Mode
from flexslurm.messages import AgentBye, LeaveNotice
from tests.unit.control_planners import OneReplicaPerNode, OneStagePerNode
from tests.unit.control_world import World

NAMES = ("a", "b", "c")
happenings = st.lists(
    st.tuples(
        st.sampled_from(
            ["join", "bye", "notice", "stay", "kill", "broken", "hang", "dead", "cordon",
             "uncordon", "gone", "wait", "fail", "mend", "cut", "slow", "mute", "answer"]
        ),
        st.sampled_from(NAMES),
        st.floats(0.05, 4.0),
    ),
    max_size=25,
)  # fmt: skip


planners = st.sampled_from([OneStagePerNode, OneReplicaPerNode])
MUTES = (ParkAll, BeginTransfer, BeginCutover)


@given(happenings, planners, st.sampled_from(Mode))
@settings(max_examples=120, deadline=None)
def test_any_sequence_of_events(
    events: list[tuple[str, str, float]], planner: type[OneStagePerNode], mode: Mode
) -> None:
    world = World(planner=planner(least=2), lost_s=2.0)
    world.mode = mode
    born = 0
    for what, name, seconds in events:
        agents = [a for a in world.control.members.agents.values() if a.hello.fragment == name]
        agent = agents[0].id if agents else None
        match what:
            case "join":
                born += 1
                kind = "l40s" if name == "c" else "a100"
                world.join(f"{name}{born}", kind, 2, fragment=name)
            case "bye" if agent:
                world.take(Heard(agent, AgentBye(incarnation=agent, reason="test")))
            case "notice" if agent:
                notice = LeaveNotice(incarnation=agent, source="SIGTERM", grace_s=seconds)
                world.take(Heard(agent, notice))
            case "stay" if agent:
                world.take(PilotStays(name, "test"))
            case "kill" if agent and world.control.members.agents[agent].workers.get(0):
                world.kill_worker(agent)
            case "broken" if world.control.current is not None:
                world.break_replica(min(world.control.current.replicas))
            case "hang" if agent:
                world.hung |= {
                    w.worker for w in world.control.members.agents[agent].workers.values()
                }
            case "dead" if agent:
                world.dead.add(agent)
            case "cordon" | "uncordon":
                world.take(Cordon(name, what == "cordon"))
            case "gone":
                world.take(PilotGone(name, "test"))
            case "cut" if agent:
                world.dead.add(agent)
                world.cut.add(agent)
            case "fail" if agent:
                world.failing[agent] = "test"
            case "slow" if agent:
                world.slow.add(agent)
            case "mute":
                world.mute.add(MUTES[int(seconds * 100) % 3])
            case "answer":
                world.mend()
            case "mend":
                world.failing.clear()
        world.run(seconds, step=0.25)
    # peace: everything mended and one fresh agent of each name; the service must come up
    world.failing.clear()
    world.dead.clear()
    world.cut.clear()
    world.mend()
    for name in NAMES:
        world.take(Cordon(name, False))
        born += 1
        world.join(f"{name}{born}", "l40s" if name == "c" else "a100", 2, fragment=name)
    world.run(60, step=0.5)
    assert world.serving() == "a100:2x2,l40s:2"
    assert world.control.current is not None and not world.control.current.lost
    epochs = [opened.epoch for opened in world.opened()]
    assert epochs == sorted(set(epochs)), "epochs only grow"
