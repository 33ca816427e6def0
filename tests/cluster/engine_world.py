"""Real workers of a real fork server under a small head, driven by hand-made steps."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

from engine_harness import Line, chunk_of

from flexslurm.engine.nursery import Ended, Nursery, Started, WorkerSpec
from flexslurm.gear import Replica, Slot, Stage
from flexslurm.messages import (
    Install,
    Installed,
    InstallFailed,
    Pacing,
    Peer,
    Retire,
    Retired,
    Step,
    StepDone,
    WeightHolder,
    WorkerHello,
)
from tests.cluster.engine_head import EngineHead

T = TypeVar("T")
BLOCK_TOKENS, KV_BLOCKS = 4, 64
ARENA_BYTES = 64 << 20


class Node:
    """A nursery on a loop in a thread, as an agent has it."""

    def __init__(self, log_dir: Path) -> None:
        self.ended: list[Ended] = []
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        self.nursery = Nursery("cpu", log_dir, self.ended.append)

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float = 200.0) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout_s)

    def spawn(self, head: EngineHead, gpu: int, env: dict[str, str] | None = None) -> Started:
        spec = WorkerSpec(
            gpu=gpu,
            endpoint=head.endpoint,
            keys=str(head.keys_path),
            agent="agent-1",
            address="127.0.0.1",
            env=env or {},
        )
        return self.run(self.nursery.spawn(spec))

    def stop(self, worker: str, grace_s: float) -> None:
        self.loop.call_soon_threadsafe(self.nursery.stop, worker, grace_s)

    def wait_ended(self, worker: str, timeout_s: float = 200.0) -> Ended:
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            for ended in list(self.ended):
                if ended.worker == worker:
                    return ended
            time.sleep(0.01)
        raise AssertionError(f"{worker} has not ended")

    def close(self) -> None:
        self.run(self.nursery.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(200)
        self.loop.close()


def replica_of(layers: Sequence[int], tp: Sequence[int], kv_blocks: int = KV_BLOCKS) -> Replica:
    """Stages of so many layers and ranks each."""
    stops = list(accumulate(layers))
    return Replica(
        stages=tuple(
            Stage(gpu_type="v", tp=degree, lo=stop - count, hi=stop, kv_blocks=kv_blocks, node=0)
            for count, stop, degree in zip(layers, stops, tp, strict=True)
        ),
        max_batch=16,
        max_batch_tokens=64,
        max_context=512,
    )


@dataclass
class Placed:
    """An installed replica and the workers in its slots."""

    epoch: int
    replica: Replica
    workers: tuple[str, ...]
    next_step: int = 1

    @property
    def last(self) -> str:
        return self.workers[sum(stage.tp for stage in self.replica.stages[:-1])]


class World:
    """A head, and workers that it installs replicas on."""

    def __init__(self, node: Node, folder: Path, **head: float) -> None:
        self.node = node
        self.head = EngineHead(folder, **head)
        self.started: list[Started] = []
        self.data_ports: dict[str, int] = {}

    def workers(self, count: int) -> tuple[str, ...]:
        """Start until there are so many; returns their incarnations."""
        while len(self.started) < count:
            self.start()
        return tuple(started.worker for started in self.started[:count])

    def start(self, **env: str) -> str:
        """Start one more, with variables in its environment; returns its incarnation."""
        started = self.node.spawn(self.head, len(self.started), env)
        self.started.append(started)
        _, hello = self.head.wait(WorkerHello, lambda s, _: s == started.worker)
        self.data_ports[started.worker] = hello.data_port
        return started.worker

    def pid(self, worker: str) -> int:
        return next(started.pid for started in self.started if started.worker == worker)

    def log(self, worker: str) -> str:
        return next(s.log.read_text() for s in self.started if s.worker == worker)

    def send_install(
        self, epoch: int, model: Path | str, replica: Replica, workers: Sequence[str],
        *, pacing: Pacing | None = None, timeout_s: float = 60.0, skip: Sequence[str] = (),
        arena_bytes: int = ARENA_BYTES, dtype: str = "float64",
        holders: Sequence[WeightHolder] = (), rate_bytes_per_s: float = 0.0,
    ) -> Placed:  # fmt: skip
        self.head.open(epoch)
        slots = [Slot(0, s, t) for s, stage in enumerate(replica.stages) for t in range(stage.tp)]
        peers = tuple(
            Peer(slot, worker, "127.0.0.1") for slot, worker in zip(slots, workers, strict=True)
        )
        for peer in peers:
            if peer.worker in skip:
                continue
            self.head.send(
                peer.worker,
                Install(
                    epoch=epoch, model=str(model), dtype=dtype, block_tokens=BLOCK_TOKENS,
                    slot=peer.slot, replica=replica, peers=peers, arena_bytes=arena_bytes,
                    timeout_s=timeout_s, pacing=pacing, holders=tuple(holders),
                    rate_bytes_per_s=rate_bytes_per_s, probe=(1, 1),
                ),
            )  # fmt: skip
        return Placed(epoch, replica, tuple(workers))

    def install(self, epoch: int, model: Path, replica: Replica, **more: Any) -> Placed:
        workers = more.pop("workers", None) or self.workers(replica.gpus)
        placed = self.send_install(epoch, model, replica, workers, **more)
        for worker in workers:
            self.wait_installed(worker, epoch)
        return placed

    def wait_installed(self, worker: str, epoch: int) -> Installed:
        _, message = self.head.wait(
            Installed | InstallFailed,  # type: ignore[arg-type]
            lambda sender, found: sender == worker and found.epoch == epoch,
        )
        assert isinstance(message, Installed), f"{message}\n{self.log(worker)}"
        return message

    def send_step(
        self, placed: Placed, chunks: Sequence[Any], *, freed: tuple[int, ...] = ()
    ) -> int:
        number, placed.next_step = placed.next_step, placed.next_step + 1
        step = Step(epoch=placed.epoch, replica=0, step=number, chunks=tuple(chunks), freed=freed)
        self.head.send(placed.workers, step)
        return number

    def done(self, placed: Placed, number: int, timeout_s: float = 200.0) -> StepDone:
        sender, message = self.head.wait(
            StepDone,
            lambda _, found: found.epoch == placed.epoch and found.step == number,
            timeout_s,
        )
        assert sender == placed.last
        return message

    def drive(
        self, placed: Placed, lines: Sequence[Line], *, until: int | None = None, chunk: int = 5
    ) -> list[list[int]]:
        """Run lines to their end (or to `until` tokens each), one micro-batch per line in flight.

        Lines are in different micro-batches, as many as there are stages at a time.
        """
        stages = len(placed.replica.stages)
        groups = [list(lines[index::stages]) for index in range(stages)]
        flying: list[tuple[int, dict[str, Line]]] = []

        def wanted(line: Line) -> int:
            return line.wanted if until is None else min(until, line.wanted)

        while True:
            for group in groups:
                live = [line for line in group if len(line.answer) < wanted(line)]
                if live and not any(group[0].name in by_name for _, by_name in flying):
                    chunks = [chunk_of(line, chunk) for line in live]
                    names = {line.name: line for line in [group[0], *live]}
                    flying.append((self.send_step(placed, chunks), names))
            if not flying:
                return [line.answer for line in lines]
            number, by_name = flying.pop(0)
            for token in self.done(placed, number).tokens:
                by_name[token.seq_id].answer.append(token.token)

    def retire(self, placed: Placed, workers: Sequence[str] | None = None) -> float:
        """Retire an epoch on these workers (all by default); seconds until the last answered."""
        began = time.monotonic()
        since = len(self.head.heard)
        asked = placed.workers if workers is None else workers
        self.head.send(asked, Retire(epoch=placed.epoch))
        for worker in asked:
            self.head.wait(
                Retired,
                lambda s, m, w=worker: s == w and m.epoch == placed.epoch,  # type: ignore[misc]
                since=since,
            )
        self.head.end(placed.epoch)
        return time.monotonic() - began

    def kill(self, worker: str, number: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.pid(worker), number)

    def close(self) -> None:
        for started in self.started:
            self.node.stop(started.worker, 60.0)
        for started in self.started:
            self.node.wait_ended(started.worker)
        self.head.close()
