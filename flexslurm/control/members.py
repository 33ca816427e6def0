"""Who is here: agents, their GPUs and workers, as the head knows them; never acts on them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from flexslurm.control.cards import Cards, weigh_cards
from flexslurm.gear import Shape, Signature
from flexslurm.messages import AgentHello


class AgentState(StrEnum):
    """What may be done with an agent's GPUs."""

    READY = "ready"
    LEAVING = "leaving"
    FAULTY = "faulty"
    """Its installs keep failing: it is left out of planning."""


class WorkerState(StrEnum):
    """How far a worker's process is."""

    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"


class GpuAt(NamedTuple):
    """A physical GPU: the agent that holds it and its index there."""

    agent: str
    gpu: int


@dataclass(slots=True)
class WorkerRecord:
    """A worker process on one GPU. Times are the head's, in seconds."""

    worker: str
    """Its incarnation."""
    at: GpuAt
    state: WorkerState
    heard_at: float
    pid: int = 0
    data_port: int = 0
    """Where it gives out weights and KV pages, on its node's address; 0: nowhere."""
    used_bytes: int = 0
    """Of its arena: weights and KV pages, as of its last beat."""


@dataclass(slots=True)
class AgentRecord:
    """A node of a pilot, as its agent tells of it. Times are the head's, in seconds."""

    hello: AgentHello
    heard_at: float
    state: AgentState = AgentState.READY
    leaves_at: float | None = None
    leave_source: str = ""
    node_words: str = ""
    """What Slurm says of its node, where that is out of use."""
    walltime_ends_at: float | None = None
    """When Slurm ends its job in any case."""
    dismissed: bool = False
    """It leaves and its KV is parked: nothing is installed on it any more."""
    parting: bool = False
    """Its node is to be given back, while its pilot goes on."""
    released: bool = False
    """Told to end."""
    failures: int = 0
    failure: str = ""
    workers: dict[int, WorkerRecord] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return self.hello.incarnation

    @property
    def name(self) -> str:
        return f"{self.hello.fragment} on {self.hello.node}"

    @property
    def ends_at(self) -> float | None:
        """When it is gone at the latest, as far as that is known."""
        ends = [end for end in (self.leaves_at, self.walltime_ends_at) if end is not None]
        return min(ends, default=None)

    def blame(self, why: str, limit: int) -> None:
        """Count a failure that points to this agent; at the limit it is left out of planning."""
        self.failures += 1
        self.failure = why
        if self.failures >= limit and self.state is AgentState.READY:
            self.state = AgentState.FAULTY

    def absolve(self) -> None:
        """It serves in a gear: only failures in a row make it faulty."""
        if self.state is not AgentState.FAULTY:
            self.failures, self.failure = 0, ""


class Members:
    """All agents by incarnation. Invariant: one agent for each (fragment, node)."""

    def __init__(self, promised: Mapping[str, int] | None = None) -> None:
        """`promised`: bytes of a card that gears are planned with, by type."""
        self.promised = dict(promised or {})
        self.agents: dict[str, AgentRecord] = {}
        self.cordoned: set[str] = set()
        self.draining: set[str] = set()
        """Cordoned fragments that end once nothing of theirs is used."""
        self.walltime_ends_at: dict[str, float] = {}
        """Of fragments, as Slurm tells it: agents learn it from Slurm 23.02 on only."""

    def stays(self, agent: str) -> bool:
        """Whether it is here and not about to be taken: what fails there says something."""
        found = self.agents.get(agent)
        return found is not None and found.state is not AgentState.LEAVING

    def join(self, hello: AgentHello, now: float) -> list[AgentRecord]:
        """Add an agent; returns the ghosts it replaces: earlier ones of its fragment and node."""
        ghosts = [
            agent
            for agent in self.agents.values()
            if agent.hello.fragment == hello.fragment
            and agent.hello.node == hello.node
            and agent.id != hello.incarnation
        ]
        for ghost in ghosts:
            del self.agents[ghost.id]
        if hello.incarnation in self.agents:
            self.agents[hello.incarnation].heard_at = now
        else:
            left = hello.walltime_s
            told = self.walltime_ends_at.get(hello.fragment)
            ends_at = told if left is None else now + left
            self.agents[hello.incarnation] = AgentRecord(hello, now, walltime_ends_at=ends_at)
        return ghosts

    def drop(self, agent: str) -> AgentRecord | None:
        return self.agents.pop(agent, None)

    def of_fragment(self, fragment: str) -> list[AgentRecord]:
        return [agent for agent in self.agents.values() if agent.hello.fragment == fragment]

    def worker(self, worker: str) -> WorkerRecord | None:
        return next((w for w in self.workers() if w.worker == worker), None)

    def workers(self) -> Iterable[WorkerRecord]:
        return (w for agent in self.agents.values() for w in agent.workers.values())

    def worker_at(self, at: GpuAt) -> WorkerRecord | None:
        agent = self.agents.get(at.agent)
        return agent.workers.get(at.gpu) if agent is not None else None

    def alive(self, worker: str) -> bool:
        record = self.worker(worker)
        return record is not None and record.state is not WorkerState.STOPPING

    def usable(self, *, leaving: bool = False) -> list[AgentRecord]:
        """Agents a gear may use, in a fixed order; with `leaving`, those on notice too."""
        left_out = self.cards().left_out
        return sorted(
            (agent for agent in self._at_hand(leaving=leaving) if agent.id not in left_out),
            key=lambda agent: (agent.hello.fragment, agent.hello.node, agent.id),
        )

    def cards(self) -> Cards:
        """What the cards have, of all agents that a gear could use otherwise."""
        at_hand = self._at_hand(leaving=True)
        staying = [agent for agent in at_hand if agent.state is AgentState.READY]
        leaving = [agent for agent in at_hand if agent.state is AgentState.LEAVING]
        return weigh_cards(staying, leaving, self.promised)

    def _at_hand(self, *, leaving: bool) -> list[AgentRecord]:
        """Those that could be used by what they are doing."""
        states = {AgentState.READY} | ({AgentState.LEAVING} if leaving else set())
        return [
            agent
            for agent in self.agents.values()
            if agent.state in states
            and not agent.dismissed
            and not agent.parting
            and agent.hello.fragment not in self.cordoned
        ]

    def arena_bytes(self, at: GpuAt, fraction: float) -> int:
        """What a worker on this GPU may use: `fraction` of the bytes that its card has."""
        gpus = self.agents[at.agent].hello.gpus
        return int(next(gpu.memory_bytes for gpu in gpus if gpu.index == at.gpu) * fraction)


def signature_of(agents: Iterable[AgentRecord]) -> Signature:
    """The allocation these agents hold."""
    return Signature.of(
        Shape(agent.hello.gpu_type, len(agent.hello.gpus)) for agent in agents if agent.hello.gpus
    )
