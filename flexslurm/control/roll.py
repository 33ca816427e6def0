"""The roll of members: takes in what they say about themselves, and answers; never decides gears.

`take(now, event)` changes `Members` and returns the answers with the changes that matter to whoever
decides: who came, who leaves, what died, what a worker says about an epoch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from flexslurm.control.actions import Action, Record, Say, Send
from flexslurm.control.cards import short_words
from flexslurm.control.endings import Endings
from flexslurm.control.events import (
    ControlSettings,
    Cordon,
    Heard,
    NodeNoticed,
    PartNode,
    PilotEnds,
    PilotGone,
    PilotLeaving,
    PilotStays,
    RollEvent,
    Tick,
    Unreachable,
)
from flexslurm.control.members import AgentRecord, AgentState, GpuAt, Members, WorkerRecord
from flexslurm.control.members import WorkerState as State
from flexslurm.messages import (
    PROTOCOL,
    AgentBeat,
    AgentBye,
    AgentHello,
    LeaveNotice,
    Message,
    Refused,
    StopWorkers,
    Welcome,
    WorkerBeat,
    WorkerDied,
    WorkerExit,
    WorkerHello,
    WorkerStarted,
    WorkerWelcome,
)


@dataclass(frozen=True, slots=True)
class Joined:
    """An agent that was not known is here."""

    agent: AgentRecord


@dataclass(frozen=True, slots=True)
class Leaves:
    """An agent is on notice; told once for each notice that is not taken back."""

    agent: AgentRecord


@dataclass(frozen=True, slots=True)
class Stays:
    """The notice is taken back."""

    agent: AgentRecord


@dataclass(frozen=True, slots=True)
class AgentGone:
    """It is out of `Members`; a `WorkerGone` for each of its workers follows."""

    agent: AgentRecord


@dataclass(frozen=True, slots=True)
class WorkerGone:
    worker: str
    with_node: bool = False
    """Its whole node is gone: nothing that it did is to blame."""


@dataclass(frozen=True, slots=True)
class WorkerFailedToStart:
    agent: AgentRecord


@dataclass(frozen=True, slots=True)
class CordonChanged:
    fragment: str


@dataclass(frozen=True, slots=True)
class WorkerSaid:
    """What a worker says of an epoch."""

    worker: WorkerRecord
    message: Message


Change = (
    Joined
    | Leaves
    | Stays
    | AgentGone
    | WorkerGone
    | WorkerFailedToStart
    | CordonChanged
    | WorkerSaid
)


@dataclass(slots=True)
class Told:
    """What one event comes to."""

    actions: list[Action] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)

    def __iadd__(self, other: Told) -> Told:
        self.actions += other.actions
        self.changes += other.changes
        return self


class Roll:
    """See the module's docstring."""

    def __init__(self, settings: ControlSettings, members: Members) -> None:
        self._settings, self._members = settings, members
        self._endings = Endings()

    def take(self, now: float, event: RollEvent) -> Told:
        """Take one event in."""
        match event:
            case Heard(sender, message):
                return self._hear(now, sender, message)
            case Tick():
                return self._find_silent(now)
            case Cordon():
                return self._on_cordon(event)
            case Unreachable(member):
                return self._on_unreachable(member)
            case PilotGone() | PilotLeaving() | PilotStays():
                return self._on_pilot(now, event)
            case PilotEnds() | NodeNoticed() | PartNode():
                return self._on_slurm(now, event)

    def _on_slurm(self, now: float, event: PilotEnds | NodeNoticed | PartNode) -> Told:
        match event:
            case NodeNoticed():
                return self._on_node(event)
            case PilotEnds(fragment, ends_in_s):
                self._members.walltime_ends_at[fragment] = now + ends_in_s
                for agent in self._members.of_fragment(fragment):
                    agent.walltime_ends_at = now + ends_in_s
                return Told()
            case PartNode(node):
                return self._on_part(node)

    def _on_pilot(self, now: float, event: PilotGone | PilotLeaving | PilotStays) -> Told:
        told = Told()
        if isinstance(event, PilotGone):  # another run of it ends at another time
            self._members.walltime_ends_at.pop(event.fragment, None)
            self._endings.gone(event.fragment)
        agents = self._members.of_fragment(event.fragment)
        if isinstance(event, PilotLeaving) and not agents and not event.present:
            self._endings.early(event.fragment, event.source, now + event.grace_s)
        for agent in agents:
            if isinstance(event, PilotGone):
                told += self._drop(agent, event.reason)
            elif isinstance(event, PilotStays):
                told += self._on_staying(agent, event.reason)
            else:
                told += self._on_leaving(now, agent, event.source, event.grace_s)
        return told

    # ------------------------------------------------------------------ hearing

    def _hear(self, now: float, sender: str, message: Message) -> Told:
        match message:
            case AgentHello():
                return self._on_agent_hello(now, sender, message)
            case WorkerHello():
                return self._on_worker_hello(now, sender, message)
        agent = self._members.agents.get(sender)
        if agent is not None:
            agent.heard_at = now
            return self._on_agent(now, agent, message)
        worker = self._members.worker(sender)
        if worker is None:
            return self._on_stranger(sender, message)
        worker.heard_at = now
        if isinstance(message, WorkerBeat):
            worker.used_bytes = message.arena_used_bytes
            return Told([Send(sender, self._worker_welcome())])
        return Told(changes=[WorkerSaid(worker, message)])

    def _on_stranger(self, sender: str, message: Message) -> Told:
        """A ghost or a member from before this head: it must say hello, or end."""
        if isinstance(message, WorkerBeat):
            return Told([Send(sender, WorkerExit(reason="this head does not know you"))])
        if isinstance(message, AgentBeat):
            return Told([Send(sender, self._welcome("unknown"))])
        return Told()

    def _welcome(self, head: str | None = None) -> Welcome:
        settings = self._settings
        return Welcome(head=head or settings.head, beat_s=settings.beat_s, lost_s=settings.lost_s)

    def _worker_welcome(self) -> WorkerWelcome:
        settings = self._settings
        return WorkerWelcome(head=settings.head, beat_s=settings.beat_s, lost_s=settings.lost_s)

    def _on_agent_hello(self, now: float, sender: str, hello: AgentHello) -> Told:
        refusal = self._refusal(sender, hello)
        if refusal:
            return Told(
                [Send(sender, Refused(reason=refusal)), Say(f"refused an agent: {refusal}", True)]
            )
        known = hello.incarnation in self._members.agents
        told = Told()
        for ghost in self._members.join(hello, now):
            told += self._gone(ghost, "it was started again")
        told.actions.append(Send(sender, self._welcome()))
        if not known:
            told.changes.append(Joined(self._members.agents[hello.incarnation]))
            what = f"{len(hello.gpus)} {hello.gpu_type}"
            told.actions.append(Say(f"{hello.fragment} on {hello.node} joined: {what}"))
            short = short_words(hello, self._members.promised)
            told.actions += [Say(short, warning=True)] if short else []
            early = self._endings.met(now, hello.fragment)
            if early is not None:
                told += self._on_leaving(now, self._members.agents[hello.incarnation], *early)
        return told

    def _refusal(self, sender: str, hello: AgentHello) -> str:
        if hello.protocol != PROTOCOL:
            return (
                f"{hello.fragment} speaks protocol {hello.protocol}, the head {PROTOCOL}: "
                "the installed versions of flexslurm differ"
            )
        if hello.gpu_type not in self._settings.gpu_types:
            known = ", ".join(sorted(self._settings.gpu_types))
            return f"GPU type '{hello.gpu_type}' is not in the site file (it has {known})"
        return "" if hello.incarnation == sender else "the hello is not the sender's own"

    def _on_worker_hello(self, now: float, sender: str, hello: WorkerHello) -> Told:
        agent = self._members.agents.get(hello.agent)
        if agent is None or hello.protocol != PROTOCOL or hello.worker != sender:
            return Told([Send(sender, WorkerExit(reason="its agent is not known here"))])
        known = agent.workers.get(hello.gpu)
        if known is not None and known.worker != sender and known.state is State.READY:
            return Told([Send(sender, WorkerExit(reason=f"GPU {hello.gpu} has another worker"))])
        agent.workers[hello.gpu] = WorkerRecord(
            worker=sender,
            at=GpuAt(agent.id, hello.gpu),
            state=State.READY,
            heard_at=now,
            pid=hello.pid,
            data_port=hello.data_port,
        )
        return Told([Send(sender, self._worker_welcome())])

    def _on_agent(self, now: float, agent: AgentRecord, message: Message) -> Told:
        match message:
            case LeaveNotice(source=source, grace_s=grace_s):
                return self._on_leaving(now, agent, source, grace_s)
            case WorkerStarted(gpu=gpu, worker=worker):
                if gpu not in agent.workers:
                    at = GpuAt(agent.id, gpu)
                    agent.workers[gpu] = WorkerRecord(worker, at, State.STARTING, now)
            case WorkerDied():
                return self._on_worker_died(agent, message)
            case AgentBeat():
                return Told([Send(agent.id, self._welcome())])
            case AgentBye(reason=reason):
                return self._drop(agent, reason)
        return Told()

    def _on_leaving(self, now: float, agent: AgentRecord, source: str, grace_s: float) -> Told:
        ending, fresh, news = self._endings.take(
            now, agent.hello.fragment, agent.id, source, grace_s, agent.walltime_ends_at
        )
        agent.leaves_at = self._endings.deadline(agent.id)
        record = {
            "event": "leaving" if fresh else "leaving too", "fragment": ending.fragment,
            "source": source, "cause": str(ending.cause),
            "ends_in_s": round(ending.ends_at - now, 3), "after_s": round(ending.heard[source], 3),
        }  # fmt: skip
        told = Told([Record(record)] if news else [])
        if agent.state is AgentState.LEAVING:
            return told
        agent.state, agent.leave_source = AgentState.LEAVING, source
        left_s = ending.ends_at - now
        told.actions.append(Say(f"{agent.name} leaves in {left_s:.0f} s ({source})", True))
        told.changes.append(Leaves(agent))
        return told

    def _on_staying(self, agent: AgentRecord, why: str) -> Told:
        """It was on notice and is not any more; one that is empty has been told to end."""
        if agent.state is not AgentState.LEAVING or agent.released:
            return Told()
        self._endings.stays(agent.hello.fragment, agent.id)
        agent.state, agent.leaves_at, agent.leave_source = AgentState.READY, None, ""
        record = {"event": "stays", "fragment": agent.hello.fragment, "why": why}
        return Told([Record(record), Say(f"{agent.name} stays: {why}")], [Stays(agent)])

    def _on_worker_died(self, agent: AgentRecord, died: WorkerDied) -> Told:
        record = agent.workers.get(died.gpu)
        expected = record is not None and record.state is State.STOPPING
        if record is not None and record.worker == died.worker:
            del agent.workers[died.gpu]
        told = Told(changes=[WorkerGone(died.worker)])
        if expected:
            return told
        how = f"exit code {died.exit_code}" if died.exit_code is not None else "unknown exit"
        detail = f": {died.reason}" if died.reason else ""
        if record is None or record.state is State.STARTING:
            agent.blame(f"a worker died at its start ({how}{detail})", self._settings.max_failures)
            told.changes.append(WorkerFailedToStart(agent))
        text = f"the worker on GPU {died.gpu} of {agent.name} died ({how}{detail})"
        told.actions.append(Say(text, warning=True))
        return told

    def _on_part(self, node: str) -> Told:
        told = Told()
        for agent in self._members.agents.values():
            if agent.hello.node == node and not agent.parting:
                agent.parting = True
                told.actions.append(Say(f"{agent.name} is to be given back"))
                told.changes.append(CordonChanged(agent.hello.fragment))
        return told

    def _on_cordon(self, event: Cordon) -> Told:
        fragment, members = event.fragment, self._members
        (members.cordoned.add if event.cordon else members.cordoned.discard)(fragment)
        drain = event.cordon and event.drain
        (members.draining.add if drain else members.draining.discard)(fragment)
        word = "drained" if drain else "cordoned" if event.cordon else "in use again"
        record = {
            "event": "cordon", "fragment": fragment, "cordon": event.cordon, "drain": drain
        }  # fmt: skip
        if event.gone:  # nobody is in use again, and nobody who decides need know
            return Told([Record(record)])
        return Told([Record(record), Say(f"{fragment} is {word}")], [CordonChanged(fragment)])

    def _on_node(self, event: NodeNoticed) -> Told:
        told = Told()
        for agent in self._members.agents.values():
            if agent.hello.node == event.node:
                agent.node_words = event.words
                state = event.words or "in use again"
                record = {"event": "node", "fragment": agent.hello.fragment, "source": state}
                said = Say(f"Slurm: the node of {agent.name} is {state}", bool(event.words))
                told += Told([Record(record), said])
        return told

    # ------------------------------------------------------------------ losses

    def _find_silent(self, now: float) -> Told:
        told, lost_s, overstay_s = Told(), self._settings.lost_s, self._settings.overstay_s
        for agent in list(self._members.agents.values()):
            silent = now - agent.heard_at
            if silent >= lost_s:
                told += self._drop(agent, f"silent for {silent:.1f} s")
            elif agent.leaves_at is not None and now >= agent.leaves_at + overstay_s:
                told += self._on_staying(agent, f"it is here {overstay_s:g} s after it had to go")
        for worker in list(self._members.workers()):
            # a worker whose agent beats but which says nothing itself hangs: three times the bound,
            # because a long call into a library may hold its control thread
            if worker.state is State.READY and now - worker.heard_at >= 3 * lost_s:
                worker.state = State.STOPPING
                stop = StopWorkers(gpus=(worker.at.gpu,), grace_s=0.0)
                told += Told([Send(worker.at.agent, stop)], [WorkerGone(worker.worker)])
        return told

    def _on_unreachable(self, member: str) -> Told:
        """Its connection is closed: taken for lost at once. If it lives, it says hello again."""
        agent = self._members.agents.get(member)
        if agent is not None:
            return self._drop(agent, "its connection is closed")
        worker = self._members.worker(member)
        if worker is None:
            return Told()
        del self._members.agents[worker.at.agent].workers[worker.at.gpu]
        return Told(changes=[WorkerGone(member)])

    def _drop(self, agent: AgentRecord, why: str) -> Told:
        self._endings.forget(agent.id)
        self._members.drop(agent.id)
        return self._gone(agent, why)

    def _gone(self, agent: AgentRecord, why: str) -> Told:
        record = {"event": "lost", "fragment": agent.hello.fragment, "why": why}
        workers = [WorkerGone(worker.worker, with_node=True) for worker in agent.workers.values()]
        said = Say(f"{agent.name} is gone: {why}", warning=True)
        return Told([Record(record), said], [AgentGone(agent), *workers])
