#!/usr/bin/env python
"""What a rate-limited transfer leaves of a gear's throughput: decode steps with and without one.

One process decodes with a whole stage, as a worker's serving thread does. A second one takes pages
from it (the gear is a source) or gives pages to it (it is a target, beside its serving), through
the workers' own data plane. Windows without and with a transfer take turns, so that both see the
same machine. A table is printed; the exit status is 1 when a gear keeps less than the goal.

    python tests/bench/transfer_beside.py [--json FILE]
"""

# ruff: noqa: E402 - the environment is set before torch is imported
from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

for name, value in (("OMP_NUM_THREADS", "1"), ("DS_BUILD_OPS", "0"), ("DS_ACCELERATOR", "cpu")):
    os.environ.setdefault(name, value)
ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT)]

import torch

from flexslurm.cli.endings import endings_raise
from flexslurm.engine.arena import Arena
from flexslurm.engine.kv_store import KvShape, KvStore
from flexslurm.engine.stage import LoadedStage, StagePlan, build_stage
from flexslurm.engine.tenants import Tenant
from flexslurm.engine.tiny import write_tiny_model
from flexslurm.engine.transfers import Transfers
from flexslurm.engine.worker import SWITCH_S
from flexslurm.messages import DataSource, KvPulled, Message, PullKv
from tests.engine_harness import chunk_of, lines_of, step

GOAL = 0.85
MODEL: dict[str, Any] = {
    "layers": 12,
    "hidden": 192,
    "heads": 6,
    "kv_heads": 6,
    "intermediate": 1536,
}
LAYERS, HEADS, BLOCK, HEAD_DIM = 12, 6, 16, 32
SEQUENCES, PROMPT = 8, 200
BLOCKS = 30
"""Pages of so many blocks are moved over and over: about 17 MiB."""
WINDOW_S, TURNS = 0.8, 12
SHARE = 0.6
LIMIT = 100e6
KEY = b"bench-of-transfers-beside-a-gear"


@dataclass(frozen=True)
class Kept:
    """One case. Rates are bytes per second; `kept` is throughput with over without."""

    role: str
    limit: float
    """0: none."""
    moved: float
    without: float
    """Tokens per second."""
    beside: float
    kept: float
    """The median of each window with a transfer over the mean of the two around it."""
    noise: float
    """The median of how far two neighbouring windows without a transfer are apart."""


