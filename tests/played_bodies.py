"""What played members are: agents, workers, and replicas whose KV cache is cells with tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from fake_replica import FakeReplica

from flexslurm.messages import FreeBlocks, Install, Step

Cells = dict[int, int]


class Body:
    """One replica of one epoch, over all its workers."""

    def __init__(self, install: Install) -> None:
        self.epoch, self.index = install.epoch, install.slot.replica
        self.workers = [peer.worker for peer in install.peers]
        self.engine = FakeReplica(install.replica, install.block_tokens)
        self.parts: dict[int, dict[tuple[int, int], Cells]] = {}
        self.joined: set[str] = set()
        self.lost: set[str] = set()
        """Members that died or closed it."""
        self.orders: dict[int, Step | FreeBlocks] = {}
        self.heard: dict[str, int] = dict.fromkeys(self.workers, 0)
        self.done = 0
        self.broken = False
        """A step failed: no more are done, and its pages stay."""

    def free(self, blocks: Iterable[int]) -> None:
        blocks = tuple(blocks)
        self.engine.free(blocks)
        for block in blocks:
            self.parts.pop(block, None)

    def cells(self, block: int) -> Cells:
        return {o: token for (b, o), token in self.engine.cells.items() if b == block}


@dataclass
class Worker:
    name: str
    agent: str
    gpu: int
    alive: bool = True
    hung: bool = False
    epochs: set[int] = field(default_factory=set)
    parked: dict[int, dict[int, Cells]] = field(default_factory=dict)
    parking: set[tuple[int, int]] = field(default_factory=set)
    """Epoch and ticket of what is being parked and was not called off."""


@dataclass
class Agent:
    name: str
    fragment: str
    gpus: int
    alive: bool = True
    workers: dict[int, Worker] = field(default_factory=dict)
