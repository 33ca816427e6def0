"""A live shift by hand: a new epoch beside the old, blocks pulled in rounds, lines carried over."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from engine_harness import Line

from flexslurm.engine.families import check_model
from flexslurm.engine.kv_moves import KvPull, kv_pulls
from flexslurm.engine.ownership import ReplicaAt, Seat, ShardMap
from flexslurm.gear import Replica
from flexslurm.messages import Installed, KvParked, KvPulled, ParkKv, UnparkKv
from tests.cluster.engine_world import BLOCK_TOKENS, KV_BLOCKS, Placed, World


@dataclass
class Shifter:
    """Carries lines from epoch to epoch in one world."""

    world: World
    model: Path
    lines: list[Line]
    dtype: str = "float64"
    node_of: dict[str, str] = field(default_factory=dict)
    """All on one node where nothing is said."""
    ticket: int = 0
    moved: int = 0
    """Bytes of KV that went between workers."""

    def __post_init__(self) -> None:
        self.shards = ShardMap(check_model(self.model), self.dtype, BLOCK_TOKENS)

    def at(self, placed: Placed) -> ReplicaAt:
        seats = tuple(
            Seat(w, self.node_of.get(w, "n1"), "127.0.0.1", self.world.data_ports[w])
            for w in placed.workers
        )
        return ReplicaAt(placed.epoch, 0, placed.replica, seats)

    def begin(
        self,
        old: Placed | None,
        epoch: int,
        replica: Replica,
        workers: Sequence[str],
        **more: object,
    ) -> Placed:
        """Send the install, with the old epoch's workers as holders."""
        holders = () if old is None else self.at(old).holders()
        return self.world.send_install(
            epoch, self.model, replica, workers, holders=holders, dtype=self.dtype, **more
        )  # type: ignore[arg-type]

    def installed(self, placed: Placed) -> list[Installed]:
        return [self.world.wait_installed(worker, placed.epoch) for worker in placed.workers]

    def drive(self, placed: Placed, tokens: int) -> None:
        """Give every line so many more tokens, as far as it wants any."""
        least = min((len(line.answer) for line in self.lines if not line.done), default=0)
        self.world.drive(placed, self.lines, until=least + tokens)

    def new_blocks(self, seed: int) -> dict[str, tuple[int, ...]]:
        """Blocks of the new epoch for each line, scattered."""
        free = list(range(KV_BLOCKS))
        random.Random(seed).shuffle(free)
        found = {}
        for line in self.lines:
            found[line.name], free = tuple(free[: len(line.blocks)]), free[len(line.blocks) :]
        return found

    def send_pulls(
        self, old: Placed, new: Placed, pairs: Sequence[tuple[int, int]],
        directory: str | None = None, **more: object,
    ) -> list[KvPull]:  # fmt: skip
        pulls = kv_pulls(
            self.shards, self.at(old), self.at(new), pairs, first_ticket=self.ticket, **more
        )  # type: ignore[arg-type]
        self.ticket += len(pulls)
        for pull in pulls:
            order = msgspec.structs.replace(pull.message, directory=directory)
            self.world.head.send(pull.to, order)
        return list(pulls)

    def pulled(self, pulls: Sequence[KvPull], timeout_s: float = 200.0) -> list[KvPulled]:
        found = []
        for pull in pulls:
            _, answer = self.world.head.wait(
                KvPulled,
                lambda s, m, p=pull: s == p.to and m.ticket == p.message.ticket,  # type: ignore[misc]
                timeout_s,
            )
            found.append(answer)
        self.moved += sum(answer.moved_bytes for answer in found)
        return found

    def carry(self, old: Placed, new: Placed, seed: int = 0, rounds: int = 2) -> dict[str, int]:
        """Pull all blocks, full ones while the old epoch decodes; whose blocks failed, and where.

        Lines go on in the new epoch from what has come: the number of whole blocks before the
        first that failed, if any did.
        """
        blocks = self.new_blocks(seed)
        done = {line.name: 0 for line in self.lines}
        pulls: list[KvPull] = []
        for _ in range(rounds):
            pulls += self.send_pulls(old, new, self._pairs(blocks, done, whole=True))
            self.drive(old, 2)
        pulls += self.send_pulls(old, new, self._pairs(blocks, done, whole=False))
        failed = {block for answer in self.pulled(pulls) for block in answer.failed}
        lost = {}
        for line in self.lines:
            own = blocks[line.name]
            whole = next((n for n, block in enumerate(own) if block in failed), None)
            if whole is not None:
                lost[line.name] = whole
                line.stored = min(line.stored, whole * BLOCK_TOKENS)
            line.blocks = own
        return lost

    def _pairs(
        self, blocks: dict[str, tuple[int, ...]], done: dict[str, int], *, whole: bool
    ) -> list[tuple[int, int]]:
        pairs = []
        for line in self.lines:
            stop = line.stored // BLOCK_TOKENS if whole else -(-line.stored // BLOCK_TOKENS)
            first, done[line.name] = done[line.name], stop
            pairs += list(zip(line.blocks[first:stop], blocks[line.name][first:stop], strict=True))
        return pairs

    def held(self) -> list[int]:
        """All blocks that hold tokens."""
        return [b for line in self.lines for b in line.blocks[: -(-line.stored // BLOCK_TOKENS)]]

    def park(self, placed: Placed, worker: str, blocks: Sequence[int], **more: object) -> KvParked:
        self.ticket += 1
        order = ParkKv(epoch=placed.epoch, ticket=self.ticket, blocks=tuple(blocks), **more)  # type: ignore[arg-type]
        self.world.head.send(worker, order)
        _, answer = self.world.head.wait(
            KvParked, lambda s, m: s == worker and m.ticket == order.ticket
        )
        return answer

    def unpark(self, placed: Placed) -> None:
        """Have each worker drop what it parked of a retired epoch; returns once all have.

        There is no answer to that order. Each worker takes its messages in order, and one to park
        what is not there is answered at once.
        """
        self.world.head.send(placed.workers, UnparkKv(epoch=placed.epoch))
        for worker in placed.workers:
            assert self.park(placed, worker, (0,)).failed == (0,)

    def used(self, worker: str, wanted: int, timeout_s: float = 200.0) -> None:
        """Wait for a beat with this figure of the arena."""
        end = time.monotonic() + timeout_s
        while self.world.head.used.get(worker) != wanted:
            assert time.monotonic() < end, f"{self.world.head.used.get(worker)}, not {wanted}"
            time.sleep(0.02)

    def check_memory(self, placed: Placed) -> None:
        """Each worker holds its weights and the pages of the blocks in use, to the byte."""
        replica = self.at(placed)
        blocks = len(self.held())
        for worker, holding in zip(placed.workers, replica.holdings, strict=True):
            pages = blocks * self.shards.block_bytes(holding)
            self.used(worker, self.shards.weights_bytes(holding) + pages)
