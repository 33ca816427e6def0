"""Two ends of the data plane in one process, and pages that tell where they belong."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from flexslurm.engine import faults
from flexslurm.engine.arena import Arena
from flexslurm.engine.faults import Point
from flexslurm.engine.kv_store import KvShape, KvStore
from flexslurm.engine.tenants import Tenant
from flexslurm.engine.transfers import Transfers
from flexslurm.messages import DataSource, KvParked, KvPulled, Message, PullKv

KEY = b"k" * 32
LAYERS, HEADS, TOKENS, SIZE = 4, 3, 4, 8
PAGE = 2 * TOKENS * SIZE * 8


class Side:
    """A worker's memory and data plane, without the worker."""

    def __init__(self, name: str, key: bytes = KEY, parked_bytes: int | None = None) -> None:
        self.name = name
        self.arena = Arena(4000 * PAGE)
        self.heard: list[Message] = []
        self.news = threading.Condition()
        self.transfers = Transfers(name, "127.0.0.1", key, self.hear, parked_bytes=parked_bytes)

    def hear(self, message: Message) -> None:
        with self.news:
            self.heard.append(message)
            self.news.notify_all()

    def store(
        self,
        epoch: int,
        layers: tuple[int, int] = (0, LAYERS),
        heads: tuple[int, int] = (0, HEADS),
        blocks: int = 64,
    ) -> KvStore:
        shape = KvShape(layers[1] - layers[0], heads[1] - heads[0], blocks, TOKENS, SIZE)
        store = KvStore(shape, torch.float64, self.arena)
        self.transfers.open(Tenant(epoch, self.arena, store, layers, heads))
        return store

    def answer(self, ticket: int, timeout_s: float = 60.0) -> KvPulled | KvParked:
        with self.news:
            assert self.news.wait_for(lambda: self._found(ticket) is not None, timeout_s), (
                "no answer"
            )
            found = self._found(ticket)
            assert found is not None
            return found

    def _found(self, ticket: int) -> KvPulled | KvParked | None:
        for message in self.heard:
            if isinstance(message, KvPulled | KvParked) and message.ticket == ticket:
                return message
        return None

    def close(self) -> None:
        self.transfers.shutdown()
        self.arena.check_integrity()
        self.arena.close()


class Gate:
    """Where a thread is held until the test has done what belongs before it goes on."""

    def __init__(self) -> None:
        self._reached, self._open = threading.Event(), threading.Event()

    def wait(self) -> None:
        """Until the thread stands there."""
        assert self._reached.wait(60), "nobody came to the gate"

    def open(self) -> None:
        self._open.set()

    def pass_through(self) -> None:
        self._reached.set()
        assert self._open.wait(60), "the gate was not opened"


@contextmanager
def gate_at(point: Point, number: int = 1) -> Iterator[Gate]:
    """Holds whoever reaches the point for the so-manieth time; opens at the latest at the end."""
    gate, seen, reach = Gate(), 0, faults.reach

    def reached(where: Point) -> bool:
        nonlocal seen
        seen += where is point
        if where is point and seen == number:
            gate.pass_through()
        return reach(where)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(faults, "reach", reached)
        try:
            yield gate
        finally:
            gate.open()


def two_sides() -> Iterator[tuple[Side, Side]]:
    """For a fixture."""
    one, two = Side("w-one"), Side("w-two")
    yield one, two
    for side in (one, two):
        side.close()
    faults.arm("")


def write(store: KvStore, blocks: range, origin: tuple[int, int] = (0, 0)) -> None:
    """Pages that tell where they belong, by the model's numbers."""
    store.prepare(blocks, [], [])
    for block in blocks:
        for layer in range(store.shape.layers):
            for head in range(store.shape.heads):
                page = store.pool[store.cells[block, layer, head]]
                page.fill_(block * 10_000 + (origin[0] + layer) * 100 + origin[1] + head)
                page[0, 0, 0] = -1.0


def check(
    store: KvStore, pairs: list[tuple[int, int]], layers: tuple[int, int], heads: tuple[int, int],
    origin: tuple[int, int] = (0, 0),
) -> None:  # fmt: skip
    for theirs, ours in pairs:
        for layer in range(*layers):
            for head in range(*heads):
                page = store.pool[store.cells[ours, layer - origin[0], head - origin[1]]]
                assert page[0, 0, 0] == -1.0
                assert page[1, 1, 1] == theirs * 10_000 + layer * 100 + head


def pull(giver: Side, epoch: int, to: int, pairs: list[tuple[int, int]], **more: object) -> PullKv:
    fields: dict[str, object] = {
        "epoch": to, "ticket": 1, "layers": (0, LAYERS), "heads": (0, HEADS),
        "source": DataSource(giver.name, "127.0.0.1", giver.transfers.port, epoch),
        "pairs": tuple(pairs), "timeout_s": 60.0,
    }  # fmt: skip
    return PullKv(**(fields | more))  # type: ignore[arg-type]
