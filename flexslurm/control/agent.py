"""The agent: one process on each node of a pilot; holds no model and decides nothing.

It takes inventory, keeps a fork server warm, starts and stops workers as the head says, and turns
signals into notices. It never ends by itself on a signal: Slurm sends SIGTERM when the grace time
*begins*, and the workers' GPUs serve until the head has moved off them or Slurm kills the job.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec

from flexslurm.config.site import Site
from flexslurm.control.agent_options import AgentOptions
from flexslurm.control.agent_workers import AgentWorkers, WorkerEnd, WorkerNursery
from flexslurm.control.directory_probe import probe_directory
from flexslurm.control.inventory import gpus_of_node
from flexslurm.control.node_watch import NodeWatch
from flexslurm.errors import DeadlineExceeded, EnvironmentFault
from flexslurm.messages import (
    PROTOCOL,
    AgentBeat,
    AgentBye,
    AgentHello,
    DirectoryProbed,
    GpuInfo,
    LeaveNotice,
    ProbeDirectory,
    Refused,
    ReleaseAgent,
    StartWorkers,
    StopWorkers,
    ToAgent,
    Welcome,
    WorkerDied,
    WorkerStarted,
)
from flexslurm.slurm.states import EXIT_GIVE_BACK
from flexslurm.wire.address import node_address
from flexslurm.wire.service_dir import HeadAddress, ServiceDir
from flexslurm.wire.transport import HeadLink

log = logging.getLogger(__name__)

_LEAVE_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_HELLO_EVERY_S = 0.5
_NURSERY_START_S = 180.0
"""A cold start imports torch, DeepSpeed and transformers, from a shared file system perhaps."""
_LOOK_EVERY_S = 0.5
"""For a head in the service's directory."""
_MOST_UNREAD = 1000
"""Messages of the head; an agent that is this far behind comes back as another member."""
_UNWELCOME_S = 10.0
"""Silence after which a head that has not welcomed us yet counts as lost."""

NurseryFactory = Callable[[str, tuple[GpuInfo, ...], Callable[[WorkerEnd], None]], WorkerNursery]
"""From the node's address, its GPUs and a callback for ended workers."""


