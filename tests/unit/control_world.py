"""A scripted world around `Control`: agents, workers and a clock, all in memory."""

from __future__ import annotations

from flexslurm.control.actions import (
    Action,
    BeginCutover,
    BeginTransfer,
    Detach,
    DropAway,
    DropShift,
    ParkAhead,
    ParkAll,
    ParkAway,
    PlanShift,
    RoomFree,
    Send,
    SwitchOver,
)
from flexslurm.control.choices import PolicySettings
from flexslurm.control.events import (
    ControlSettings,
    CutOver,
    Event,
    Heard,
    Measured,
    MoveFigures,
    Parked,
    ParkedAhead,
    ReplicaBroken,
    ShiftEvent,
    ShiftPlanned,
    Switched,
    Tick,
    Transferred,
    Unreachable,
)
from flexslurm.control.installed import ReplicaKey
from flexslurm.control.phases import InstallSettings, Mode, Phase, ShiftOrder
from flexslurm.control.state import Control
from flexslurm.control.trends import Sample
from flexslurm.messages import (
    PROTOCOL,
    AgentBeat,
    AgentHello,
    Assemble,
    Assembled,
    GpuInfo,
    Install,
    Installed,
    InstallFailed,
    Message,
    Retire,
    Retired,
    StartWorkers,
    StopWorkers,
    WorkerBeat,
    WorkerDied,
    WorkerHello,
    WorkerStarted,
)
from tests.unit.control_planners import OneStagePerNode


