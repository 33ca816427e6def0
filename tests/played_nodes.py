"""Agents and workers that are played, and the links to them; time runs as fast as events do.

Messages take random times and keep their order on each link. Workers play the KV cache cell by cell
(`fake_replica`), and refuse what breaks the protocol, so a wrong block shows as a wrong token.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from pathlib import Path

from flexslurm.messages import (
    PROTOCOL,
    AgentBeat,
    AgentBye,
    AgentHello,
    Assemble,
    Assembled,
    FreeBlocks,
    GpuInfo,
    Install,
    Installed,
    InstallFailed,
    LeaveNotice,
    Message,
    ParkKv,
    PullKv,
    ReleaseAgent,
    Retire,
    Retired,
    StartWorkers,
    Step,
    StepDone,
    StepFailed,
    StopWorkers,
    UnparkKv,
    WorkerBeat,
    WorkerDied,
    WorkerExit,
    WorkerHello,
    WorkerStarted,
)
from tests.played_bodies import Agent, Body, Cells, Worker
from tests.played_kv import PlayedKv

BEAT_S = 0.3


class PlayedNodes:
    """All members of a service; `hear` is the head's."""

    def __init__(self, seed: int, memory_bytes: int) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.memory_bytes = memory_bytes
        self._kv = PlayedKv(self)
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._links: dict[str, float] = {}
        self.agents: dict[str, Agent] = {}
        self.workers: dict[str, Worker] = {}
        self.bodies: dict[tuple[int, int], Body] = {}
        self.failing_pulls = 0.0
        """The share of blocks that do not come."""
        self.failing_installs = 0
        self.failing_steps = 0
        self.files: dict[Path, tuple[str, int, dict[int, Cells]]] = {}
        """What was parked in files: by whom, of which epoch."""

    def hear(self, sender: str, message: Message) -> None:
        raise NotImplementedError

    # ------------------------------------------------------------------ time and links

    def at(self, delay_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + delay_s, next(self._numbers), act))

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self._queue and self._queue[0][0] <= end:
            self.now, _, act = heapq.heappop(self._queue)
            act()
        self.now = end

    def _link(self, name: str, slow_s: float = 0.0) -> float:
        """How long a message on this link takes; it comes after those before it."""
        arrives = max(self.now + self.rng.uniform(0.0002, 0.004) + slow_s, self._links.get(name, 0))
        self._links[name] = arrives
        return arrives - self.now

    def say(self, sender: str, message: Message, slow_s: float = 0.0) -> None:
        """A member's message to the head; what is on its way when the member dies still comes."""

        if self.speaks(sender):
            self.at(self._link(f"from {sender}", slow_s), lambda: self.hear(sender, message))

    def speaks(self, name: str) -> bool:
        worker = self.workers.get(name)
        if worker is not None:
            return worker.alive and not worker.hung
        return self.agents[name].alive

    # What the head has of `wire.transport.HeadSocket`.

    def send(self, member: str, message: Message) -> bool:
        worker, agent = self.workers.get(member), self.agents.get(member)
        if not (worker.alive if worker is not None else agent is not None and agent.alive):
            return False
        self.at(self._link(f"to {member}"), lambda: self._arrive(member, message))
        return True

    def send_many(self, members: tuple[str, ...], message: Message) -> list[str]:
        return [member for member in members if not self.send(member, message)]

    def _arrive(self, member: str, message: Message) -> None:
        worker, agent = self.workers.get(member), self.agents.get(member)
        if worker is not None and worker.alive and not worker.hung:
            self._to_worker(worker, message)
        elif agent is not None and agent.alive:
            self._to_agent(agent, message)

    # ------------------------------------------------------------------ agents

    def join(self, fragment: str, gpus: int) -> None:
        agent = Agent(f"{fragment}.{next(self._numbers)}", fragment, gpus)
        self.agents[agent.name] = agent
        hello = AgentHello(
            protocol=PROTOCOL, incarnation=agent.name, fragment=fragment, node=f"node-{fragment}",
            address="10.0.0.1", gpu_type="a",
            gpus=tuple(GpuInfo(i, self.memory_bytes) for i in range(gpus)),
        )  # fmt: skip
        self.say(agent.name, hello)
        self.at(BEAT_S, lambda: self._beat(agent))

    def _beat(self, agent: Agent) -> None:
        if not agent.alive:
            return
        self.at(BEAT_S, lambda: self._beat(agent))
        self.say(agent.name, AgentBeat(incarnation=agent.name, number=0))
        for worker in list(agent.workers.values()):
            self.say(worker.name, WorkerBeat(worker=worker.name))

    def _to_agent(self, agent: Agent, message: Message) -> None:
        match message:
            case StartWorkers(gpus=gpus):
                for gpu in gpus:
                    if gpu not in agent.workers:
                        self.at(self.rng.uniform(0.05, 0.3), lambda g=gpu: self._start(agent, g))  # type: ignore[misc]
            case StopWorkers(gpus=gpus):
                for gpu in gpus:
                    if gpu in agent.workers:
                        self.kill_worker(agent.workers[gpu])
            case ReleaseAgent(reason=reason):
                self.say(agent.name, AgentBye(incarnation=agent.name, reason=reason))
                self.kill_agent(agent)

    def _start(self, agent: Agent, gpu: int) -> None:
        if not agent.alive or gpu in agent.workers:
            return
        worker = Worker(f"{agent.name}-w{next(self._numbers)}", agent.name, gpu)
        self.workers[worker.name] = agent.workers[gpu] = worker
        started = WorkerStarted(
            incarnation=agent.name, gpu=gpu, worker=worker.name, pid=1, start_s=0.1
        )
        self.say(agent.name, started)
        hello = WorkerHello(
            protocol=PROTOCOL, worker=worker.name, agent=agent.name, gpu=gpu, pid=1, device="cpu",
            data_port=1,
        )  # fmt: skip
        self.at(0.02, lambda: self.say(worker.name, hello))

    def leave(self, agent: Agent, grace_s: float) -> None:
        self.say(agent.name, LeaveNotice(incarnation=agent.name, source="SIGTERM", grace_s=grace_s))
        self.at(grace_s, lambda: self.kill_agent(agent))

    def kill_agent(self, agent: Agent) -> None:
        if agent.alive:
            agent.alive = False
            for worker in list(agent.workers.values()):
                self._die(worker)
            agent.workers.clear()

    def kill_worker(self, worker: Worker) -> None:
        """Its agent tells of it."""
        if not worker.alive:
            return
        self._die(worker)
        agent = self.agents[worker.agent]
        if agent.workers.get(worker.gpu) is worker:
            del agent.workers[worker.gpu]
        died = WorkerDied(incarnation=agent.name, gpu=worker.gpu, worker=worker.name, exit_code=-9)
        if agent.alive:
            self.say(agent.name, died, self.rng.choice((0.0, 0.02)))

    def _die(self, worker: Worker) -> None:
        worker.alive = False
        for body in list(self.bodies.values()):
            if worker.name in body.workers:
                self._leave_body(body, worker.name, died=True)

    # ------------------------------------------------------------------ workers

    def _to_worker(self, worker: Worker, message: Message) -> None:
        match message:
            case Assemble(install=install):
                said = Assembled(worker=worker.name, epoch=install.epoch)
                self.at(self.rng.uniform(0.01, 0.1), lambda: self.say(worker.name, said))
            case Install():
                self._install(worker, message)
            case Step() | FreeBlocks():
                self._order(worker, message)
            case PullKv():
                self.at(self.rng.uniform(0.001, 0.03), lambda: self._kv.pull(worker, message))
            case ParkKv():
                worker.parking.add((message.epoch, message.ticket))
                self.at(self.rng.uniform(0.001, 0.02), lambda: self._kv.park(worker, message))
            case UnparkKv(epoch=epoch):
                worker.parked.pop(epoch, None)
                for path, (name, number, _) in self.files.items():
                    if (name, number) == (worker.name, epoch):
                        path.unlink(missing_ok=True)
                worker.parking = {one for one in worker.parking if one[0] != epoch}
            case Retire(epoch=epoch):
                self.at(self.rng.uniform(0.002, 0.05), lambda: self._retire(worker, epoch))
            case WorkerExit():
                self.kill_worker(worker)

    def _install(self, worker: Worker, install: Install) -> None:
        key = install.epoch, install.slot.replica
        body = self.bodies.setdefault(key, Body(install))
        assert install.epoch not in worker.epochs, "two installs of one epoch"
        worker.epochs.add(install.epoch)
        if self.failing_installs or body.lost:
            self.failing_installs = max(self.failing_installs - 1, 0)
            failed = InstallFailed(worker=worker.name, epoch=install.epoch, reason="injected")
            self.say(worker.name, failed)
            return
        body.joined.add(worker.name)
        if body.joined == set(body.workers):
            for name in body.workers:
                done = Installed(
                    worker=name, epoch=install.epoch, weights_bytes=1, kv_blocks=1, load_s=0.0,
                    groups_s=0.0,
                )  # fmt: skip
                self.at(
                    self.rng.uniform(0.01, 0.1),
                    lambda n=name, d=done: self.say(n, d),  # type: ignore[misc]
                )

    def _retire(self, worker: Worker, epoch: int) -> None:
        if not self.speaks(worker.name):
            return
        for (number, _), body in list(self.bodies.items()):
            if number == epoch and worker.name in body.workers:
                self._leave_body(body, worker.name, died=False)
        worker.epochs.discard(epoch)
        self.say(worker.name, Retired(worker=worker.name, epoch=epoch))

    def _leave_body(self, body: Body, name: str, *, died: bool) -> None:
        waiting = body.done < len(body.orders)
        body.lost.add(name)
        if body.lost >= set(body.workers):
            self.bodies.pop((body.epoch, body.index), None)
            return
        if died and name in body.joined and (waiting or body.joined != set(body.workers)):
            self._tell_loss(body)

    def _tell_loss(self, body: Body) -> None:
        """Those that wait for a peer that is gone see its connection close."""
        for name in body.workers:
            if name in body.lost or name not in body.joined:
                continue
            if body.joined == set(body.workers):
                message: Message = StepFailed(
                    worker=name, epoch=body.epoch, step=0, reason="connection reset"
                )
            else:
                message = InstallFailed(worker=name, epoch=body.epoch, reason="connection reset")
            self.say(name, message, self.rng.choice((0.0, 0.05)))

    def body(self, epoch: int, worker: str) -> Body | None:
        return next(
            (
                body
                for (number, _), body in self.bodies.items()
                if number == epoch and worker in body.workers and worker not in body.lost
            ),
            None,
        )

    def _order(self, worker: Worker, order: Step | FreeBlocks) -> None:
        body = self.body(order.epoch, worker.name)
        if body is None:
            return  # dropped, as it is not installed here any more
        number = body.heard[worker.name]
        body.heard[worker.name] += 1
        assert body.orders.setdefault(number, order) == order, "workers were told different steps"
        if body.lost:
            self._tell_loss(body)
        elif min(body.heard.values()) > number:
            self.at(self.rng.uniform(0.004, 0.02), lambda: self._do_next(body))

    def _do_next(self, body: Body) -> None:
        if body.lost or any(self.workers[name].hung for name in body.workers):
            return
        order = body.orders[body.done]
        if body.broken:
            return
        if self.failing_steps and isinstance(order, Step):
            self.failing_steps -= 1
            body.broken = True
            failed = StepFailed(
                worker=body.workers[0], epoch=body.epoch, step=order.step, reason="injected"
            )
            self.say(body.workers[0], failed)
            return
        body.done += 1
        if isinstance(order, FreeBlocks):
            body.free(order.blocks)
            return
        for block in order.freed:
            body.parts.pop(block, None)
        tokens = body.engine.run(order.chunks, order.freed)
        last = body.workers[-1]
        done = StepDone(
            worker=last, epoch=body.epoch, replica=body.index, step=order.step, tokens=tokens
        )
        self.say(last, done)
