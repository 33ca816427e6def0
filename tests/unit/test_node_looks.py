"""What Slurm says of our nodes: asked rarely, told once, and nothing is acted on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from flexslurm.control.actions import Record
from flexslurm.control.events import Event, NodeNoticed
from flexslurm.errors import FlexslurmError, SlurmUnavailable
from flexslurm.head.node_looks import NodeLooks, out_of_use
from flexslurm.slurm.client import NodeInfo
from flexslurm.slurm.states import node_state
from tests.unit.control_world import World


def node(state: str, name: str = "n1", reason: str | None = None) -> NodeInfo:
    return NodeInfo(name, node_state(state), (), 8, 2**30, ("p",), reason, name)


@pytest.mark.parametrize(
    ("state", "reason", "words"),
    [
        ("MIXED+DRAIN", "bad fan", "draining: bad fan"),
        ("IDLE+DRAIN", None, "drained"),
        ("DOWN*", "Not responding", "down: Not responding"),
        ("ALLOCATED*", None, "not responding"),
        ("MIXED+MAINT", None, "in maintenance"),
        ("MIXED", "an old reason", ""),
        ("ALLOCATED+PLANNED", None, ""),
        ("SOMETHING_NEW", None, ""),
    ],
)
def test_states_in_words(state: str, reason: str | None, words: str) -> None:
    assert out_of_use(node(state, reason=reason)) == words


class Looked:
    """Looks by hand, at answers by hand."""

    def __init__(self, nodes: Sequence[str] = ("n1", "n2")) -> None:
        self.now = 0.0
        self.nodes = list(nodes)
        self.asked: list[list[str]] = []
        self.answer: list[NodeInfo] | FlexslurmError = []
        self.events: list[Event] = []
        self.looks = NodeLooks(
            self._ask, lambda: self.nodes, self.events.append, 2.0, lambda: self.now
        )

    def _ask(self, names: Sequence[str]) -> list[NodeInfo]:
        self.asked.append(list(names))
        if isinstance(self.answer, FlexslurmError):
            raise self.answer
        return self.answer

    def look(self, *answer: NodeInfo) -> list[Event]:
        self.answer = list(answer)
        before = len(self.events)
        asyncio.run(self.looks.look())
        return self.events[before:]


def test_a_change_is_told_once_and_so_is_its_end() -> None:
    world = Looked()
    draining = node("MIXED+DRAIN", reason="fan")
    assert world.look(draining, node("MIXED", "n2")) == [NodeNoticed("n1", "draining: fan")]
    assert world.look(draining) == []
    assert world.look(node("MIXED")) == [NodeNoticed("n1", "")]
    assert world.asked[0] == ["n1", "n2"]


def test_it_is_due_rarely_and_not_without_nodes() -> None:
    world = Looked()
    assert not world.looks.due()
    world.now = 10.0
    assert world.looks.due()
    world.look()
    assert not world.looks.due()
    world.now, world.nodes = 30.0, []
    assert not world.looks.due()


def test_no_answer_is_no_news() -> None:
    world = Looked()
    world.look(node("MIXED+DRAIN"))
    world.answer = SlurmUnavailable("no answer")
    asyncio.run(world.looks.look())
    assert world.look(node("MIXED+DRAIN")) == []


def test_others_nodes_and_those_that_are_no_longer_ours_are_left_out() -> None:
    world = Looked(["n1"])
    assert world.look(node("DOWN", "n9"), node("DOWN")) == [NodeNoticed("n1", "down")]
    world.nodes = ["n2"]
    world.look(node("MIXED", "n2"))
    world.nodes = ["n1"]
    assert world.look(node("DOWN")) == [NodeNoticed("n1", "down")]


def test_what_runs_there_goes_on_and_the_journal_knows() -> None:
    world = World()
    world.join("a")
    world.join("b")
    world.run(3)
    before = world.serving()
    world.take(NodeNoticed("node-b", "draining: fan"))
    world.run(2)
    assert world.serving() == before
    agent = world.control.members.agents["b"]
    assert agent.node_words == "draining: fan" and agent.leaves_at is None
    records = [a.record for a in world.log if isinstance(a, Record)]
    assert {"event": "node", "fragment": "b", "source": "draining: fan"} in records
    world.take(NodeNoticed("node-b", ""))
    assert agent.node_words == ""
