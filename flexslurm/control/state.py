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
    EpochBroken,
    Event,
    Planner,
    ServiceState,
    ShiftReport,
)
from flexslurm.control.members import (
    AgentRecord,
    AgentState,
    Members,
    WorkerRecord,
    signature_of,
)
from flexslurm.control.policy import Observation, decide
from flexslurm.control.roll import (
    AgentGone,
    Change,
    CordonChanged,
    Joined,
    Leaves,
    Roll,
    Stays,
    WorkerFailedToStart,
    WorkerGone,
    WorkerSaid,
)
from flexslurm.control.shift import Held, InstalledGear, Phase, Shift, close_epoch
from flexslurm.gear import Gear
from flexslurm.messages import (
    Install,
    Installed,
    InstallFailed,
    Message,
    ReleaseAgent,
    Retired,
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

    def __post_init__(self) -> None:
        self._roll = Roll(self.settings, self.members)

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
        if isinstance(event, EpochBroken):
            actions = self._on_broken(now, event.epoch, event.reason)
        else:
            told = self._roll.take(now, event)
            actions = told.actions
            for change in told.changes:
                actions += self._on_change(now, change)
        return actions + self._settle(now)

    # ------------------------------------------------------------------ changes

    def _on_change(self, now: float, change: Change) -> list[Action]:
        settings = self.settings
        match change:
            case Joined():
                self.failed = ""
                self._plan.attempts = 0
                self._plan.soon(now + settings.join_settle_s)
            case Leaves(agent):
                self._plan.soon(now + settings.loss_settle_s)
                self._fail_shift_over(agent, f"{agent.name} must leave")
            case Stays() | CordonChanged():
                self._plan.soon(now)
            case AgentGone():
                self._plan.soon(now + settings.loss_settle_s)
            case WorkerGone(worker):
                return self._worker_is_gone(now, worker)
            case WorkerFailedToStart(agent):
                self._fail_shift_over(agent, f"a worker of {agent.name} died at its start")
            case WorkerSaid(worker, message):
                self._on_worker(worker, message)
        return []

    def _fail_shift_over(self, agent: AgentRecord, why: str) -> None:
        if self.shift is not None and agent.id in {g.agent for g in self.shift.placement.values()}:
            self.shift.fail(why)

    def _on_worker(self, worker: WorkerRecord, message: Message) -> None:
        shift = self.shift
        match message:
            case Retired(epoch=epoch):
                self.held.discard(Held(worker.worker, epoch))
            case Installed(epoch=epoch) if shift is not None and epoch == shift.epoch:
                shift.on_installed(worker.worker)
            case InstallFailed(epoch=epoch) if shift is not None and epoch == shift.epoch:
                shift.fail(message.reason, worker.at.agent, fatal=message.fatal)

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
            agent.blame(shift.failure, self.settings.max_failures)
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
