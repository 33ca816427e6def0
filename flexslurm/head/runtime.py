"""The head: controller, drivers, gateway and poller in one event loop."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import secrets
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec

import msgspec

from flexslurm.control.actions import SwitchOver
from flexslurm.control.controller import Controller
from flexslurm.control.events import Event, GearPlanned, Tick
from flexslurm.control.restore import Memory
from flexslurm.control.state import Control
from flexslurm.errors import FlexslurmError, ServiceError
from flexslurm.gear import Signature
from flexslurm.head.checkpoint_writer import CheckpointWriter
from flexslurm.head.effects import HeadEffects
from flexslurm.head.head_files import HeadFiles, read_files
from flexslurm.head.hook_notices import take_notice
from flexslurm.head.ledger import Ledger, LedgerSettings
from flexslurm.head.measuring import Measuring
from flexslurm.head.moves import MovePlanner
from flexslurm.head.node_book import NodeBook
from flexslurm.head.node_looks import looks_at_nodes
from flexslurm.head.operator import Operator
from flexslurm.head.plan_worker import Answer
from flexslurm.head.poller import JobPoller
from flexslurm.head.pool import Pool, load_of, open_pool
from flexslurm.head.reporting import Reporter
from flexslurm.head.request_notes import RequestNotes
from flexslurm.head.settings import control_settings, risk_kind, submitter_for
from flexslurm.head.storage import Storage
from flexslurm.head.unkept import UnkeptPool
from flexslurm.messages import (
    AgentHello,
    AskDone,
    AskRefused,
    CordonAsk,
    DrainAsk,
    FromCli,
    Message,
    NotifyAsk,
    ReleaseAgent,
    ReleaseAsk,
    ShiftAsk,
    StatusAsk,
    StopAsk,
)
from flexslurm.wire.address import node_address
from flexslurm.wire.journal import Journal
from flexslurm.wire.service_dir import HeadAddress, Pilot, ServiceDir
from flexslurm.wire.transport import HeadSocket

log = logging.getLogger(__name__)

_TICK_S = 0.05
P = ParamSpec("P")


class Head:
    """One head, from its start to its end."""

    poller: JobPoller | None = None
    pool: Pool | UnkeptPool | None = None

    def __init__(self, directory: ServiceDir, files: HeadFiles) -> None:
        self.directory = directory
        self.service, self.site, self.api = files.service, files.site, files.api
        self.plans, self.planner = files.plans, files.planner
        self.incarnation = f"h-{secrets.token_hex(4)}"
        self.memory = Memory()
        self.journal = Journal(directory.journal, self.memory)
        self.notes = RequestNotes(self.journal, self.memory, self._fail)
        measuring = Measuring(self.api.observer, self.service.profiling.interval_sec)
        self.ledger = Ledger(
            LedgerSettings(
                model_context=files.model_context,
                max_waiting=self.service.serving.max_waiting,
                wait_for_gpus_s=self.service.serving.wait_for_gpus,
            ),
            observer=measuring.meter,
            on_accept=self.notes.accepted,
            on_end=self.notes.ended,
        )
        place = self.service.executor.checkpoint_dir
        storage = Storage(Path(place), self.service.name) if place is not None else None
        self.checkpoints = CheckpointWriter(storage, self.incarnation, self.service.model.path)
        self.effects = HeadEffects(
            self.ledger,
            self.journal,
            MovePlanner.of(self.planner),
            tell=self._tell_soon,
            tell_now=self._tell,
            weights_s=lambda epoch: self.reporter.weights_s(epoch),  # noqa: PLW0108 - made later
            storage=storage,
            switched=self._on_switched,
        )
        probe = self.api.probe_tokens(self.service.executor.health_probe_tokens)
        kinds = self._risk_kind
        settings = control_settings(
            self.service, self.site, self.incarnation, probe, kinds, self.planner.promised
        )
        self.control = Control(settings, self.planner)
        self.controller = Controller(self.control, self.effects, time.monotonic)
        self.planner.priced_by = self.effects.moves.price
        self.planner.parked_by = self.effects.away.needed_s
        self.planner.lived_by = self.effects.moves.held
        self.planner.on_other_memory = lambda: self._open_table(or_plan=True)
        self.operator = Operator(
            self.control,
            self.planner,
            self.effects.moves,
            fragments=self._fragments,
            tell=self._tell,
            now=time.monotonic,
            bring_back=lambda name: "" if self.pool is None else self.pool.bring_back(name),
        )
        self.reporter = Reporter(self.service.name, self.control, self.ledger, self.api, measuring)
        self.nodes = NodeBook(self.control.members)
        self.socket: HeadSocket | None = None
        self._stopping: asyncio.Event = asyncio.Event()
        self._stop_reason = ""
        self._asked: list[str] = []
        self._drain_s = 0.0
        self._fault: Exception | None = None

    # ------------------------------------------------------------------ life

    def _remember(self) -> None:
        """Go on from the journal. Raises ServiceError, EnvironmentFault."""
        self.notes.open()
        self.memory.restore(self.control)
        self.effects.record({"event": "head", "head": self.incarnation, "pid": os.getpid()})
        self.reporter.begin(self.nodes.by_node, self.effects.replicas.steps)

    async def run(self) -> int:
        """Serve until told to stop; returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop, signal.Signals(number).name, 0.0)
        self._remember()
        self._open_table(or_plan=True)
        self.planner.warm_up()
        gc.freeze()  # what is loaded stays: a collection in a pause need not look at it
        found = self.checkpoints.begin()
        if found is not None:
            self.effects.record(found)
        address = node_address(self.site.network)
        self.socket = HeadSocket(self.directory.keys(), self._hear, host="0.0.0.0")  # noqa: S104
        self.effects.bind(self.socket)
        tasks: list[asyncio.Task[None]] = []
        try:
            url = await self.api.start(self.ledger, self.reporter.extra_status, address)
            self.directory.publish_head(
                HeadAddress(
                    incarnation=self.incarnation,
                    control=f"tcp://{address}:{self.socket.port}",
                    api=url,
                    node=os.uname().nodename,
                    pid=os.getpid(),
                )
            )
            log.info("head %s listens at %s", self.incarnation, url)
            tasks = self._start_tasks()
            await self._until_stopped(tasks)
        finally:
            await self._close(tasks)
        return 0

    def _start_tasks(self) -> list[asyncio.Task[None]]:
        tasks = [
            asyncio.create_task(self._ticking(), name="tick"),
            asyncio.create_task(self.plans.run(self._on_planned), name="plan"),
        ]
        pilots = self.directory.pilots()
        if pilots is not None:
            submitter = submitter_for(pilots.cluster, self.site, self.directory, pilots.allocation)
            self.pool = open_pool(
                self.service, self.site, self.directory, pilots, submitter,
                tell=self._tell, record=self.effects.record, choose=self.planner.choose,
                hurry=self._look_now,
            )  # fmt: skip
            interval_s = self.site.slurm.poll_interval
            agents = self.control.members.agents
            nodes = looks_at_nodes(submitter, agents.values, self._tell, interval_s)
            self.poller = JobPoller(
                submitter, self._pilots, self._tell, interval_s, self.pool, nodes,
                self.site.kill_wait_s,
            )  # fmt: skip
            tasks.append(asyncio.create_task(self.poller.run(), name="poll"))
        return tasks

    def _open_table(self, *, or_plan: bool) -> None:
        path = self.directory.table(self.planner.planned_memory)
        table, why_not = self.planner.fitting_table(path)
        if table is not None:
            self.planner.book.use(table)
            log.info("the gear table has %d allocations", len(table))
        elif or_plan:
            log.warning("%s: it is made now", why_not)
            self.plans.ask(None)
        else:
            log.warning("%s: gears are planned as they are needed", why_not)

    def _on_planned(self, signature: Signature | None, answer: Answer) -> None:
        if signature is None:
            self._open_table(or_plan=False)
        else:
            self.planner.book.learn(signature, answer)
        self._tell(GearPlanned())

    async def _until_stopped(self, tasks: list[asyncio.Task[None]]) -> None:
        """Until a stop is asked for; a task that fails fails the head."""
        stop = asyncio.create_task(self._stopping.wait())
        try:
            done, _ = await asyncio.wait({stop, *tasks}, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {stop}:
                task.result()
            if self._fault is not None:
                raise self._fault
        finally:
            stop.cancel()

    async def _ticking(self) -> None:
        while True:
            self._tell(Tick())
            self.ledger.tick(time.monotonic())
            self.effects.tick()
            self._tick_pool()
            drivers = self.effects.replicas.open
            measured = self.reporter.tick(drivers, stopping=bool(self._stop_reason))
            if measured is not None:
                self._tell(measured)
            await asyncio.sleep(_TICK_S)

    def _tick_pool(self) -> None:
        if self.pool is not None:
            current, max_batch = self.control.current, self.service.serving.max_batch
            serving = current.agents if current is not None else ()
            figures = self.ledger.figures
            self.pool.tick(self.control.members, lambda: load_of(figures(), max_batch), serving)

    async def _close(self, tasks: list[asyncio.Task[None]]) -> None:
        """Let running requests end for the drain time, then end everything in order."""
        reason = self._stop_reason or "the head ends"
        asked = bool(self._stop_reason) and self._fault is None
        self.ledger.cordon("the service is stopping")
        deadline = time.monotonic() + self._drain_s
        while not self.ledger.empty and time.monotonic() < deadline:
            await asyncio.sleep(_TICK_S)
        self.ledger.stop("the service is stopping")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.checkpoints.close()
        if self.pool is not None:
            await self.pool.close()
        await self.api.stop()
        if self.socket is not None:
            # pilots of a head that fails stay: another one that is launched takes them over
            for agent in self.control.members.agents.values() if asked else ():
                self.socket.send(agent.id, ReleaseAgent(reason=reason))
            for asker in self._asked:
                self.socket.send(asker, AskDone(message=reason))
            self.socket.close()
        stopped = {"event": "stopped", "head": self.incarnation, "why": reason, "pilots_end": asked}
        self.notes.note(stopped)
        self.journal.close()
        self.directory.retract_head(self.incarnation)
        log.info("head %s has ended: %s", self.incarnation, reason)

    def stop(self, reason: str, drain_s: float) -> None:
        """Begin to stop; idempotent, and a later call may only shorten the drain."""
        self._drain_s = min(self._drain_s, drain_s) if self._stop_reason else drain_s
        self._stop_reason = self._stop_reason or reason
        if self.pool is not None:
            self.pool.hold()
        self._stopping.set()

    def _fail(self, error: Exception) -> None:
        """End with this error, from wherever in the loop it came."""
        if self._fault is None:
            log.error("the head ends: %s", error)
            self._fault = error
        self.stop("the head has failed", 0.0)

    # ------------------------------------------------------------------ hearing

    def _hear(self, sender: str, message: Message) -> None:
        self._guard(self._take, sender, message)

    def _tell(self, event: Event) -> None:
        self._guard(self.controller.take, event)
        self.reporter.count_shifts()

    def _guard(self, act: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """What is half done here cannot be gone on with; another head can, from the journal."""
        if self._fault is not None:
            return
        try:
            act(*args, **kwargs)
        except FlexslurmError as error:
            self._fail(error)
        except Exception as error:  # a bug: it is logged, and this process ends
            log.exception("this is a bug in flexslurm")
            self._fail(error)

    def _take(self, sender: str, message: Message) -> None:
        if isinstance(message, FromCli):
            self._answer(sender, message)
            return
        self.reporter.take(message)
        if self.nodes.take(sender, message):
            return
        if self.checkpoints.take(message) or self.effects.take(sender, message):
            return
        self.controller.hear(sender, message)
        if isinstance(message, AgentHello) and sender in self.control.members.agents:
            ask = self.checkpoints.ask(sender, self.control.members.agents)
            if ask is not None and self.socket is not None:
                self.socket.send(sender, ask)

    def _on_switched(self, switch: SwitchOver) -> None:
        drivers = self.effects.replicas.open
        running = {key: driver.running_kv() for key, driver in drivers.items()}
        self.checkpoints.note(switch.epoch, switch.gear, running)

    def _tell_soon(self, event: Event) -> None:
        # from within a driver's call: the controller closes drivers, so it acts in the next turn
        asyncio.get_running_loop().call_soon(self._tell, event)

    def _answer(self, sender: str, ask: FromCli) -> None:
        assert self.socket is not None
        try:
            match ask:
                case StatusAsk():
                    self.socket.send(sender, self._status())
                case StopAsk(drain_s=drain_s):
                    self._asked.append(sender)
                    self.stop("stopped by 'flexslurm stop'", drain_s)
                case NotifyAsk():
                    self.effects.record({"event": "hook", "what": ask.event, "source": ask.source})
                    agents = self.control.members.agents.values()
                    take_notice(ask, self._pilots(), agents, self.site, self._tell, self._look_now)
                    self.socket.send(sender, AskDone())
                case ReleaseAsk(node=node):
                    self.socket.send(sender, AskDone(message=self._release(node)))
                case CordonAsk() | DrainAsk() | ShiftAsk():
                    answer = self.operator.answer(ask)
                    if self._fault is not None:  # it was not done
                        raise ServiceError(f"the head ends: {self._fault}")
                    self.socket.send(sender, answer)
        except FlexslurmError as error:
            self.socket.send(sender, AskRefused(message=error.message, hint=error.hint))

    def _release(self, node: str) -> str:
        if self.pool is None:
            raise ServiceError("there is no list of pilots: this service was not launched")
        return self.pool.release(node, self.control.members)

    def _look_now(self) -> None:
        if self.poller is not None:
            self.poller.look_now()

    def _fragments(self) -> set[str]:
        members = self.control.members.agents.values()
        return {p.fragment for p in self._pilots()} | {a.hello.fragment for a in members}

    def _risk_kind(self, fragment: str) -> str:
        return risk_kind(fragment, self._pilots())

    def _pilots(self) -> tuple[Pilot, ...]:
        if self.pool is not None:
            return self.pool.pilots
        pilots = self.directory.pilots()
        return pilots.pilots if pilots is not None else ()

    def _status(self) -> Message:
        jobs = self.poller.views if self.poller is not None else {}
        status = self.reporter.status(self._pilots(), jobs, stopping=bool(self._stop_reason))
        lines = self.pool.lines() if self.pool is not None else ()
        return msgspec.structs.replace(status, pool=lines)


async def run_head(path: Path) -> int:
    """Be the head of the service in `path`. Raises ServiceExists where another one lives."""
    directory = ServiceDir(path)
    directory.require()
    with directory.head_lock():
        return await Head(directory, read_files(directory)).run()
