"""The controller's mind: from what is heard to what is done; no clock, socket, file or process.

`handle(now, event)` is the only mutator. Each event changes what is known (members, workers, the
installed gear), then `_settle` asks the policy and moves the shift on as far as it goes.

Invariants: at most one shift is under way; epochs only grow; a gear is serving only while all of
its workers are alive; every action of an epoch comes after that epoch's record in the journal.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flexslurm.control.actions import Action, Detach, OpenEpoch, Record, Say, Send
from flexslurm.control.events import (
    ControlSettings,
    Cordon,
    EpochBroken,
    Event,
    Heard,
    PilotGone,
    PilotLeaving,
    Planner,
    ServiceState,
    ShiftReport,
    Tick,
    Unreachable,
)
from flexslurm.control.members import (
    AgentRecord,
    AgentState,
    GpuAt,
    Members,
    WorkerRecord,
    WorkerState,
    signature_of,
)
from flexslurm.control.policy import Observation, decide
from flexslurm.control.shift import Held, InstalledGear, Phase, Shift, close_epoch
from flexslurm.gear import Gear
from flexslurm.messages import (
    PROTOCOL,
    AgentBeat,
    AgentBye,
    AgentHello,
    Install,
    Installed,
    InstallFailed,
    LeaveCancelled,
    LeaveNotice,
    Message,
    Refused,
    ReleaseAgent,
    Retired,
    StopWorkers,
    Welcome,
    WorkerBeat,
    WorkerDied,
    WorkerExit,
    WorkerHello,
    WorkerStarted,
    WorkerWelcome,
)


@dataclass(slots=True)
class _Plan:
    """When to ask the policy again, and how often attempts have failed in a row."""

    at: float | None = None
    attempts: int = 0

    def soon(self, when: float) -> None:
        self.at = when if self.at is None else min(self.at, when)


@dataclass
class Control:
    """See the module's docstring; fields are read by `status`, changed here alone."""

    settings: ControlSettings
    planner: Planner
    epoch: int = 0
    members: Members = field(default_factory=Members)
    current: InstalledGear | None = None
    shift: Shift | None = None
    held: set[Held] = field(default_factory=set)
    reason: str = "waiting for the first GPUs"
    failed: str = ""
    ever_served: bool = False
    last_shift_at: float | None = None
    history: deque[ShiftReport] = field(default_factory=lambda: deque(maxlen=100))
    _plan: _Plan = field(default_factory=_Plan)

    @property
    def state(self) -> ServiceState:
        if self.failed:
            return ServiceState.FAILED
        if self.shift is not None:
            paused = self.current is None
            return (
                ServiceState.SHIFTING if self.ever_served or not paused else ServiceState.STARTING
            )
        if self.current is not None:
            return ServiceState.SERVING
        return ServiceState.WAITING if self.ever_served else ServiceState.STARTING

    def handle(self, now: float, event: Event) -> list[Action]:
        """Take one event in; returns what is to be done, in order."""
        match event:
            case Heard(sender, message):
                actions = self._hear(now, sender, message)
            case Tick():
                actions = self._find_silent(now)
            case EpochBroken(epoch, reason):
                actions = self._on_broken(now, epoch, reason)
            case Cordon(fragment, cordon):
                actions = self._on_cordon(now, fragment, cordon)
            case PilotGone(fragment, reason):
                actions = self._on_pilot_gone(now, fragment, reason)
            case Unreachable(member):
                actions = self._on_unreachable(now, member)
            case PilotLeaving(fragment, source, grace_s):
                actions = []
                for agent in self._of_fragment(fragment):
                    actions += self._on_leaving(now, agent, source, grace_s)
        return actions + self._settle(now)

    # ------------------------------------------------------------------ hearing

    def _hear(self, now: float, sender: str, message: Message) -> list[Action]:
        match message:
            case AgentHello():
                return self._on_agent_hello(now, sender, message)
            case WorkerHello():
                return self._on_worker_hello(now, sender, message)
        agent = self.members.agents.get(sender)
        if agent is not None:
            agent.heard_at = now
            return self._on_agent(now, agent, message)
        worker = self.members.worker(sender)
        if worker is not None:
            worker.heard_at = now
            return self._on_worker(now, worker, message)
        return self._on_stranger(sender, message)

    def _on_stranger(self, sender: str, message: Message) -> list[Action]:
        """A ghost or a member from before this head: it must say hello, or end."""
        if isinstance(message, WorkerBeat):
            return [Send(sender, WorkerExit(reason="this head does not know you"))]
        if isinstance(message, AgentBeat):
            return [Send(sender, self._welcome("unknown"))]
        return []

    def _welcome(self, head: str | None = None) -> Welcome:
        return Welcome(
            head=head or self.settings.head,
            beat_s=self.settings.beat_s,
            lost_s=self.settings.lost_s,
        )

    def _worker_welcome(self) -> WorkerWelcome:
        return WorkerWelcome(
            head=self.settings.head, beat_s=self.settings.beat_s, lost_s=self.settings.lost_s
        )

    def _on_agent_hello(self, now: float, sender: str, hello: AgentHello) -> list[Action]:
        refusal = self._refusal(sender, hello)
        if refusal:
            return [
                Send(sender, Refused(reason=refusal)),
                Say(f"refused an agent: {refusal}", True),
            ]
        known = hello.incarnation in self.members.agents
        actions: list[Action] = []
        for ghost in self.members.join(hello, now):
            actions += self._agent_is_gone(now, ghost, "it was started again")
        actions.append(Send(sender, self._welcome()))
        if not known:
            self.failed = ""
            self._plan.attempts = 0
            settle = self.settings.join_settle_s
            self._plan.soon(now + settle)
            actions.append(
                Say(f"{hello.fragment} on {hello.node} joined: {len(hello.gpus)} {hello.gpu_type}")
            )
        return actions

    def _refusal(self, sender: str, hello: AgentHello) -> str:
        if hello.protocol != PROTOCOL:
            return (
                f"{hello.fragment} speaks protocol {hello.protocol}, the head {PROTOCOL}: "
                "the installed versions of flexslurm differ"
            )
        if hello.gpu_type not in self.settings.gpu_types:
            known = ", ".join(sorted(self.settings.gpu_types))
            return f"GPU type '{hello.gpu_type}' is not in the site file (it has {known})"
        return "" if hello.incarnation == sender else "the hello is not the sender's own"

    def _on_worker_hello(self, now: float, sender: str, hello: WorkerHello) -> list[Action]:
        agent = self.members.agents.get(hello.agent)
        if agent is None or hello.protocol != PROTOCOL or hello.worker != sender:
            return [Send(sender, WorkerExit(reason="its agent is not known here"))]
        known = agent.workers.get(hello.gpu)
        if known is not None and known.worker != sender and known.state is WorkerState.READY:
            return [Send(sender, WorkerExit(reason=f"GPU {hello.gpu} has another worker"))]
        at = GpuAt(agent.id, hello.gpu)
        agent.workers[hello.gpu] = WorkerRecord(sender, at, WorkerState.READY, now, hello.pid)
        return [Send(sender, self._worker_welcome())]

    def _on_agent(self, now: float, agent: AgentRecord, message: Message) -> list[Action]:
        match message:
            case LeaveNotice(source=source, grace_s=grace_s):
                return self._on_leaving(now, agent, source, grace_s)
            case LeaveCancelled(reason=reason) if agent.state is AgentState.LEAVING:
                agent.state, agent.leaves_at = AgentState.READY, None
                self._plan.soon(now)
                return [Say(f"{agent.name} stays: {reason}")]
            case WorkerStarted(gpu=gpu, worker=worker):
                if gpu not in agent.workers:
                    at = GpuAt(agent.id, gpu)
                    agent.workers[gpu] = WorkerRecord(worker, at, WorkerState.STARTING, now)
            case WorkerDied():
                return self._on_worker_died(now, agent, message)
            case AgentBeat():
                return [Send(agent.id, self._welcome())]
            case AgentBye(reason=reason):
                self.members.drop(agent.id)
                return self._agent_is_gone(now, agent, reason)
        return []

    def _on_leaving(
        self, now: float, agent: AgentRecord, source: str, grace_s: float
    ) -> list[Action]:
        leaves_at = now + grace_s
        first = agent.state is not AgentState.LEAVING
        agent.state = AgentState.LEAVING
        agent.leaves_at = leaves_at if first else min(agent.leaves_at or leaves_at, leaves_at)
        if not first:
            return []
        agent.leave_source = source
        self._plan.soon(now + self.settings.loss_settle_s)
        self._fail_shift_over(agent, f"{agent.name} must leave")
        return [
            Record({"event": "leaving", "fragment": agent.hello.fragment, "source": source}),
            Say(f"{agent.name} leaves in {grace_s:.0f} s ({source})", True),
        ]

    def _fail_shift_over(self, agent: AgentRecord, why: str) -> None:
        if self.shift is not None and agent.id in {g.agent for g in self.shift.placement.values()}:
            self.shift.fail(why)

    def _on_worker_died(self, now: float, agent: AgentRecord, died: WorkerDied) -> list[Action]:
        record = agent.workers.get(died.gpu)
        expected = record is not None and record.state is WorkerState.STOPPING
        if record is not None and record.worker == died.worker:
            del agent.workers[died.gpu]
        actions = self._worker_is_gone(now, died.worker)
        if expected:
            return actions
        how = f"exit code {died.exit_code}" if died.exit_code is not None else "unknown exit"
        detail = f": {died.reason}" if died.reason else ""
        if record is None or record.state is WorkerState.STARTING:
            self._blame(agent, f"a worker died at its start ({how}{detail})")
            self._fail_shift_over(agent, f"a worker of {agent.name} died at its start")
        text = f"the worker on GPU {died.gpu} of {agent.name} died ({how}{detail})"
        return [*actions, Say(text, warning=True)]

    def _on_worker(self, now: float, worker: WorkerRecord, message: Message) -> list[Action]:
        shift = self.shift
        match message:
            case WorkerBeat():
                return [Send(worker.worker, self._worker_welcome())]
            case Retired(epoch=epoch):
                self.held.discard(Held(worker.worker, epoch))
            case Installed(epoch=epoch) if shift is not None and epoch == shift.epoch:
                shift.on_installed(worker.worker)
            case InstallFailed(epoch=epoch) if shift is not None and epoch == shift.epoch:
                shift.fail(message.reason, worker.at.agent, fatal=message.fatal)
        return []

    # ------------------------------------------------------------------ losses

    def _find_silent(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for agent in list(self.members.agents.values()):
            silent = now - agent.heard_at
            if silent >= self.settings.lost_s:
                self.members.drop(agent.id)
                actions += self._agent_is_gone(now, agent, f"silent for {silent:.1f} s")
        for worker in list(self.members.workers()):
            # a worker whose agent beats but which says nothing itself hangs: three times the bound,
            # because a long call into a library may hold its control thread
            if (
                worker.state is WorkerState.READY
                and now - worker.heard_at >= 3 * self.settings.lost_s
            ):
                worker.state = WorkerState.STOPPING
                stop = StopWorkers(gpus=(worker.at.gpu,), grace_s=0.0)
                actions += [Send(worker.at.agent, stop), *self._worker_is_gone(now, worker.worker)]
        return actions

    def _on_unreachable(self, now: float, member: str) -> list[Action]:
        """Its connection is closed: taken for lost at once. If it lives, it says hello again."""
        agent = self.members.drop(member)
        if agent is not None:
            return self._agent_is_gone(now, agent, "its connection is closed")
        worker = self.members.worker(member)
        if worker is None:
            return []
        del self.members.agents[worker.at.agent].workers[worker.at.gpu]
        return self._worker_is_gone(now, member)

    def _agent_is_gone(self, now: float, agent: AgentRecord, why: str) -> list[Action]:
        """The agent is out of `members` already."""
        actions: list[Action] = [
            Record({"event": "lost", "fragment": agent.hello.fragment, "why": why}),
            Say(f"{agent.name} is gone: {why}", warning=True),
        ]
        for worker in list(agent.workers.values()):
            actions += self._worker_is_gone(now, worker.worker)
        self._plan.soon(now + self.settings.loss_settle_s)
        return actions

    def _worker_is_gone(self, now: float, worker: str) -> list[Action]:
        self.held = {held for held in self.held if held.worker != worker}
        if self.shift is not None:
            self.shift.on_worker_gone(worker)
        if self.current is not None and worker in self.current.workers.values():
            return self._on_broken(now, self.current.epoch, "a worker died")
        return []

    def _on_broken(self, now: float, epoch: int, reason: str) -> list[Action]:
        """The serving gear cannot go on: pause at once, then find what fits."""
        if self.current is None or self.current.epoch != epoch:
            return []
        broken, self.current = self.current, None
        self._plan.soon(now + self.settings.loss_settle_s)
        return [
            Detach(reason),
            *close_epoch(broken.epoch, self.held),
            Record({"event": "broken", "epoch": epoch, "why": reason}),
            Say(f"epoch {epoch} is broken: {reason}", warning=True),
        ]

    def _on_cordon(self, now: float, fragment: str, cordon: bool) -> list[Action]:
        (self.members.cordoned.add if cordon else self.members.cordoned.discard)(fragment)
        self._plan.soon(now)
        word = "cordoned" if cordon else "in use again"
        return [
            Record({"event": "cordon", "fragment": fragment, "cordon": cordon}),
            Say(f"{fragment} is {word}"),
        ]

    def _of_fragment(self, fragment: str) -> list[AgentRecord]:
        return [a for a in self.members.agents.values() if a.hello.fragment == fragment]

    def _on_pilot_gone(self, now: float, fragment: str, reason: str) -> list[Action]:
        actions: list[Action] = []
        for agent in self._of_fragment(fragment):
            self.members.drop(agent.id)
            actions += self._agent_is_gone(now, agent, reason)
        return actions

    def _blame(self, agent: AgentRecord, why: str) -> None:
        agent.failures += 1
        agent.failure = why
        if agent.failures >= self.settings.max_failures and agent.state is AgentState.READY:
            agent.state = AgentState.FAULTY

    # ------------------------------------------------------------------ deciding

    def _settle(self, now: float) -> list[Action]:
        """Move the shift on; when none is under way and a question is due, ask the policy."""
        actions = self._advance(now)
        if self.shift is None and self._plan.at is not None and now >= self._plan.at:
            self._plan.at = None
            actions += self._decide(now)
            actions += self._advance(now)
        return actions + self._release_leaving()

    def _decide(self, now: float) -> list[Action]:
        members, current = self.members, self.current
        if self.failed:
            return []
        decision = decide(
            Observation(
                current=current.gear if current is not None else None,
                lost=(),
                leaving=self._leaving(),
                best=self.planner.choose(signature_of(members.usable())),
                best_with_leaving=self.planner.choose(signature_of(members.usable(leaving=True))),
                since_shift_s=None if self.last_shift_at is None else now - self.last_shift_at,
            ),
            self.settings.policy,
        )
        self.reason = decision.reason
        if decision.look_again_s is not None:
            self._plan.soon(now + decision.look_again_s)
        if decision.gear is None:
            return [Say(decision.reason)]
        return self._start(now, decision.gear, decision.reason)

    def _leaving(self) -> tuple[str, ...]:
        """Members of the present gear that must leave or are cordoned."""
        if self.current is None:
            return ()
        agents = {at.agent for at in self.current.placement.values()}
        kept = {agent.id for agent in self.members.usable()}
        return tuple(sorted(self.members.agents[a].name for a in agents - kept))

    def _start(self, now: float, gear: Gear, reason: str) -> list[Action]:
        ready = self.members.usable()
        if signature_of(ready).covers(gear.signature):
            agents = ready
        else:
            agents = self.members.usable(leaving=True)
        placement = self.planner.place(gear, agents, self.current)
        self.epoch += 1
        self.shift = Shift(
            epoch=self.epoch,
            gear=gear,
            placement=placement,
            old=self.current,
            reason=reason,
            started_at=now,
            settings=self.settings.install,
            pacing=self.planner.pacing(gear),
        )
        record = {
            "event": "epoch", "epoch": self.epoch, "gear": gear.name, "layout": gear.layout(),
            "signature": str(gear.signature), "reason": reason,
        }  # fmt: skip
        return [Record(record), Say(f"epoch {self.epoch}: {gear.layout()}: {reason}")]

    def _advance(self, now: float) -> list[Action]:
        shift = self.shift
        if shift is None:
            return []
        actions = shift.advance(now, self.members, self.held)
        for action in actions:
            if isinstance(action, Send) and isinstance(action.message, Install):
                self.held.add(Held(action.to, shift.epoch))
        if shift.closed_old:
            self.current = None
        if shift.over:
            self.shift = None
            finish = self._commit if shift.phase is Phase.COMMIT else self._aborted
            actions += finish(now, shift)
        return actions

    def _commit(self, now: float, shift: Shift) -> list[Action]:
        assert shift.target is not None
        self.current = shift.target
        self.ever_served = True
        self._plan.attempts = 0
        self.last_shift_at = now
        self._note(now, shift, "committed")
        peers = tuple(
            shift.target.peers(self.members, replica) for replica in range(len(shift.gear.replicas))
        )
        self._plan.soon(now)  # what came or left meanwhile
        return [
            Record({"event": "committed", "epoch": shift.epoch, "took_s": now - shift.started_at}),
            OpenEpoch(shift.epoch, shift.gear, peers),
            Say(f"epoch {shift.epoch} serves after {now - shift.started_at:.2f} s"),
        ]

    def _release_leaving(self) -> list[Action]:
        """Give GPUs that must go and are no longer used back at once: others wait for them."""
        if self.current is None or self.shift is not None:
            return []
        used = {at.agent for at in self.current.placement.values()}
        actions: list[Action] = []
        for agent in self.members.agents.values():
            if agent.state is AgentState.LEAVING and agent.id not in used and not agent.released:
                agent.released = True
                release = ReleaseAgent(reason=f"given back ({agent.leave_source})", give_back=True)
                actions.append(Send(agent.id, release))
        return actions

    def _aborted(self, now: float, shift: Shift) -> list[Action]:
        self._note(now, shift, f"aborted: {shift.failure}")
        if shift.blamed is not None and (agent := self.members.agents.get(shift.blamed)):
            self._blame(agent, shift.failure)
        if shift.fatal:
            self.failed = self.reason = shift.failure
        self._plan.attempts += 1
        wait = min(0.1 * 2**self._plan.attempts, 30.0)
        self._plan.soon(now + wait)
        return [
            Record({"event": "aborted", "epoch": shift.epoch, "why": shift.failure}),
            Say(f"epoch {shift.epoch} is given up: {shift.failure}", warning=True),
        ]

    def _note(self, now: float, shift: Shift, outcome: str) -> None:
        before = shift.old.gear.layout() if shift.old is not None else "none"
        self.history.append(
            ShiftReport(
                epoch=shift.epoch,
                why=shift.reason,
                before=before,
                after=shift.gear.layout(),
                started_at=shift.started_at,
                took_s=now - shift.started_at,
                outcome=outcome,
            )
        )


def restore_epoch(records: Sequence[Mapping[str, Any]]) -> tuple[int, frozenset[str]]:
    """The highest epoch of a journal and the fragments that were cordoned, for a restarted head."""
    epoch = max((int(r["epoch"]) for r in records if r.get("event") == "epoch"), default=0)
    cordoned: set[str] = set()
    for record in records:
        if record.get("event") == "cordon":
            fragment = str(record["fragment"])
            (cordoned.add if record["cordon"] else cordoned.discard)(fragment)
    return epoch, frozenset(cordoned)
