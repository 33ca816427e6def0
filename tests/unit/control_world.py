"""A scripted world around `Control`: agents, workers and a clock, all in memory."""

from __future__ import annotations

from collections.abc import Sequence

from flexslurm.control.actions import Action, Detach, OpenEpoch, Send
from flexslurm.control.events import ControlSettings, Event, Heard, Tick, Unreachable
from flexslurm.control.members import AgentRecord, GpuAt
from flexslurm.control.policy import PolicySettings
from flexslurm.control.shift import InstalledGear, InstallSettings
from flexslurm.control.state import Control
from flexslurm.gear import Estimates, Gear, NoGear, Replica, Signature, Slot, Stage, slots
from flexslurm.messages import (
    PROTOCOL,
    AgentBeat,
    AgentHello,
    GpuInfo,
    Install,
    Installed,
    Message,
    Pacing,
    Retire,
    Retired,
    StartWorkers,
    StopWorkers,
    WorkerBeat,
    WorkerDied,
    WorkerHello,
    WorkerStarted,
)

LAYERS = 12


class OneStagePerNode:
    """A planner that makes one stage of each node, TP over its GPUs; needs `least` GPUs."""

    def __init__(self, least: int = 1) -> None:
        self.least = least

    def choose(self, signature: Signature) -> Gear | NoGear:
        nodes = signature.nodes()
        if signature.gpus() < self.least or not nodes:
            return NoGear(signature, f"{self.least} GPUs are needed, {signature.gpus()} are here")
        cuts = [LAYERS * i // len(nodes) for i in range(len(nodes) + 1)]
        stages = tuple(
            Stage(shape.gpu_type, shape.gpus, cuts[i], cuts[i + 1], 64, i)
            for i, shape in enumerate(nodes)
        )
        replica = Replica(stages, max_batch=8, max_batch_tokens=64, max_context=256)
        estimates = Estimates(100.0 * signature.gpus(), 0.1, 0.01, 1000, 1.0)
        return Gear(f"g-{signature}", signature, 16, (replica,), estimates)

    def place(
        self, gear: Gear, agents: Sequence[AgentRecord], current: InstalledGear | None
    ) -> dict[Slot, GpuAt]:
        free = list(agents)
        nodes: dict[int, AgentRecord] = {}
        for index, shape in enumerate(gear.signature.nodes()):
            match = next(
                a
                for a in free
                if (a.hello.gpu_type, len(a.hello.gpus)) == (shape.gpu_type, shape.gpus)
            )
            free.remove(match)
            nodes[index] = match
        placed = {}
        for slot in slots(gear):
            stage = gear.replicas[slot.replica].stages[slot.stage]
            placed[slot] = GpuAt(nodes[stage.node].id, slot.tp_rank)
        return placed

    def pacing(self, gear: Gear) -> dict[Slot, Pacing]:
        return {}


class World:
    """Feeds a `Control`, obeys its actions as agents and workers would, keeps what it did."""

    def __init__(self, least: int = 1, **settings: float) -> None:
        policy = PolicySettings(min_action_gap_s=0.0, migration_benefit_ratio=1.3)
        self.control = Control(
            ControlSettings(
                head="head-1",
                install=InstallSettings("/model", "float32", 0.9, 30.0, 3.0, 60.0),
                policy=policy,
                gpu_types=frozenset({"a100", "l40s"}),
                **settings,  # type: ignore[arg-type]
            ),
            OneStagePerNode(least),
        )
        self.now = 0.0
        self.log: list[Action] = []
        self.hung: set[str] = set()
        """Workers that do not answer Retire."""
        self.failing: dict[str, str] = {}
        """Agents whose installs fail, with the reason."""
        self.dead: set[str] = set()
        """Agents that say nothing more."""
        self.cut: set[str] = set()
        """Agents whose connections, and whose workers' connections, are closed."""
        self._count = 0

    def take(self, event: Event) -> list[Action]:
        actions = self.control.handle(self.now, event)
        self.log += actions
        check_invariants(self.control)
        for action in actions:
            if isinstance(action, Send) and action.to.split("/")[0] in self.cut:
                self.take(Unreachable(action.to))
            elif isinstance(action, Send):
                for sender, answer in self._obey(action):
                    self.take(Heard(sender, answer))
        return actions

    def join(self, name: str, gpu_type: str = "a100", gpus: int = 2, fragment: str = "") -> None:
        hello = AgentHello(
            protocol=PROTOCOL,
            incarnation=name,
            fragment=fragment or name,
            node=f"node-{fragment or name}",
            address="10.0.0.1",
            gpu_type=gpu_type,
            gpus=tuple(GpuInfo(i, 1000) for i in range(gpus)),
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
        from flexslurm.messages import InstallFailed

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

    def opened(self) -> list[OpenEpoch]:
        return [action for action in self.log if isinstance(action, OpenEpoch)]

    def detached(self) -> int:
        return sum(isinstance(action, Detach) for action in self.log)

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
        assert current.epoch <= control.epoch
    if shift is not None:
        assert not shift.over, "a shift that is over is still under way"
        assert shift.epoch == control.epoch
    assert {h.worker for h in control.held} <= {w.worker for w in members.workers()}
    places = [(a.hello.fragment, a.hello.node) for a in members.agents.values()]
    assert len(places) == len(set(places)), "two agents of one fragment on one node"
