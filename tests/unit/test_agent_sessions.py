"""An agent that its head has lost comes back as another member, its workers of before ended."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from flexslurm.config.schema import parse_section
from flexslurm.config.site import Site
from flexslurm.control import agent
from flexslurm.control.agent import Agent
from flexslurm.control.agent_options import AgentOptions
from flexslurm.control.agent_workers import WorkerEnd
from flexslurm.messages import (
    AgentBeat,
    AgentBye,
    AgentHello,
    GpuInfo,
    LeaveNotice,
    Message,
    ReleaseAgent,
    StartWorkers,
    StopWorkers,
    Welcome,
    WorkerStarted,
)
from flexslurm.slurm.states import EXIT_GIVE_BACK
from flexslurm.wire.service_dir import HeadAddress, ServiceDir
from flexslurm.wire.transport import HeadSocket

SITE = parse_section(
    Site,
    "name: x\nnetwork: {interface: lo}\ngpu_types: {a100: {memory: 1MiB, virtual: {}}}\n",
    "site.yaml",
)
LOST_S = 30.0
"""Longer than a busy machine keeps this process from running."""


class Nursery:
    """Workers that are only names; they end a moment after they are told."""

    def __init__(self, on_end: Callable[[WorkerEnd], None], start_s: float) -> None:
        self._on_end, self._start_s = on_end, start_s
        self.starting = 0
        """How many were asked for."""
        self.agents: list[str] = []
        """Whose workers were started, in order."""
        self.alive: dict[str, int] = {}
        self.most_alive = 0

    async def start(self, timeout_s: float) -> float:
        return 0.0

    async def spawn(self, gpu: int, head: HeadAddress, agent: str) -> tuple[str, int, float]:
        self.starting += 1
        await asyncio.sleep(self._start_s)
        self.agents.append(agent)
        worker = f"w{len(self.agents)}"
        self.alive[worker] = gpu
        self.most_alive = max(self.most_alive, len(self.alive))
        return worker, 1, 0.0

    def stop(self, worker: str, grace_s: float) -> None:
        asyncio.get_running_loop().call_later(0.05, self._end, worker)

    def _end(self, worker: str) -> None:
        gpu = self.alive.pop(worker, None)
        if gpu is not None:
            self._on_end(WorkerEnd(worker, gpu, 0, ""))

    async def close(self) -> None:
        self.alive.clear()


class Place:
    """A head played by hand, an agent, and what they have said."""

    def __init__(self, directory: ServiceDir) -> None:
        self.directory, self.lost_s = directory, LOST_S
        self.heard: list[Message] = []
        self.mute = False
        self.unknown: set[str] = set()
        """Members that this head has taken for lost."""
        self.socket = HeadSocket(directory.keys(), self._receive, host="127.0.0.1")
        self.nursery: Nursery | None = None
        self.task: asyncio.Task[int] | None = None

    def publish(self) -> None:
        address = f"tcp://127.0.0.1:{self.socket.port}"
        self.directory.publish_head(HeadAddress("h-1", address, "http://127.0.0.1:1", "n", 1))

    def _receive(self, sender: str, message: Message) -> None:
        self.heard.append(message)
        if not self.mute and isinstance(message, AgentHello | AgentBeat):
            head = "unknown" if sender in self.unknown else "h-1"
            self.socket.send(sender, Welcome(head=head, beat_s=0.05, lost_s=self.lost_s))

    def start(self, start_s: float = 0.0) -> None:
        def nursery(
            address: str, gpus: tuple[GpuInfo, ...], on_end: Callable[[WorkerEnd], None]
        ) -> Nursery:
            self.nursery = Nursery(on_end, start_s)
            return self.nursery

        options = AgentOptions("a100-1", "a100", 1, 0.0, 60.0, "a-1", "n1")
        self.task = asyncio.create_task(Agent(options, SITE, self.directory, nursery).run())

    async def until(self, what: Callable[[], object], within_s: float = 200.0) -> None:
        async with asyncio.timeout(within_s):
            while not what():
                assert self.task is not None and not self.task.done(), self.task
                await asyncio.sleep(0.01)

    def came(self, incarnation: str) -> bool:
        return any(isinstance(m, AgentHello) and m.incarnation == incarnation for m in self.heard)

    def beats(self, incarnation: str) -> bool:
        return any(isinstance(m, AgentBeat) and m.incarnation == incarnation for m in self.heard)

    def started(self) -> list[str]:
        return [m.incarnation for m in self.heard if isinstance(m, WorkerStarted)]


@asynccontextmanager
async def place(tmp_path: Path, start_s: float = 0.0) -> AsyncIterator[Place]:
    directory = ServiceDir(tmp_path / "svc")
    directory.create()
    made = Place(directory)
    try:
        made.publish()
        made.start(start_s)
        await made.until(lambda: made.beats("a-1"))
        yield made
        assert made.task is not None
        for member in ("a-1", "a-1.2", "a-1.3"):
            made.socket.send(member, ReleaseAgent(reason="the test ends", give_back=True))
        async with asyncio.timeout(200):
            assert await made.task == EXIT_GIVE_BACK
            while not any(isinstance(m, AgentBye) for m in made.heard):
                await asyncio.sleep(0.01)  # it is on its way
    finally:
        if made.task is not None and not made.task.done():
            made.task.cancel()
            await asyncio.gather(made.task, return_exceptions=True)
        made.socket.close()


def test_a_head_that_has_dropped_it_meets_another_member(tmp_path: Path) -> None:
    async def run() -> None:
        async with place(tmp_path) as here:
            here.socket.send("a-1", StartWorkers(gpus=(0,)))
            await here.until(lambda: here.started() == ["a-1"])
            here.unknown.add("a-1")
            await here.until(lambda: here.beats("a-1.2"))
            assert here.nursery is not None and here.nursery.alive == {}
            here.socket.send("a-1.2", StartWorkers(gpus=(0,)))
            await here.until(lambda: here.started() == ["a-1", "a-1.2"])
            assert here.nursery.agents == ["a-1", "a-1.2"] and here.nursery.most_alive == 1

    asyncio.run(run())


def test_an_agent_that_is_too_far_behind_comes_back_as_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "_MOST_UNREAD", 20)

    async def run() -> None:
        async with place(tmp_path) as here:

            def flooded() -> bool:
                for _ in range(200):
                    here.socket.send("a-1", StopWorkers(gpus=(0,), grace_s=1.0))
                return here.came("a-1.2")

            await here.until(flooded)
            await here.until(lambda: here.beats("a-1.2"))

    asyncio.run(run())


def test_silence_ends_a_session_too(tmp_path: Path) -> None:
    """The head never says that it has lost anybody: the agent finds out by itself."""

    async def run() -> None:
        async with place(tmp_path) as here:
            here.socket.send("a-1", StartWorkers(gpus=(0,)))
            await here.until(lambda: here.started() == ["a-1"])
            here.lost_s = 1.0
            said = len(here.heard) + 2
            await here.until(lambda: len(here.heard) > said or here.came("a-1.2"))
            here.mute = True
            await here.until(lambda: here.came("a-1.2"))
            assert here.nursery is not None and here.nursery.alive == {}
            here.mute, here.lost_s = False, LOST_S
            await here.until(lambda: here.beats("a-1.2"))

    asyncio.run(run())


def test_a_worker_that_is_just_starting_is_waited_for_and_ended(tmp_path: Path) -> None:
    async def run() -> None:
        async with place(tmp_path, start_s=0.5) as here:
            here.socket.send("a-1", StartWorkers(gpus=(0,)))
            await here.until(lambda: here.nursery is not None and here.nursery.starting)
            here.unknown.add("a-1")
            await here.until(lambda: here.beats("a-1.2"))
            assert here.nursery is not None
            assert here.nursery.agents == ["a-1"] and here.nursery.alive == {}

    asyncio.run(run())


def test_signals_are_told_again_to_whoever_welcomes_it(tmp_path: Path) -> None:
    """Its deadline is the same one, whoever it is now."""

    async def run() -> None:
        async with place(tmp_path) as here:
            os.kill(os.getpid(), signal.SIGTERM)
            await here.until(lambda: any(isinstance(m, LeaveNotice) for m in here.heard))
            here.unknown.add("a-1")
            await here.until(lambda: here.beats("a-1.2"))
            notices = [m for m in here.heard if isinstance(m, LeaveNotice)]
            assert [m.incarnation for m in notices] == ["a-1", "a-1.2"]
            assert {m.source for m in notices} == {"SIGTERM"}
            assert 60.0 >= notices[0].grace_s > notices[1].grace_s > 0.0

    asyncio.run(run())