class End:
    """A worker's memory and data plane, with pages to give and room to take."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.arena = Arena(1 << 30)
        self._news = threading.Condition()
        self._answers: dict[int, KvPulled] = {}
        self._ticket = 0
        self.transfers = Transfers(name, "127.0.0.1", KEY, self._hear)
        self.give = self._store(100)
        self.give.prepare(range(BLOCKS), [], [])
        self.take = self._store(101)

    def _store(self, epoch: int) -> KvStore:
        shape = KvShape(LAYERS, HEADS, BLOCKS, BLOCK, HEAD_DIM)
        store = KvStore(shape, torch.float64, self.arena)
        self.transfers.open(Tenant(epoch, self.arena, store, (0, LAYERS), (0, HEADS)))
        return store

    def _hear(self, message: Message) -> None:
        with self._news:
            if isinstance(message, KvPulled):
                self._answers[message.ticket] = message
            self._news.notify_all()

    def pull(self, other: str, port: int, rate: float) -> KvPulled:
        """All blocks of the other end, once."""
        self._ticket += 1
        ticket = self._ticket
        self.transfers.pull(
            PullKv(
                epoch=101,
                ticket=ticket,
                source=DataSource(other, "127.0.0.1", port, 100),
                layers=(0, LAYERS),
                heads=(0, HEADS),
                pairs=tuple((block, block) for block in range(BLOCKS)),
                rate_bytes_per_s=rate,
                timeout_s=60.0,
            )
        )
        with self._news:
            self._news.wait_for(lambda: ticket in self._answers, 60.0)
            answer = self._answers.pop(ticket)
        assert not answer.failed, answer.reason
        return answer


@contextmanager
def pulling(end: End, other: str, port: int, rate: float) -> Iterator[None]:
    """Pull over and over in a thread of its own."""
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            end.pull(other, port, rate)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def other_end(pipe: Connection) -> None:
    """The second process: pulls when it is told to, and says how much it has sent."""
    sys.setswitchinterval(SWITCH_S)
    torch.set_num_threads(1)
    end = End("w-two")
    pipe.send(end.transfers.port)
    while True:
        order = pipe.recv()
        if order is None:
            break
        if order == "sent":
            pipe.send(end.transfers.sent_bytes)
            continue
        port, rate = order
        with pulling(end, "w-one", port, rate):
            pipe.send("begun")
            pipe.recv()
        pipe.send("ended")
    end.transfers.shutdown()


class Gear:
    """A stage with sequences that decode for ever."""

    def __init__(self, model: Path, arena: Arena) -> None:
        plan = StagePlan(str(model), 1, 0, LAYERS, 1, 0, "float64", BLOCK, 400)
        self._stage: LoadedStage = build_stage(plan, arena)
        prompts = [[(7 * i + n) % 200 + 1 for i in range(PROMPT)] for n in range(SEQUENCES)]
        self._prompts = prompts
        self._start()

    def _start(self) -> None:
        self._lines = lines_of(self._prompts, 400, BLOCK, 400)
        for line in self._lines:
            while line.stored < len(line.tokens):
                found = step([self._stage], [chunk_of(line, 64)])
            line.answer.append(found[line.name])

    def tokens_per_s(self, seconds: float) -> float:
        """Decode for a while; the sequences begin anew before they grow long."""
        if len(self._lines[0].answer) > 200:
            self._start()
        began, tokens = time.perf_counter(), 0
        while (took := time.perf_counter() - began) < seconds:
            found = step([self._stage], [chunk_of(line, 1) for line in self._lines])
            for line in self._lines:
                line.answer.append(found[line.name])
            tokens += len(self._lines)
        return tokens / took


def measure(gear: Gear, one: End, pipe: Connection, port: int, role: str, limit: float) -> Kept:
    without, beside, rates = [gear.tokens_per_s(WINDOW_S)], [], []
    for _ in range(TURNS):
        if role == "source":
            pipe.send((one.transfers.port, limit))
            assert pipe.recv() == "begun"
            before = one.transfers.sent_bytes
            beside.append(gear.tokens_per_s(WINDOW_S))
            rates.append((one.transfers.sent_bytes - before) / WINDOW_S)
            pipe.send("stop")
            assert pipe.recv() == "ended"
            without.append(gear.tokens_per_s(WINDOW_S))
            continue
        before, began = sent(pipe), time.perf_counter()
        with pulling(one, "w-two", port, limit):
            beside.append(gear.tokens_per_s(WINDOW_S))
        rates.append((sent(pipe) - before) / (time.perf_counter() - began))
        without.append(gear.tokens_per_s(WINDOW_S))
    middle = statistics.median
    around = list(pairwise(without))
    kept = middle(2 * b / (w + v) for b, (w, v) in zip(beside, around, strict=True))
    noise = middle(abs(v - w) / w for w, v in around)
    return Kept(role, limit, middle(rates), middle(without), middle(beside), kept, noise)


def sent(pipe: Connection) -> int:
    """Bytes that the second process has sent so far."""
    pipe.send("sent")
    found = pipe.recv()
    assert isinstance(found, int)
    return found


def link(one: End, port: int) -> float:
    """Bytes per second of a pull while nobody decodes: the median of a few."""
    rates = []
    for _ in range(5):
        began = time.perf_counter()
        rates.append(one.pull("w-two", port, 0.0).moved_bytes / (time.perf_counter() - began))
    return statistics.median(rates)


def main() -> int:
    sys.setswitchinterval(SWITCH_S)
    torch.set_num_threads(1)
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=other_end, args=(there,))
    process.start()
    one = End("w-one")
    port = here.recv()
    with tempfile.TemporaryDirectory(prefix="flexslurm-beside-") as home:
        gear = Gear(write_tiny_model(Path(home) / "model", **MODEL), one.arena)
        whole = link(one, port)
        limits = (SHARE * whole, LIMIT)
        cases = [
            measure(gear, one, here, port, role, limit)
            for limit in limits
            for role in ("source", "target")
        ]
    here.send(None)
    process.join(10.0)
    one.transfers.shutdown()
    print(f"link: {whole / 1e6:.0f} MB/s; goal: {GOAL:.0%} of the throughput without a transfer")
    for case in cases:
        print(
            f"{case.role:>7} at {case.limit / 1e6:5.0f} MB/s: {case.moved / 1e6:5.0f} MB/s moved, "
            f"{case.without:6.0f} tokens/s without, {case.beside:6.0f} beside: {case.kept:.1%} "
            f"kept (undisturbed windows differ by {case.noise:.1%})"
        )
    if "--json" in sys.argv:
        file = Path(sys.argv[sys.argv.index("--json") + 1])
        file.write_text(json.dumps([asdict(case) for case in cases], indent=2) + "\n")
    return int(any(case.kept < GOAL for case in cases))


if __name__ == "__main__":
    with endings_raise():
        sys.exit(main())
