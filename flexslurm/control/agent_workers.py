"""An agent's workers: starts and stops them as told, says how they end; decides nothing."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from flexslurm.errors import FlexslurmError
from flexslurm.messages import WorkerDied, WorkerStarted
from flexslurm.wire.service_dir import HeadAddress

log = logging.getLogger(__name__)

_FENCE_S = 15.0
"""A bound for workers to end in: their grace, a start that is under way, the kill."""
_FENCE_LOOK_S = 0.05
_ALL_GRACE_S = 0.5
"""What workers have to end in when their head has gone: they have nobody to answer to."""


class WorkerNursery(Protocol):
    """The engine's fork server, as the agent sees it."""

    async def start(self, timeout_s: float) -> float: ...

    async def spawn(self, gpu: int, head: HeadAddress, agent: str) -> tuple[str, int, float]:
        """Returns the worker's incarnation, its process id and the seconds it took.

        `agent`: the incarnation that the worker belongs to.
        """
        ...

    def stop(self, worker: str, grace_s: float) -> None: ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class WorkerEnd:
    """A worker process ended."""

    worker: str
    gpu: int
    exit_code: int | None
    reason: str


class AgentWorkers:
    """The workers of one node, at most one on a GPU."""

    def __init__(
        self,
        incarnation: str,
        make: Callable[[Callable[[WorkerEnd], None]], WorkerNursery],
        send: Callable[[WorkerDied | WorkerStarted], None],
    ) -> None:
        """`make` is given whom to tell of ended workers; `send` tells the head, if there is one."""
        self._incarnation, self._send = incarnation, send
        self._nursery = make(self._on_end)
        self._running: dict[int, str] = {}
        """GPU to worker."""
        self._spawning: set[int] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def begin(self, timeout_s: float) -> None:
        """Have the fork server ready. Raises FlexslurmError."""
        await self._nursery.start(timeout_s)

    def start(self, gpu: int, head: HeadAddress) -> None:
        """Have a worker on this GPU; one that is there or on its way stays."""
        if gpu in self._running or gpu in self._spawning:
            return
        self._spawning.add(gpu)
        task = asyncio.create_task(self._spawn(gpu, head))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _spawn(self, gpu: int, head: HeadAddress) -> None:
        try:
            worker, pid, took = await self._nursery.spawn(gpu, head, self._incarnation)
        except FlexslurmError as error:
            log.error("cannot start a worker on GPU %d: %s", gpu, error)
            self._send(self._died(gpu, "", None, str(error)))
            return
        finally:
            self._spawning.discard(gpu)
        self._running[gpu] = worker
        self._send(
            WorkerStarted(
                incarnation=self._incarnation, gpu=gpu, worker=worker, pid=pid, start_s=took
            )
        )

    def stop(self, gpu: int, grace_s: float) -> None:
        worker = self._running.get(gpu)
        if worker is not None:
            self._nursery.stop(worker, grace_s)

    def stop_all(self) -> None:
        for gpu in list(self._running):
            self.stop(gpu, _ALL_GRACE_S)

    async def renew(self, incarnation: str) -> None:
        """Belong to another incarnation, once every worker of the one before has ended."""
        deadline = time.monotonic() + _FENCE_S
        while (self._running or self._spawning) and time.monotonic() < deadline:
            self.stop_all()
            await asyncio.sleep(_FENCE_LOOK_S)
        if self._running or self._spawning:
            log.error("workers of %s do not end: %s", self._incarnation, self._running)
        self._incarnation = incarnation

    def _on_end(self, end: WorkerEnd) -> None:
        if self._running.get(end.gpu) == end.worker:
            del self._running[end.gpu]
        self._send(self._died(end.gpu, end.worker, end.exit_code, end.reason))

    def _died(self, gpu: int, worker: str, exit_code: int | None, reason: str) -> WorkerDied:
        return WorkerDied(
            incarnation=self._incarnation, gpu=gpu, worker=worker, exit_code=exit_code,
            reason=reason,
        )  # fmt: skip

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await self._nursery.close()
