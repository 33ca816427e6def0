"""Replicas in their places without a model: steps and pulls of KV are done in any order.

A block is whole only when every part of it has come: the pages of each layer and head, from
whichever worker has them. What a pull takes is what the source holds at that moment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fake_replica import FakeReplica

from flexslurm.engine.driver import Driver, Hooks
from flexslurm.engine.ownership import ReplicaAt, ShardMap
from flexslurm.messages import (
    FreeBlocks,
    KvPulled,
    Message,
    PullKv,
    Step,
    StepDone,
    TokenEvent,
)

Cells = dict[int, int]


class FleetReplica:
    """One replica: its driver, what its workers hold, and the steps that wait."""

    def __init__(self, at: ReplicaAt, driver: Driver, block_tokens: int) -> None:
        self.at, self.driver = at, driver
        self.engine = FakeReplica(at.replica, block_tokens)
        self.waiting: list[Step | FreeBlocks] = []
        self.parts: dict[int, dict[tuple[int, int], Cells]] = {}

    def step(self) -> bool:
        """Do what waits up to the next step; whether there was one."""
        while self.waiting:
            message = self.waiting.pop(0)
            freed = message.freed if isinstance(message, Step) else message.blocks
            for block in freed:
                self.parts.pop(block, None)
            if isinstance(message, FreeBlocks):
                self.engine.free(freed)
                continue
            tokens = self.engine.run(message.chunks, freed)
            self.driver.on_step_done(
                StepDone(
                    worker=self.at.workers[-1],
                    epoch=message.epoch,
                    replica=message.replica,
                    step=message.step,
                    tokens=tokens,
                )
            )
            return True
        return False

    def cells(self, block: int) -> Cells:
        return {o: token for (b, o), token in self.engine.cells.items() if b == block}


class Fleet:
    """All replicas there are; those that were retired hold nothing any more."""

    def __init__(
        self, shards: ShardMap, emit: Callable[[TokenEvent], None], now: Callable[[], float]
    ) -> None:
        self.shards, self._emit, self._now = shards, emit, now
        self.replicas: list[FleetReplica] = []
        self.pulls: list[tuple[str, PullKv]] = []
        self.broken: list[str] = []
        self._seats = 0

    def install(self, at: ReplicaAt, *, paused: bool) -> FleetReplica:
        self._seats += 1
        driver = Driver(
            at.epoch,
            at.index,
            at.replica,
            self.shards.block_tokens,
            at.workers,
            Hooks(send=self._send, emit=self._emit, broken=self.broken.append, now=self._now),
            paused=paused,
            seat=self._seats,
        )
        made = FleetReplica(at, driver, self.shards.block_tokens)
        self.replicas.append(made)
        return made

    def retire(self, replica: FleetReplica) -> None:
        self.replicas.remove(replica)
        mine = set(replica.at.workers)
        self.pulls = [
            (to, pull)
            for to, pull in self.pulls
            if not (pull.epoch == replica.at.epoch and to in mine)
        ]

    def _send(self, workers: tuple[str, ...], message: Message) -> None:
        assert isinstance(message, Step | FreeBlocks)
        for replica in self.replicas:
            if replica.at.epoch == message.epoch and replica.at.index == message.replica:
                assert workers == replica.at.workers
                replica.waiting.append(message)
                return

    def find(self, epoch: int, worker: str) -> FleetReplica | None:
        return next(
            (r for r in self.replicas if r.at.epoch == epoch and worker in r.at.workers), None
        )

    def pull(self, number: int, fail: Sequence[int] = ()) -> KvPulled:
        """Do a pull that waits; `fail`: which of its pairs do not come."""
        to, pull = self.pulls.pop(number % len(self.pulls))
        target = self.find(pull.epoch, to)
        source = self.find(pull.source.epoch, pull.source.worker)
        assert target is not None, "a pull into a retired epoch"
        failed = []
        for n, (theirs, ours) in enumerate(pull.pairs):
            if source is None or n in fail:
                failed.append(ours)
            else:
                self._take(pull, target, source.cells(theirs), ours)
        return KvPulled(
            worker=to,
            epoch=pull.epoch,
            ticket=pull.ticket,
            moved_bytes=0 if pull.source.worker == to else len(pull.pairs),
            seconds=0.0,
            failed=tuple(failed),
        )

    def _take(self, pull: PullKv, target: FleetReplica, cells: Cells, ours: int) -> None:
        layers, heads = pull.layers, pull.heads
        parts = target.parts.setdefault(ours, {})
        for layer in range(*layers):
            for head in range(*heads):
                parts[layer, head] = cells
        info = self.shards.info
        if len(parts) < info.num_layers * info.num_kv_heads:
            return
        del target.parts[ours]
        pieces = list(parts.values())
        same = {
            offset: token
            for offset, token in pieces[0].items()
            if all(piece.get(offset) == token for piece in pieces)
        }
        for cell in [cell for cell in target.engine.cells if cell[0] == ours]:
            del target.engine.cells[cell]  # a second try after a failure
        for offset, token in same.items():
            target.engine.cells[ours, offset] = token