class World:
    """Feeds a `Control`, obeys its actions as agents and workers would, keeps what it did."""

    def __init__(
        self,
        least: int = 1,
        planner: OneStagePerNode | None = None,
        policy: PolicySettings | None = None,
        **settings: object,
    ) -> None:
        policy = policy or PolicySettings(min_action_gap_s=0.0, migration_benefit_ratio=1.3)
        self.control = Control(
            ControlSettings(
                head="head-1",
                install=InstallSettings("/model", "float32", 0.9, 30.0, 3.0, 60.0),
                policy=policy,
                gpu_types=frozenset({"a100", "l40s"}),
                **settings,  # type: ignore[arg-type]
            ),
            planner or OneStagePerNode(least),
        )
        self.now = 0.0
        self.log: list[Action] = []
        self.mode = Mode.RECOMPUTE
        """What the shell finds out when it plans a shift."""
        self.turn_layers = 0
        """The same: how weights are handed over where both gears do not fit."""
        self.transfer_s = 0.0
        """The same: how long it takes."""
        self.staged = False
        """Whether workers have on their hosts what they take from others, before there is room."""
        self.mute: set[type[Action]] = set()
        """Actions that the shell never answers."""
        self.drivers: set[ReplicaKey] = set()
        """What the shell has open."""
        self.paused: set[ReplicaKey] = set()
        self.away: set[ReplicaKey] = set()
        """What is being parked in files."""
        self.planned: PlanShift | None = None
        """The shift under way, as the shell was told."""
        self.hung: set[str] = set()
        """Workers that do not answer Retire."""
        self.failing: dict[str, str] = {}
        """Agents whose installs fail, with the reason."""
        self.slow: set[str] = set()
        self.unready: set[str] = set()
        """Agents whose workers do not say that they have assembled anything."""
        """Agents whose workers do not answer Install until they are no longer here."""
        self.owed: list[tuple[str, int]] = []
        """Installs that were not answered: worker and epoch."""
        self.dead: set[str] = set()
        """Agents that say nothing more."""
        self.cut: set[str] = set()
        """Agents whose connections, and whose workers' connections, are closed."""
        self._count = 0

    def take(self, event: Event) -> list[Action]:
        """Feed an event, and then what comes of its actions, as the controller's shell does."""
        actions = self.control.handle(self.now, event)
        self.log += actions
        answers: list[Event] = []
        for action in actions:
            answer = self._shell(action)
            if answer is not None:
                answers.append(answer)
            elif isinstance(action, Send) and action.to.split("/")[0] in self.cut:
                answers.append(Unreachable(action.to))
            elif isinstance(action, Send):
                answers += [Heard(sender, answer) for sender, answer in self._obey(action)]
        check_invariants(self.control)
        self._check_shell()
        for answer in answers:
            self.take(answer)
        return actions

    def _shell(self, action: Action) -> ShiftEvent | None:
        answer: ShiftEvent | None = None
        match action:
            case PlanShift():
                self.planned = action
                order = ShiftOrder(
                    self.mode, turn_layers=self.turn_layers, transfer_s=self.transfer_s
                )
                answer = ShiftPlanned(action.epoch, order)
            case ParkAhead(epoch):
                assert not self.paused
                answer = ParkedAhead(epoch)
            case ParkAll(epoch):
                self.paused |= self._going()
                answer = Parked(epoch)
            case ParkAway(replicas):
                self.paused |= set(replicas)
                self.away = set(replicas)
            case DropAway():
                self.paused -= self.away
                self.away = set()
            case BeginTransfer(epoch):
                assert not self.paused
                answer = Transferred(epoch)
            case BeginCutover(epoch):
                self.paused |= self._going()
                answer = CutOver(epoch)
            case Detach(replicas):
                assert set(replicas) <= self.drivers
                self.drivers -= set(replicas)
                self.paused -= set(replicas)
                self.away -= set(replicas)
            case DropShift():
                self.planned, self.paused = None, set()
            case SwitchOver(epoch, _, opened, closed):
                assert set(closed) <= self.drivers
                self.drivers |= {one.key for one in opened.values()}
                self.drivers -= set(closed)
                self.planned, self.paused = None, set()
                answer = Switched(epoch, MoveFigures())
        return None if type(action) in self.mute else answer

    def _going(self) -> set[ReplicaKey]:
        assert self.planned is not None
        return self.drivers - set(self.planned.new.keys)

    def _check_shell(self) -> None:
        current = self.control.current
        keys = set(current.keys) if current is not None else set()
        assert self.drivers == keys, f"drivers of {self.drivers}, {keys} are in place"
        if self.control.shift is None:
            assert self.paused <= self.away, f"{self.paused} stand still, and nothing is under way"

    def mend(self) -> None:
        """Nothing is mute, slow or hung any more, and what was owed is answered."""
        muted = bool(self.mute)
        for faults in (self.mute, self.slow, self.hung, self.unready):
            faults.clear()
        owed, self.owed = self.owed, []
        for worker, epoch in owed:
            self.take(Heard(worker, self._install(worker, epoch)))
        shift = self.control.shift
        if shift is not None and muted:
            late: dict[Phase, type[Parked | Transferred | CutOver]] = {
                Phase.PARK: Parked, Phase.TRANSFER: Transferred, Phase.CUTOVER: CutOver,
            }  # fmt: skip
            if shift.phase in late:
                self.take(late[shift.phase](shift.epoch))

    def worker(self, agent: str, gpu: int = 0) -> str:
        return self.control.members.agents[agent].workers[gpu].worker

    def break_replica(self, number: int = 0, reason: str = "a step was not answered") -> None:
        assert self.control.current is not None
        self.take(ReplicaBroken(self.control.current.replicas[number].key, reason))

    def join(
        self,
        name: str,
        gpu_type: str = "a100",
        gpus: int = 2,
        fragment: str = "",
        walltime_s: float | None = None,
    ) -> None:
        hello = AgentHello(
            protocol=PROTOCOL,
            incarnation=name,
            fragment=fragment or name,
            node=f"node-{fragment or name}",
            address="10.0.0.1",
            gpu_type=gpu_type,
            gpus=tuple(GpuInfo(i, 1000) for i in range(gpus)),
            walltime_s=walltime_s,
        )
        self.take(Heard(name, hello))

    def run(self, seconds: float, step: float = 0.1) -> None:
        """Let time pass, with beats of all that live."""
        end = self.now + seconds
        while self.now < end - 1e-9:
            self.now += step
            for agent in list(self.control.members.agents.values()):
                if agent.id in self.dead:
                    continue
                self.take(Heard(agent.id, AgentBeat(incarnation=agent.id, number=0)))
                for worker in list(agent.workers.values()):
                    self.take(Heard(worker.worker, WorkerBeat(worker=worker.worker)))
            self.take(Tick())

    def measure(
        self, seconds: float, tokens_per_s: float, *, waiting: int = 0, interval: float = 10.0,
        busy: float = 1.0, full: float = 1.0,
    ) -> None:  # fmt: skip
        """Let time pass under this load, with a sample at the end of each interval."""
        end = self.now + seconds
        while self.now < end - 1e-6:
            self.run(interval, step=2.5)
            sample = Sample(self.now, tokens_per_s, 4, waiting, busy, full)
            self.take(Measured(sample))

    def kill_worker(self, agent: str, gpu: int = 0) -> None:
        worker = self.control.members.agents[agent].workers[gpu].worker
        died = WorkerDied(incarnation=agent, gpu=gpu, worker=worker, exit_code=-9)
        self.take(Heard(agent, died))

    def _obey(self, action: Send) -> list[tuple[str, Message]]:
        if action.to in self.dead or action.to.split("/")[0] in self.dead:
            return []
        match action.message:
            case StartWorkers(gpus=gpus):
                return [answer for gpu in gpus for answer in self._start(action.to, gpu)]
            case StopWorkers(gpus=gpus):
                return [
                    (
                        action.to,
                        WorkerDied(incarnation=action.to, gpu=g, worker=w.worker, exit_code=-9),
                    )
                    for g in gpus
                    if (w := self.control.members.agents[action.to].workers.get(g))
                ]
            case Assemble(install=install) if action.to.split("/")[0] not in self.unready:
                said = Assembled(worker=action.to, epoch=install.epoch, staged=self.staged)
                return [(action.to, said)]
            case Install(epoch=epoch) if action.to.split("/")[0] in self.slow:
                self.owed.append((action.to, epoch))
            case Install(epoch=epoch):
                return [(action.to, self._install(action.to, epoch))]
            case Retire(epoch=epoch) if action.to not in self.hung:
                return [(action.to, Retired(worker=action.to, epoch=epoch))]
        return []

    def _start(self, agent: str, gpu: int) -> list[tuple[str, Message]]:
        self._count += 1
        worker = f"{agent}/w{self._count}"
        return [
            (agent, WorkerStarted(incarnation=agent, gpu=gpu, worker=worker, pid=1, start_s=0.1)),
            (
                worker,
                WorkerHello(
                    protocol=PROTOCOL, worker=worker, agent=agent, gpu=gpu, pid=1, device="cpu"
                ),
            ),
        ]

    def _install(self, worker: str, epoch: int) -> Message:
        agent = worker.split("/", maxsplit=1)[0]
        if agent in self.failing:
            fatal = self.failing[agent].startswith("fatal")
            return InstallFailed(
                worker=worker, epoch=epoch, reason=self.failing[agent], fatal=fatal
            )
        return Installed(
            worker=worker, epoch=epoch, weights_bytes=1, kv_blocks=64, load_s=0.1, groups_s=0.1
        )

    # ------------------------------------------------------------------ looking

    def opened(self) -> list[SwitchOver]:
        return [action for action in self.log if isinstance(action, SwitchOver)]

    def detached(self) -> list[ReplicaKey]:
        return [key for a in self.log if isinstance(a, Detach) for key in a.replicas]

    def told(self, kind: type[Message], to: str = "") -> list[Send]:
        """Messages of a kind so far, to the workers of an agent or to all."""
        return [
            a
            for a in self.log
            if isinstance(a, Send) and isinstance(a.message, kind) and a.to.startswith(to)
        ]

    def room_freed(self) -> list[int]:
        return [a.epoch for a in self.log if isinstance(a, RoomFree)]

    def serving(self) -> str | None:
        current = self.control.current
        return str(current.gear.signature) if current is not None else None


