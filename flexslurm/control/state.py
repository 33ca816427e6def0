"""The controller's mind: from what is heard to what is done; no clock, socket, file or process.

`handle(now, event)` is the only mutator. Each event changes what is known (members, workers, the
installed gear), then `_settle` asks the policy and moves the shift on as far as it goes.

Invariants: at most one shift is under way; epochs only grow; a gear is serving only while all of
its workers are alive; every action of an epoch comes after that epoch's record in the journal.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from flexslurm.control.actions import (
    Action,
    Detach,
    ForgetEpoch,
    PlanShift,
    Record,
    Say,
    SwitchOver,
)
from flexslurm.control.aftermath import Aftermath
from flexslurm.control.agenda import Agenda
from flexslurm.control.choices import Decision
from flexslurm.control.events import (
    ControlSettings,
    Event,
    GearPlanned,
    Measured,
    ParkedAway,
    ReplicaBroken,
    ShiftEvent,
    ShiftReport,
    ShiftWanted,
)
from flexslurm.control.farewell import Farewells
from flexslurm.control.given_back import best_at_once
from flexslurm.control.history import Decisions, report_of
from flexslurm.control.holdings import Holdings
from flexslurm.control.installed import InstalledGear, ReplicaKey
from flexslurm.control.members import AgentRecord, AgentState, Members, WorkerRecord
from flexslurm.control.moved import hear_of_moves
from flexslurm.control.observing import GearSource, Known, observe
from flexslurm.control.phases import Phase
from flexslurm.control.policy import decide
from flexslurm.control.preview import kept_replicas, place_gear, preview_shift
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
from flexslurm.control.shift import Shift
from flexslurm.control.watch import Watch
from flexslurm.gear import Gear
from flexslurm.messages import Assembled, Installed, InstallFailed, Message, Retired, ServiceState


@dataclass
class Control:
    """See the module's docstring; fields are read by `status`, changed here alone."""

    settings: ControlSettings
    planner: GearSource
    epoch: int = 0
    members: Members = field(default_factory=Members)
    current: InstalledGear | None = None
    shift: Shift | None = None
    holdings: Holdings = field(default_factory=Holdings)
    reason: str = "waiting for the first GPUs"
    failed: str = ""
    pinned: Gear | None = None
    """A gear that an operator asked for; until members change, the policy is not asked."""
    ever_served: bool = False
    last_shift_at: float | None = None
    history: deque[ShiftReport] = field(default_factory=lambda: deque(maxlen=100))
    decisions: Decisions = field(default_factory=Decisions)
    _agenda: Agenda = field(default_factory=Agenda)
    _stranded: bool = False
    """Whether the last decision found nothing to go to."""
    _best_at_once: bool = False
    """Whether an operator has given the choice back since the last decision."""

    def __post_init__(self) -> None:
        self.members.promised = dict(self.settings.memory_bytes)
        self._roll = Roll(self.settings, self.members)
        close_timeout_s = self.settings.install.close_timeout_s
        self._aftermath = Aftermath(self.members, self.holdings, close_timeout_s)
        self._farewells = Farewells(self.members, self.holdings)
        self.watch = Watch(self.settings.watch)

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
            case ReplicaBroken(replica, reason):
                actions = self._on_broken(now, replica, reason)
            case ShiftWanted(gear, reason, at_once):
                self._best_at_once = at_once and gear is None
                actions = self._on_wanted(now, gear, reason)
            case ParkedAway():
                actions = []
                if self._farewells.under_way is not None:
                    self._farewells.under_way.parked = True
            case GearPlanned():
                self._agenda.soon(now)
                actions = []
            case Measured(sample):
                actions = self.watch.lives.pass_time(now, self.members.agents.values())
                if self.watch.take(now, sample, self.current):
                    self._agenda.soon(now)
            case event if isinstance(event, ShiftEvent):
                actions = hear_of_moves(now, event, self.shift, self.history)
            case _:
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
                self.failed, self.pinned = "", None
                self._agenda.attempts = 0
                self._agenda.soon(now + settings.join_settle_s)
            case Leaves(agent):
                self.pinned, self._stranded = None, False
                self._agenda.soon(now + settings.loss_settle_s)
                self._fail_shift_over(now, agent, f"{agent.name} must leave")
                return self.watch.lives.lost(now, agent)
            case Stays():
                self.pinned = None
                self._agenda.soon(now)
                return self._farewells.cancel()
            case CordonChanged():
                self.pinned = None
                self._agenda.soon(now)
            case AgentGone(agent):
                self.pinned = None
                self._agenda.soon(now + settings.loss_settle_s)
                if agent.state is not AgentState.LEAVING:
                    return self.watch.lives.lost(now, agent)
            case WorkerGone(worker, with_node):
                return self._worker_is_gone(now, worker, with_node=with_node)
            case WorkerFailedToStart(agent):
                self._fail_shift_over(now, agent, f"a worker of {agent.name} died at its start")
            case WorkerSaid(worker, message):
                self._on_worker(now, worker, message)
        return []

    def _fail_shift_over(self, now: float, agent: AgentRecord, why: str) -> None:
        if self.shift is not None and agent.id in {g.agent for g in self.shift.placement.values()}:
            self.shift.fail(now, why)

    def _on_worker(self, now: float, worker: WorkerRecord, message: Message) -> None:
        shift = self.shift
        match message:
            case Retired(epoch=epoch):
                self.holdings.closed(worker.worker, epoch)
            case Assembled(epoch=epoch) if shift is not None and epoch == shift.epoch:
                shift.assembled[worker.worker] = message.staged
            case Installed(epoch=epoch) if shift is not None and epoch == shift.epoch:
                shift.on_installed(worker.worker)
            case InstallFailed(epoch=epoch) if shift is not None and epoch == shift.epoch:
                shift.fail(now, message.reason, worker.at.agent, fatal=message.fatal)

    def _worker_is_gone(self, now: float, worker: str, *, with_node: bool) -> list[Action]:
        self.holdings.forget(worker)
        if self.shift is not None:
            self.shift.on_worker_gone(now, worker)
        lost = self.current.of_worker(worker) if self.current is not None else None
        if lost is None:
            return []
        reason = "its node is gone" if with_node else "a worker died"
        return self._on_broken(now, lost.key, reason, failed=not with_node)

    def _on_broken(
        self, now: float, key: ReplicaKey, reason: str, *, failed: bool = True
    ) -> list[Action]:
        """A replica cannot go on: its streams pause at once, the others are not touched."""
        broken = self.current.find(key) if self.current is not None else None
        if self.current is None or broken is None:
            if self.shift is not None and key.epoch == self.shift.epoch:
                self.shift.fail(now, f"a new replica is broken: {reason}")
            return []
        self.current = self.current.without((key,))
        self.watch.broken(now)
        self._farewells.lose(key)
        if self.shift is not None:
            self.shift.on_lost(now, self.current, key)
        self._agenda.soon(now + self.settings.loss_settle_s)
        return [
            Detach((key,), reason, failed=failed and all(map(self.members.stays, broken.agents))),
            *self.holdings.close(now, key.epoch, broken.workers),
            *self._forget((key,)),
            Record({"event": "broken", "epoch": key.epoch, "replica": key.index, "why": reason}),
            Say(f"replica {key} is broken: {reason}", warning=True),
        ]

    def _forget(self, gone: Iterable[ReplicaKey]) -> list[Action]:
        """Forget epochs of which nothing serves any more."""
        serving = {key.epoch for key in self.current.keys} if self.current is not None else set()
        return [ForgetEpoch(epoch) for epoch in sorted({key.epoch for key in gone} - serving)]

    def _on_wanted(self, now: float, gear: Gear | None, reason: str) -> list[Action]:
        self.pinned = gear
        self._agenda.soon(now)
        old, shift = self.current, self.shift
        stays = old is not None and old.gear == gear and not old.lost
        if stays and shift is not None and shift.before_the_pause:
            shift.fail(now, f"called off: the gear in place was asked for ({reason})")
        wanted = gear.layout() if gear is not None else "the policy's choice"
        return [Say(f"wanted: {wanted} ({reason})")]

    # ------------------------------------------------------------------ deciding

    def _settle(self, now: float) -> list[Action]:
        """Move the shift on; when none is under way and a question is due, ask the policy."""
        actions = self._aftermath.kill_hung(now)
        actions += self._advance(now)
        actions += self._part(now)
        idle = self.shift is None and self._farewells.under_way is None
        if idle and self._agenda.comes_due(now):
            actions += self._decide(now)
            actions += self._advance(now)
        actions += self._aftermath.room_free()
        if self.shift is None:
            used = self.current.agents if self.current is not None else None
            actions += self._aftermath.release(now, used)
        return actions

    def _part(self, now: float) -> list[Action]:
        """Where nothing else can hold the model, park its KV before the GPUs are taken."""
        current, farewells = self.current, self._farewells
        if current is None or self.shift is not None:
            return []
        if self._stranded and farewells.under_way is None:
            if not farewells.is_due(now, current, self.planner.parking_s):
                return []
            return farewells.begin(now, current)
        self.current, actions = farewells.finish(now, current)
        if actions:
            self._agenda.soon(now + self.settings.loss_settle_s)
            left = self.current.keys if self.current is not None else frozenset()
            actions += self._forget(current.keys - left)
        return actions

    def _decide(self, now: float) -> list[Action]:
        if self.failed:
            return []
        if self.pinned is not None:
            decision = self._keep_pinned(self.pinned)
        else:
            decision = self.choice(now, at_once=self._best_at_once)
            self._best_at_once = False
        self._stranded = decision.gear is None
        self.reason = decision.reason
        if decision.look_again_s is not None:
            self._agenda.soon(now + decision.look_again_s)
        actions = self.decisions.note(now, decision, serving=self.current is not None)
        if decision.gear is None:
            self.watch.waits()
            return actions
        return actions + self._start(now, decision.gear, decision.reason)

    def choice(self, now: float, *, at_once: bool) -> Decision:
        """What the policy says now; `at_once`: the best by estimate. Begins nothing."""
        known = Known(self.members, self.planner, self.watch, self.preview)
        first = not self.ever_served
        seen = observe(now, known, self.current, self.last_shift_at, first=first)
        return (best_at_once if at_once else decide)(seen, self.settings.policy)

    def _keep_pinned(self, gear: Gear) -> Decision:
        if self.current is not None and self.current.gear == gear and not self.current.lost:
            return Decision(None, f"{gear.layout()} was asked for by 'flexslurm shift'")
        return Decision(gear, f"asked for by 'flexslurm shift': {gear.name}")

    def _start(self, now: float, gear: Gear, reason: str) -> list[Action]:
        placement = place_gear(gear, self.planner, self.members, self.current)
        if placement is None:
            self.pinned = None
            self._agenda.soon(now)
            return [Say(f"the GPUs that are here cannot hold {gear.layout()}", warning=True)]
        old = self.current
        self.epoch += 1
        self.shift = Shift(
            epoch=self.epoch,
            gear=gear,
            placement=placement,
            old=old,
            kept=kept_replicas(old, gear, placement),
            reason=reason,
            started_at=now,
            settings=self.settings.install,
            before=old.gear.layout() if old is not None else "none",
            pacing=self.planner.pacing(gear),
        )
        record = {
            "event": "epoch", "epoch": self.epoch, "gear": gear.name, "layout": gear.layout(),
            "signature": str(gear.signature), "reason": reason,
        }  # fmt: skip
        return [Record(record), Say(f"epoch {self.epoch}: {gear.layout()}: {reason}")]

    def preview(self, now: float, gear: Gear) -> PlanShift | None:
        """A shift to this gear as it would be planned now; None where it does not fit."""
        placement = place_gear(gear, self.planner, self.members, self.current)
        if placement is None:
            return None
        fraction = self.settings.install.memory_fraction
        return preview_shift(
            now, self.epoch + 1, self.members, self.current, gear, placement, fraction
        )

    def _advance(self, now: float) -> list[Action]:
        shift = self.shift
        if shift is None:
            return []
        shift.old = before = self.current
        actions = shift.advance(now, self.members, self.holdings)
        self.current = shift.old
        if before is not None and self.current is not before:
            left = self.current.keys if self.current is not None else frozenset()
            actions += self._forget(before.keys - left)
        if shift.over:
            self.shift = None
            finish = self._commit if shift.phase is Phase.COMMIT else self._aborted
            actions += finish(now, shift)
        return actions

    def _commit(self, now: float, shift: Shift) -> list[Action]:
        closed, before = shift.replaced, self.current
        self.current = shift.gear_in_place()
        self.ever_served = True
        self._agenda.attempts = 0
        self.last_shift_at = now
        self.watch.whole(now)
        self.history.append(report_of(now, shift, "committed"))
        # What came or left meanwhile: weighed when the first steps are out, not in the pause.
        self._agenda.soon(now + self.settings.loss_settle_s)
        retires: list[Action] = []
        for key in closed:
            one = before.find(key) if before is not None else None
            assert one is not None, f"{key} serves and is not in place"
            calm = all(map(self.members.stays, one.agents))
            after_s = shift.settings.close_after_s if calm else 0.0
            retires += self.holdings.close(now, key.epoch, one.workers, after_s=after_s)
        retires += shift.let_go(now, self.holdings, shift.settings.close_after_s)
        self._aftermath.replaced(shift.epoch)
        record = {"event": "committed", "epoch": shift.epoch, "took_s": now - shift.started_at}
        # A cut-over is on disk since before its pause, and streams wait for nothing that is not.
        return [
            Record(record, sync=Phase.CUTOVER not in shift.times),
            SwitchOver(shift.epoch, self.current, dict(shift.target), closed),
            *retires,  # after the new drivers are open: closing is no part of the pause
            *self._forget(closed),
            Say(f"epoch {shift.epoch} serves after {now - shift.started_at:.2f} s"),
        ]

    def _aborted(self, now: float, shift: Shift) -> list[Action]:
        self.history.append(report_of(now, shift, f"aborted: {shift.failure}"))
        if shift.blamed is not None and (agent := self.members.agents.get(shift.blamed)):
            agent.blame(shift.failure, self.settings.max_failures)
        if shift.fatal:
            self.failed = self.reason = shift.failure
        self._agenda.failed(now)
        return [
            Record({"event": "aborted", "epoch": shift.epoch, "why": shift.failure}),
            Say(f"epoch {shift.epoch} is given up: {shift.failure}", warning=True),
        ]