class Agent:
    """One agent; `run` returns its exit code."""

    def __init__(
        self, options: AgentOptions, site: Site, directory: ServiceDir, nursery: NurseryFactory
    ) -> None:
        self._options, self._site, self._directory = options, site, directory
        self._make_nursery = nursery
        self._incarnation = options.incarnation
        self._sessions = 1
        self._workers: AgentWorkers | None = None
        self._gpus: tuple[GpuInfo, ...] = ()
        self._watch: NodeWatch | None = None
        self._address = ""
        self._link: HeadLink[ToAgent] | None = None
        self._head: HeadAddress | None = None
        self._welcome: Welcome | None = None
        self._welcomed_at = time.monotonic()
        self._dropped = False
        """The head has taken us for lost meanwhile."""
        self._notice: str | None = None
        """The signal that set the deadline."""
        self._leaves_at = 0.0
        self._ended: asyncio.Future[str] | None = None
        self._exit_code = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        """From the inventory to the end, which the head brings (or Ctrl-C); returns the exit code.

        Raises EnvironmentFault for GPUs that are not there, DeadlineExceeded when no head comes.
        """
        loop = asyncio.get_running_loop()
        self._ended = loop.create_future()
        for number in _LEAVE_SIGNALS:
            loop.add_signal_handler(number, self._on_signal, signal.Signals(number))
        loop.add_signal_handler(signal.SIGINT, self._finish, "interrupted")
        loop.add_signal_handler(signal.SIGCONT, lambda: None)
        gpu_type = self._site.gpu_types.get(self._options.gpu_type)
        if gpu_type is None:
            raise EnvironmentFault(
                f"GPU type '{self._options.gpu_type}' is not in the site file",
                hint="launch the service again with the site file that has it",
            )
        self._gpus = await asyncio.to_thread(
            gpus_of_node,
            self._options.gpu_type,
            gpu_type,
            self._options.gpus,
            fragment=self._options.fragment,
        )
        try:
            return await self._live()
        finally:
            await self._close()

    async def _live(self) -> int:
        assert self._ended is not None
        head = await self._find_head(None)
        if head is None:
            return 0
        self._address = node_address(self._site.network, head.control)
        self._workers = AgentWorkers(
            self._incarnation,
            lambda on_end: self._make_nursery(self._address, self._gpus, on_end),
            self._send,
        )
        await self._workers.begin(_NURSERY_START_S)
        self._watch = NodeWatch(self._incarnation, self._gpus)
        self._watch.start()
        while not self._ended.done():
            await self._serve(head)
            if not self._ended.done():
                await self._start_over()
                found = await self._find_head(head)
                if found is None:
                    break
                head = found
        log.info("ends: %s", self._ended.result() if self._ended.done() else "no head")
        return self._exit_code

    async def _start_over(self) -> None:
        """Be a new member: whoever has lost us goes on without us, and must not meet our ghost."""
        assert self._workers is not None
        self._sessions += 1
        self._incarnation = f"{self._options.incarnation}.{self._sessions}"
        await self._workers.renew(self._incarnation)
        log.info("comes again as %s", self._incarnation)

    # ------------------------------------------------------------------ the head

    async def _find_head(self, last: HeadAddress | None) -> HeadAddress | None:
        """The published head; None when the agent is told to end. Raises DeadlineExceeded."""
        assert self._ended is not None
        told = False
        while time.monotonic() < self._welcomed_at + self._options.head_wait_s:
            head = self._directory.head()
            if head is not None:
                return head
            if not told:
                log.info("waits for a head in %s", self._directory.path)
                told = True
            if self._ended.done():
                return None
            await self._or_ended(asyncio.sleep(_LOOK_EVERY_S))
        where = f" after {last.control}" if last is not None else ""
        raise DeadlineExceeded(
            f"no head{where} within {self._options.head_wait_s:g} s",
            hint="flexslurm launch starts one; its log says why it has ended",
        )

    async def _serve(self, head: HeadAddress) -> None:
        """Work for this head until it falls silent, another is published, or the end."""
        assert self._ended is not None
        loop = asyncio.get_running_loop()
        inbox: asyncio.Queue[ToAgent] = asyncio.Queue(_MOST_UNREAD)

        def keep(message: ToAgent) -> None:
            if inbox.full():
                self._dropped = True  # what it would not read is a new member's to be told
            else:
                inbox.put_nowait(message)

        def receive(message: ToAgent) -> None:
            loop.call_soon_threadsafe(keep, message)

        self._head, self._welcome, self._dropped = head, None, False
        link: HeadLink[ToAgent] = HeadLink(
            head.control, self._directory.keys(), self._incarnation, ToAgent, receive
        )
        self._link = link
        beating = asyncio.create_task(self._beat(link))
        try:
            while not (self._ended.done() or beating.done() or self._dropped):
                message = await self._or_ended(_next(inbox, beating))
                if message is not None:
                    self._on_message(message)
        finally:
            beating.cancel()
            if self._ended.done():
                bye = AgentBye(incarnation=self._incarnation, reason=self._ended.result())
                link.send(bye)
            self._link = None
            await asyncio.to_thread(link.close)
            if self._workers is not None:
                self._workers.stop_all()

    async def _beat(self, link: HeadLink[ToAgent]) -> None:
        """Say hello until welcomed, then beat; returns when the head is lost or replaced."""
        number = 0
        lost_s = _UNWELCOME_S
        while link.silent_s < lost_s:
            if self._welcome is None:
                link.send(self._hello())
                pause = _HELLO_EVERY_S
            else:
                number += 1
                link.send(AgentBeat(incarnation=self._incarnation, number=number))
                readings = None if self._watch is None else self._watch.take()
                if readings is not None:
                    link.send(msgspec.structs.replace(readings, incarnation=self._incarnation))
                pause, lost_s = self._welcome.beat_s, self._welcome.lost_s
            await asyncio.sleep(pause)
            published = self._directory.head() if link.silent_s > 2 * pause else self._head
            if published is not None and published != self._head:
                log.warning("another head has taken over: %s", published.control)
                return
        log.warning("the head has said nothing for %.1f s", link.silent_s)

    def _hello(self) -> AgentHello:
        options = self._options
        end = os.environ.get("SLURM_JOB_END_TIME", "")
        walltime = float(end) - time.time() if end.isdecimal() else None
        return AgentHello(
            protocol=PROTOCOL,
            incarnation=self._incarnation,
            fragment=options.fragment,
            node=options.node,
            address=self._address,
            gpu_type=options.gpu_type,
            gpus=self._gpus,
            job_id=options.job_id,
            restarts=options.restarts,
            pid=os.getpid(),
            walltime_s=walltime,
        )

    def _on_message(self, message: ToAgent) -> None:
        assert self._workers is not None and self._head is not None
        match message:
            case Welcome():
                self._on_welcome(message)
            case Refused(reason=reason):
                log.error("the head refused this agent: %s", reason)
                self._finish(f"refused: {reason}")
            case StartWorkers(gpus=gpus):
                for gpu in gpus:
                    self._workers.start(gpu, self._head)
            case StopWorkers(gpus=gpus, grace_s=grace_s):
                for gpu in gpus:
                    self._workers.stop(gpu, grace_s)
            case ProbeDirectory():
                self._begin(self._probe(message))
            case ReleaseAgent(reason=reason, give_back=give_back):
                self._exit_code = EXIT_GIVE_BACK if give_back else 0
                self._finish(reason)

    def _on_welcome(self, welcome: Welcome) -> None:
        assert self._head is not None
        if welcome.head != self._head.incarnation:
            self._dropped = self._welcome is not None  # and else our hello has not arrived yet
            return
        fresh, self._welcome = self._welcome is None, welcome
        self._welcomed_at = time.monotonic()
        if fresh:
            log.info("welcomed by head %s", welcome.head)
            if self._notice is not None:
                self._send_notice(self._notice, self._leaves_at)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _probe(self, ask: ProbeDirectory) -> None:
        """In a thread: a shared file system may hang, and the head does not wait for this."""
        reason = await asyncio.to_thread(probe_directory, Path(ask.path), ask.token)
        incarnation = self._incarnation
        self._send(DirectoryProbed(incarnation=incarnation, path=ask.path, reason=reason))

    def _send(self, message: WorkerDied | WorkerStarted | LeaveNotice | DirectoryProbed) -> None:
        if self._link is not None:
            self._link.send(message)

    # ------------------------------------------------------------------ ending

    def _on_signal(self, number: signal.Signals) -> None:
        """Slurm warns two or three times; the earliest end that follows is the deadline."""
        promised_s = self._options.notice_s(number.name)
        log.warning("%s: must leave within %.0f s", number.name, promised_s)
        leaves_at = time.monotonic() + promised_s
        if self._notice is None or leaves_at < self._leaves_at:
            self._notice, self._leaves_at = number.name, leaves_at
        if self._welcome is not None:
            self._send_notice(number.name, leaves_at)

    def _send_notice(self, source: str, leaves_at: float) -> None:
        left_s = max(leaves_at - time.monotonic(), 0.0)
        incarnation = self._incarnation
        self._send(LeaveNotice(incarnation=incarnation, source=source, grace_s=left_s))

    def _finish(self, reason: str) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(reason)

    async def _or_ended(self, work: Awaitable[ToAgent | None]) -> ToAgent | None:
        """Wait for `work` or for the end, whichever comes first."""
        assert self._ended is not None
        task = asyncio.ensure_future(work)
        both: set[asyncio.Future[Any]] = {task, self._ended}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        task.cancel()
        return None

    async def _close(self) -> None:
        if self._watch is not None:
            self._watch.close()
        for task in list(self._tasks):
            task.cancel()
        if self._workers is not None:
            await self._workers.close()


async def _next(inbox: asyncio.Queue[ToAgent], until: asyncio.Task[None]) -> ToAgent | None:
    """The next message, or None when `until` ends first."""
    getter = asyncio.ensure_future(inbox.get())
    try:
        both: set[asyncio.Future[Any]] = {getter, until}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        return getter.result() if getter.done() else None
    finally:
        getter.cancel()