def check_invariants(control: Control) -> None:
    """What holds after every event."""
    members, current, shift = control.members, control.current, control.shift
    if current is not None:
        for slot, worker in current.workers.items():
            assert members.worker_at(current.placement[slot]) is not None, f"{slot} has no worker"
            assert members.alive(worker), f"{slot} is served by a dead worker"
        assert current.replicas and max(key.epoch for key in current.keys) <= control.epoch
        assert len(current.keys) == len(current.replicas), "a replica under two numbers"
    if shift is not None:
        assert not shift.over, "a shift that is over is still under way"
        assert shift.epoch == control.epoch
    _check_holdings(control)
    places = [(a.hello.fragment, a.hello.node) for a in members.agents.values()]
    assert len(places) == len(set(places)), "two agents of one fragment on one node"


def _check_holdings(control: Control) -> None:
    """Whatever a worker holds is of a living worker, and serves, is installed or is closing."""
    wanted = set()
    if control.current is not None:
        for one in control.current.replicas.values():
            wanted |= {(worker, one.key.epoch) for worker in one.workers}
    if control.shift is not None:
        for one in control.shift.target.values():
            wanted |= {(worker, one.key.epoch) for worker in one.workers}
    assert control.holdings.in_use() <= wanted, "an epoch that nobody wants is not closed"
    holders = {held.worker for held in control.holdings}
    assert holders <= {worker.worker for worker in control.members.workers()}
