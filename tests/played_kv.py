"""How played workers pull and park blocks, cell by cell; some do not come, as the test says."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from flexslurm.engine.parking import _file_name
from flexslurm.messages import KvParked, KvPulled, ParkKv, PullKv
from tests.played_bodies import Body, Cells, Worker
from tests.reshard_cases import shard_map

if TYPE_CHECKING:
    from tests.played_nodes import PlayedNodes


class PlayedKv:
    """The data plane of played nodes."""

    def __init__(self, nodes: PlayedNodes) -> None:
        self._nodes = nodes

    def pull(self, worker: Worker, pull: PullKv) -> None:
        if not self._nodes.speaks(worker.name):
            return
        target = self._nodes.body(pull.epoch, worker.name)
        if target is None:
            return  # being retired: nobody waits for it
        peer = self._nodes.workers.get(pull.source.worker)
        stored = pull.directory is not None
        if not stored and peer is not None and peer.alive and peer.hung:
            self._wait_for_silent(worker, pull, peer, self._nodes.now + pull.timeout_s)
            return
        failed = []
        for theirs, ours in pull.pairs:
            cells = (
                self._filed(pull.source.worker, pull.source.epoch, theirs)
                if stored
                else self._held(peer, pull.source.epoch, theirs)
            )
            if cells is None or self._nodes.rng.random() < self._nodes.failing_pulls:
                failed.append(ours)
            else:
                self._take(pull, target, cells, ours)
        self._pulled(worker, pull, failed, "injected" if failed else "")

    def _wait_for_silent(self, worker: Worker, pull: PullKv, peer: Worker, end: float) -> None:
        """Until the time is up, or it is ended and its connections close."""
        if peer.alive and self._nodes.now < end:
            self._nodes.at(0.2, lambda: self._wait_for_silent(worker, pull, peer, end))
        else:
            self._pulled(worker, pull, [ours for _, ours in pull.pairs], "silent")

    def _pulled(self, worker: Worker, pull: PullKv, failed: list[int], reason: str) -> None:
        if self._nodes.body(pull.epoch, worker.name) is None:
            return
        self._nodes.say(
            worker.name,
            KvPulled(
                worker=worker.name, epoch=pull.epoch, ticket=pull.ticket,
                moved_bytes=len(pull.pairs), seconds=0.0, failed=tuple(failed), reason=reason,
            ),
        )  # fmt: skip

    def _held(self, peer: Worker | None, epoch: int, block: int) -> Cells | None:
        if peer is None or not peer.alive:
            return None
        source = self._nodes.body(epoch, peer.name)
        if source is not None:
            return source.cells(block)
        return peer.parked.get(epoch, {}).get(block)

    def _filed(self, worker: str, epoch: int, block: int) -> Cells | None:
        for path, (name, number, cells) in self._nodes.files.items():
            if (name, number) == (worker, epoch) and block in cells and path.exists():
                return cells[block]
        return None

    def _take(self, pull: PullKv, target: Body, cells: Cells, ours: int) -> None:
        parts = target.parts.setdefault(ours, {})
        for layer in range(*pull.layers):
            for head in range(*pull.heads):
                parts[layer, head] = cells
        info = shard_map().info
        if len(parts) < info.num_layers * info.num_kv_heads:
            return
        pieces = list(parts.values())
        for cell in [cell for cell in target.engine.cells if cell[0] == ours]:
            del target.engine.cells[cell]  # part after part is written over in a second try
        for offset, token in pieces[0].items():
            if all(piece.get(offset) == token for piece in pieces):
                target.engine.cells[ours, offset] = token

    def park(self, worker: Worker, order: ParkKv) -> None:
        body = self._nodes.body(order.epoch, worker.name)
        called_off = (order.epoch, order.ticket) not in worker.parking
        worker.parking.discard((order.epoch, order.ticket))
        if not self._nodes.speaks(worker.name) or body is None or called_off:
            return
        kept: dict[int, Cells] = {}
        failed = []
        if order.directory is None:
            kept = worker.parked.setdefault(order.epoch, {})
        else:
            name = _file_name(worker.name, order.epoch, order.ticket)
            path = Path(order.directory) / name
            path.touch()
            self._nodes.files[path] = worker.name, order.epoch, kept
        for block in order.blocks:
            if self._nodes.rng.random() < self._nodes.failing_pulls:
                failed.append(block)
            else:
                kept[block] = body.cells(block)
        self._nodes.say(
            worker.name,
            KvParked(
                worker=worker.name, epoch=order.epoch, ticket=order.ticket, parked_bytes=1,
                seconds=0.0, failed=tuple(failed),
            ),
        )  # fmt: skip
