"""One attempt to get into a gear: a table of phases and the conditions between them; pure.

    PREPARE ─▶ INSTALL ─▶ TRANSFER ─▶ CUTOVER ─▶ COMMIT      both gears fit: the old one serves on
       └─▶ PARK ─▶ CLOSE ─▶ INSTALL ─▶ CUTOVER ─▶ COMMIT     they do not: KV waits in host memory
       └─▶ CLOSE ─▶ INSTALL ─▶ COMMIT                        nothing can be moved: recompute
    any of them ─▶ ABORT

PREPARE starts the workers that are missing, waits until leftovers of earlier epochs are closed on
those it will use, and has the shell plan the moves (`PlanShift`), which says which of the three
ways it is. INSTALL builds the stages of replicas that are new; replicas that stay as they are where
they are keep their epoch and are touched by nothing. TRANSFER moves full blocks beside the serving
gear. CUTOVER begins with the pause: drivers of the replicas that go stop at a step boundary and the
rest is moved. COMMIT opens the new drivers and only then closes the old epoch.

Until CUTOVER has ended, ABORT leaves the old replicas serving. After CLOSE there is no way back:
their sequences wait with the head and are recomputed by what serves next. A member of the old gear
that is lost on the way fails nothing: its sequences wait. A member of the new gear does, and so
does a replica that was to stay.

`advance` looks at what is, not at what happened, so the order in which messages arrive does not
matter. Every phase has a deadline: an answer that never comes ends the attempt, save for PARK and
TRANSFER, which then go on with what has been moved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flexslurm.control.actions import (
    Action,
    BeginCutover,
    BeginTransfer,
    Detach,
    DropShift,
    ForgetEpoch,
    MeetEpoch,
    ParkAhead,
    ParkAll,
    Record,
    Send,
)
from flexslurm.control.holdings import Holdings
from flexslurm.control.install_message import assemble_message, install_message
from flexslurm.control.installed import (
    InstalledGear,
    InstalledReplica,
    ReplicaKey,
    seat_of,
)
from flexslurm.control.members import GpuAt, Members, WorkerState
from flexslurm.control.patience import patience_s
from flexslurm.control.phases import AT_DEADLINE, LEGAL, InstallSettings, Mode, Phase, ShiftOrder
from flexslurm.control.preview import shift_request
from flexslurm.gear import Gear, Slot, replica_slots
from flexslurm.messages import Install, Pacing, StartWorkers


@dataclass(slots=True)
class Shift:
    """The state of one attempt. Invariant: phases follow LEGAL."""

    epoch: int
    gear: Gear
    placement: Mapping[Slot, GpuAt]
    old: InstalledGear | None
    """What serves, as it is now: the controller takes lost replicas out."""
    kept: Mapping[int, InstalledReplica]
    """Replicas of `old` that stay, by their numbers in the new gear."""
    reason: str
    started_at: float
    settings: InstallSettings
    before: str = "none"
    """The layout of the old gear, for the history."""
    pacing: Mapping[Slot, Pacing] = field(default_factory=dict)
    phase: Phase = Phase.PREPARE
    deadline: float = 0.0
    failure: str = ""
    fatal: bool = False
    blamed: str | None = None
    """The agent whose GPU the failure points to."""
    asked: set[GpuAt] = field(default_factory=set)
    target: dict[int, InstalledReplica] = field(default_factory=dict)
    """The new replicas, once their workers are up."""
    plan_asked: bool = False
    order: ShiftOrder | None = None
    assemble_by: float | None = None
    """When PARK begins at the latest; None: nothing was assembled beforehand."""
    assembled: dict[str, bool] = field(default_factory=dict)
    """Workers, and whether each has on its host all that it takes from others."""
    parked_ahead: bool = False
    installed: set[str] = field(default_factory=set)
    lingering: set[tuple[str, int]] = field(default_factory=set)
    """Workers with weights of epochs that are closed, which others may take."""
    parked: bool = False
    transferred: bool = False
    cut_over: bool = False
    times: dict[Phase, float] = field(default_factory=dict)
    """When each phase was entered."""

    def __post_init__(self) -> None:
        self.deadline = self.started_at + self.settings.prepare_timeout_s
        self.times[self.phase] = self.started_at

    @property
    def over(self) -> bool:
        return not LEGAL[self.phase]

    @property
    def before_the_pause(self) -> bool:
        """Whether the old gear still serves as if nothing were under way."""
        return self.phase in (Phase.PREPARE, Phase.INSTALL, Phase.TRANSFER)

    @property
    def replaced(self) -> tuple[ReplicaKey, ...]:
        """Replicas that serve and are to go."""
        if self.old is None:
            return ()
        return tuple(sorted(self.old.keys - {one.key for one in self.kept.values()}))

    @property
    def new_slots(self) -> list[Slot]:
        return sorted(slot for slot in self.placement if slot.replica not in self.kept)

    def gear_in_place(self) -> InstalledGear:
        return InstalledGear(self.gear, dict(sorted({**self.kept, **self.target}.items())))

    def enter(self, phase: Phase, now: float, bound_s: float = 0.0) -> None:
        assert phase in LEGAL[self.phase], (
            f"epoch {self.epoch}: {self.phase} → {phase} is not legal; reason: {self.reason}"
        )
        self.phase, self.deadline = phase, now + bound_s
        self.times[phase] = now

    # ------------------------------------------------------------------ what is heard

    def on_installed(self, worker: str) -> None:
        if any(worker in one.workers for one in self.target.values()):
            self.installed.add(worker)

    def on_worker_gone(self, now: float, worker: str) -> None:
        """A worker died: before its install it is started again, afterwards the attempt fails."""
        self.lingering = {held for held in self.lingering if held[0] != worker}
        number = next((n for n, one in self.target.items() if worker in one.workers), None)
        if number is None or self.over:
            return
        if self.phase is Phase.PREPARE and self.assemble_by is None:
            self.target, self.order, self.plan_asked = {}, None, False
            return
        seat = next(seat for seat in self.target[number].seats if seat.worker == worker)
        self.fail(now, f"a worker of replica {number} died during the {self.phase}", seat.at.agent)

    def on_lost(self, now: float, left: InstalledGear | None, lost: ReplicaKey) -> None:
        """A replica that served is no more."""
        self.old = left
        if any(one.key == lost for one in self.kept.values()):
            self.fail(now, "a replica that was to stay is lost")

    def fail(self, now: float, why: str, agent: str | None = None, *, fatal: bool = False) -> None:
        if not self.over:
            self.failure, self.blamed, self.fatal = why, agent, fatal
            self.enter(Phase.ABORT, now)

    # ------------------------------------------------------------------ what is to be done

    def advance(self, now: float, members: Members, holdings: Holdings) -> list[Action]:
        """Go as far as what is known allows."""
        actions: list[Action] = []
        gone = sorted({self.placement[slot].agent for slot in self.new_slots} - set(members.agents))
        if gone:
            self.fail(now, "a node it was to use is gone", gone[0])
        before: Phase | None = None
        while before is not self.phase:
            before = self.phase
            self._go_on(now, members, holdings, actions)
        if not self.over and now >= self.deadline:
            self._on_deadline(now, members, holdings, actions)
        if self.phase is Phase.COMMIT:
            for agent in {self.placement[slot].agent for slot in self.new_slots}:
                members.agents[agent].absolve()
        if self.phase is Phase.ABORT:
            actions += [DropShift(self.epoch, self.failure), ForgetEpoch(self.epoch)]
            actions += holdings.close(now, self.epoch)
            actions += self.let_go(now, holdings, 0.0)
        return actions

    def _go_on(
        self, now: float, members: Members, holdings: Holdings, actions: list[Action]
    ) -> None:
        match self.phase:
            case Phase.PREPARE if self._is_planned(now, members, holdings, actions):
                if self._is_assembled(now, members, holdings, actions):
                    self._begin(now, members, holdings, actions)
            case Phase.PARK if self.parked or not self.replaced:
                self._close(now, holdings, actions)
            case Phase.CLOSE if not self._leftovers(holdings):
                self._install(now, members, holdings, actions)
            case Phase.INSTALL if self.installed >= self._new_workers:
                self._move(now, members, actions)
            case Phase.TRANSFER if self.transferred or not self.replaced:
                self._cut_over(now, actions)
            case Phase.CUTOVER if self.cut_over:
                self.enter(Phase.COMMIT, now)

    @property
    def _new_workers(self) -> frozenset[str]:
        return frozenset(worker for one in self.target.values() for worker in one.workers)

    def _leftovers(self, holdings: Holdings) -> bool:
        # What others are to take from must be closed too: until then it gives nothing.
        return bool(holdings.closing({*self._new_workers, *(w for w, _ in self.lingering)}))

    # PREPARE

    def _is_planned(
        self, now: float, members: Members, holdings: Holdings, actions: list[Action]
    ) -> bool:
        if not self.plan_asked and self._workers_ready(members, holdings, actions):
            self.plan_asked = True
            self.target = self._make_target(members)
            new, fraction = self.gear_in_place(), self.settings.memory_fraction
            actions.append(shift_request(now, self.epoch, members, self.old, new, fraction))
        return self.order is not None

    def _workers_ready(self, members: Members, holdings: Holdings, actions: list[Action]) -> bool:
        """Whether a worker is on every new GPU, and free of leftovers."""
        ready = True
        missing: dict[str, list[int]] = {}
        for at in sorted({self.placement[slot] for slot in self.new_slots}):
            record = members.worker_at(at)
            if record is None:
                if at not in self.asked:
                    missing.setdefault(at.agent, []).append(at.gpu)
                    self.asked.add(at)
                ready = False
                continue
            self.asked.discard(at)
            closing = holdings.closing((record.worker,))
            ready = ready and record.state is WorkerState.READY and not closing
        actions += [Send(agent, StartWorkers(gpus=tuple(g))) for agent, g in missing.items()]
        return ready

    def _make_target(self, members: Members) -> dict[int, InstalledReplica]:
        made = {}
        for number, replica in enumerate(self.gear.replicas):
            if number not in self.kept:
                slots = replica_slots(replica, number)
                seats = tuple(seat_of(members, self.placement[slot]) for slot in slots)
                made[number] = InstalledReplica(ReplicaKey(self.epoch, number), replica, seats)
        return made

    def _is_assembled(
        self, now: float, members: Members, holdings: Holdings, actions: list[Action]
    ) -> bool:
        """Whether what the pause of PARK need not wait for is made, as far as there was time."""
        assert self.order is not None
        if not (self.replaced and self.target and self.order.mode is Mode.PARK):
            return True
        whole_s = self.settings.assemble_timeout_s + 4.0 * self.order.transfer_s
        ahead_s = self._bound(whole_s, members, now) / 2
        if self.assemble_by is None:
            self.assemble_by = now + ahead_s
            self.deadline = max(self.deadline, self.assemble_by + 1.0)
            self._send_installs(members, holdings, actions, ahead_s)
            actions.append(ParkAhead(self.epoch, ahead_s))
        self.assemble_by = min(self.assemble_by, now + ahead_s)  # less once a member must leave
        made = self.parked_ahead and self.assembled.keys() >= self._new_workers
        return made or now >= self.assemble_by

    def _begin(
        self, now: float, members: Members, holdings: Holdings, actions: list[Action]
    ) -> None:
        assert self.order is not None
        if self.replaced and self.order.mode is Mode.PARK:
            self.enter(Phase.PARK, now, self._bound(self.settings.park_timeout_s, members, now))
            actions.append(ParkAll(self.epoch))
        elif self.replaced and self.order.mode is Mode.RECOMPUTE:
            self._close(now, holdings, actions)
        else:
            self._install(now, members, holdings, actions)

    # CLOSE

    def _close(self, now: float, holdings: Holdings, actions: list[Action]) -> None:
        """Close what is replaced; there is no way back to it."""
        self.enter(Phase.CLOSE, now, self.settings.close_timeout_s + 1.0)
        old, going = self.old, self.replaced
        if old is None or not going:
            return
        actions.append(Detach(going, self.reason))
        for key in going:
            one = old.find(key)
            assert one is not None, f"{key} serves and is not in place"
            keep = self.order is not None and self.order.turn_layers > 0
            actions += holdings.close(now, key.epoch, one.workers, keep_weights=keep)
            self.lingering |= {(worker, key.epoch) for worker in one.workers if keep}
        self.old = old.without(going)

    def let_go(self, now: float, holdings: Holdings, after_s: float) -> list[Action]:
        """What was kept of what is closed is not needed any more: its weights, and its groups."""
        kept = sorted(self.lingering)
        self.lingering.clear()
        return [holdings.close_for_good(now, *held, after_s) for held in kept]

    # INSTALL

    def _install(
        self, now: float, members: Members, holdings: Holdings, actions: list[Action]
    ) -> None:
        assert self.order is not None
        if not self.target:
            self._move(now, members, actions)
            return
        self.enter(Phase.INSTALL, now, self.settings.install_timeout_s)
        self._send_installs(members, holdings, actions)

    def _send_installs(
        self, members: Members, holdings: Holdings, actions: list[Action], early_s: float = -1.0
    ) -> None:
        assert self.order is not None
        early = early_s >= 0.0
        if early or self.assemble_by is None:
            actions.append(MeetEpoch(self.epoch))
        for _, one in sorted(self.target.items()):
            for slot, worker in zip(one.slots, one.workers, strict=True):
                holdings.add(worker, self.epoch)
                install = self._message(slot, one, members, self.order)
                said = assemble_message(install, self.settings, early_s) if early else install
                actions.append(Send(worker, said))

    def _message(
        self, slot: Slot, one: InstalledReplica, members: Members, order: ShiftOrder
    ) -> Install:
        staged = all(self.assembled.get(worker) for worker in self._new_workers)
        meeting = 1 if staged else len(self._new_workers)
        serving = self.phase is Phase.PREPARE or order.mode is Mode.BESIDE
        return install_message(
            slot, one, self.settings, order, self.target.values(),
            arena_bytes=members.arena_bytes(self.placement[slot], self.settings.memory_fraction),
            block_tokens=self.gear.block_tokens, pacing=self.pacing.get(slot),
            hand_over=meeting if self.lingering else 0, serving=serving,
        )  # fmt: skip

    # TRANSFER and CUTOVER

    def _move(self, now: float, members: Members, actions: list[Action]) -> None:
        assert self.order is not None
        parked = self.order.mode is Mode.PARK and self.parked
        if self.order.mode is Mode.BESIDE and self.replaced:
            self.enter(
                Phase.TRANSFER, now, self._bound(self.settings.transfer_timeout_s, members, now)
            )
            actions.append(BeginTransfer(self.epoch))
        elif parked or self.order.stored:
            self._cut_over(now, actions)
        else:
            self.enter(Phase.COMMIT, now)

    def _cut_over(self, now: float, actions: list[Action]) -> None:
        bound_s = self.settings.cutover_timeout_s
        self.enter(Phase.CUTOVER, now, bound_s)
        # What is about to serve is on disk before anything pauses.
        record = Record({"event": "cutover", "epoch": self.epoch})
        actions += [record, BeginCutover(self.epoch, bound_s)]

    def _bound(self, seconds: float, members: Members, now: float) -> float:
        """So long, or less where members of what goes must leave."""
        reserve_s = self.settings.leave_reserve_s
        return patience_s(seconds, members, self.old, self.replaced, now, reserve_s)

    # deadlines

    def _on_deadline(
        self, now: float, members: Members, holdings: Holdings, actions: list[Action]
    ) -> None:
        match AT_DEADLINE[self.phase]:
            case Phase.CUTOVER:
                self._cut_over(now, actions)
            case Phase.CLOSE:
                self._close(now, holdings, actions)
            case _:
                self.fail(now, f"{self.phase} took too long: {self._missing(members)}")

    def _missing(self, members: Members) -> str:
        if self.phase is Phase.INSTALL:
            late = sorted(
                slot
                for one in self.target.values()
                for slot, worker in zip(one.slots, one.workers, strict=True)
                if worker not in self.installed
            )
            return f"{', '.join(map(str, late))} not installed"
        if self.phase is Phase.CUTOVER:
            return "not everything was answered"
        absent = sorted(
            f"{members.agents[at.agent].name} gpu {at.gpu}"
            for at in {self.placement[slot] for slot in self.new_slots}
            if (record := members.worker_at(at)) is None or record.state is not WorkerState.READY
        )
        return f"no worker yet on {', '.join(absent)}" if absent else "old groups not closed"
