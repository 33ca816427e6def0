"""Fills new weights from whoever has them: this GPU, other workers, the checkpoint, in that order.

Who gives what is `reshard.weight_moves`, the same function with which the head plans. A worker that
fails in the middle is asked no more: what is still missing is planned again without it. What is
left in the end is read from the files. What other workers have may come before there is memory for
it, to the host (`stage`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import torch

from flexslurm.engine import faults
from flexslurm.engine.arena import Arena
from flexslurm.engine.byte_runs import Sink
from flexslurm.engine.families import DTYPE_BYTES
from flexslurm.engine.faults import Point
from flexslurm.engine.host_pages import populate
from flexslurm.engine.ownership import Holding, ShardMap
from flexslurm.engine.reshard import CHECKPOINT, LinkKind, WeightMove, weight_moves
from flexslurm.engine.shard import ShardSpec
from flexslurm.engine.spans import Spans
from flexslurm.engine.transfer_client import Cancel, Fetched, Fetcher, Job
from flexslurm.engine.transfer_wire import AskWeights, PieceRange, Ranges
from flexslurm.engine.weight_runs import WeightSink
from flexslurm.engine.weight_staging import Fetch, StagedWeights
from flexslurm.engine.weight_store import WeightStore
from flexslurm.engine.weights import FileSource, Filled, Need, Progress
from flexslurm.messages import WeightHolder

log = logging.getLogger(__name__)

_LOOK_S = 0.1
_HALVED_BYTES = 8 << 20
"""So much comes over two connections: while one end of one waits its turn, the other goes on."""
_LOCAL = (LinkKind.HELD, LinkKind.GPU)
_PEERS = (LinkKind.NODE, LinkKind.NETWORK)


@dataclass(frozen=True, slots=True)
class Peers:
    """Who may be asked, and who asks."""

    shards: ShardMap
    need: Holding
    worker: str
    node: str
    holders: tuple[WeightHolder, ...]
    rate_bytes_per_s: float
    deadline: float
    """Of time.monotonic()."""

    def moves(self, gone: frozenset[str] = frozenset()) -> tuple[WeightMove, ...]:
        return weight_moves(self.shards, self.need, self.worker, self.node, self.holders, gone)


@dataclass(slots=True)
class _OpenPiece:
    """A piece that is being filled."""

    need: Need
    raw: torch.Tensor
    left: Spans
    """Indices along the piece's dim that are missing."""

    def place(self, lo: int, hi: int) -> torch.Tensor:
        """The bytes of a part."""
        start, stop = self.need.view.segment.offsets(lo, hi)
        first, _ = self.need.view.segment.offsets(self.need.piece.lo, self.need.piece.hi)
        return self.raw[start - first : stop - first]


@dataclass(slots=True)
class _Tally:
    """Bytes that are there, counted by several threads and told by one."""

    total: int
    progress: Progress | None
    lock: threading.Lock = field(default_factory=threading.Lock)
    done: int = 0

    def add(self, nbytes: int) -> None:
        with self.lock:
            self.done += nbytes

    def tell(self) -> None:
        if self.progress is not None:
            self.progress("weights", min(self.done, self.total), self.total)


class PeerFiller:
    """A `WeightFiller` for one install."""

    def __init__(
        self, files: FileSource, arena: Arena, peers: Peers, fetcher: Fetcher, cancel: Cancel
    ) -> None:
        self._files, self._arena, self._peers = files, arena, peers
        self._fetcher, self._cancel = fetcher, cancel
        self._gone = {holder.worker for holder in peers.holders if not holder.data_port}
        """Not asked: they have no data server, or have failed."""
        self._planned: dict[frozenset[str], tuple[WeightMove, ...]] = {}
        self._copied = self._moved = self._read = 0
        self._staged = StagedWeights()
        self._staged_s = 0.0
        """How long it took, until a fill has counted it."""

    def check(self, spec: ShardSpec) -> None:
        self._files.check(spec)

    def stage(self, most_bytes: int, waits: Callable[[], bool]) -> bool:
        """Fetch to host memory what peers have, as long as `waits`; whether that was all of it."""
        began, left = time.monotonic(), most_bytes
        plan: dict[int, list[PieceRange]] = {}
        moves = [m for m in self._moves(frozenset(self._gone)) if m.link in _PEERS]
        for move in moves:
            if move.nbytes <= left:
                left -= move.nbytes
                piece = PieceRange(move.tensor, move.dim, move.lo, move.hi, move.nbytes)
                plan.setdefault(move.source, []).append(piece)
        parts = [(source, part) for source, pieces in plan.items() for part in _halves(pieces)]
        try:
            whole = self._staged.fetch(
                [(pieces, self._ahead(source, pieces)) for source, pieces in parts], waits
            )
        except OSError as error:  # the host gives no memory: all of it is fetched as usual
            log.warning("no weights are fetched ahead: %s", error)
            whole = False
        self._staged_s = time.monotonic() - began
        return whole and sum(len(pieces) for _, pieces in parts) == len(moves)

    def _ahead(self, source: int, pieces: Sequence[PieceRange]) -> Fetch:
        def fetch(sink: Sink, cancel: Cancel) -> Fetched:
            return self._fetched(source, pieces, sink, cancel)

        return fetch

    @property
    def lacks_bytes(self) -> int:
        """What is to be taken anew of this GPU's memory."""
        moves = self._moves(frozenset())
        return sum(move.nbytes for move in moves if move.link is not LinkKind.HELD)

    def go_on(self, rate_bytes_per_s: float, deadline: float) -> None:
        """There is room now: what is left is fetched at this rate, until then."""
        peers = replace(self._peers, rate_bytes_per_s=rate_bytes_per_s, deadline=deadline)
        self._peers = peers

    def fill(
        self, weights: WeightStore, needs: Sequence[Need], progress: Progress | None
    ) -> Filled:
        """Raises ModelError where files are at fault, and what `progress` raises."""
        faults.reach(Point.WEIGHTS)
        self._copied = self._moved = self._read = 0
        tally = _Tally(sum(need.piece.nbytes for need in needs), progress)
        with ExitStack() as stack:
            todo = {
                (need.piece.tensor, need.piece.dim): _OpenPiece(
                    need,
                    stack.enter_context(weights.filling(need.view)),
                    Spans([(need.piece.lo, need.piece.hi)]),
                )
                for need in needs
            }
            if self._peers.rate_bytes_per_s > 0.0 and self._arena.device.type == "cpu":
                for one in todo.values():  # a gear serves beside: there is time for it
                    populate(one.raw.data_ptr(), one.raw.numel())
            self._from_here(weights, todo, tally)
            began = time.monotonic() - self._staged_s
            self._staged_s = 0.0
            self._from_host(todo, tally)
            self._from_peers(todo, tally)
            self._from_files(todo, tally)
            move_s = time.monotonic() - began
        for need in needs:
            weights.filled(need.view)
        return Filled(self._copied, self._moved, self._read, move_s)

    # ----------------------------------------------------------------------- on this GPU

    def _from_here(
        self, weights: WeightStore, todo: dict[tuple[str, int], _OpenPiece], tally: _Tally
    ) -> None:
        for move in self._moves(frozenset()) if todo else ():
            one = todo.get((move.tensor, move.dim))
            if one is None or move.link not in _LOCAL:
                continue
            model = weights.model_of(one.need.view.owner)
            assert model is not None
            with weights.lending(model, move.tensor, move.dim, move.lo, move.hi) as found:
                if found is None:
                    continue  # the head's picture of us was not right
                segment, data = found
                if segment.dim == move.dim:
                    start, stop = segment.offsets(move.lo, move.hi)
                    one.place(move.lo, move.hi).copy_(data[start:stop])
                else:
                    whole = data.view(one.need.dtype).view(segment.hi - segment.lo, -1)
                    part = whole[:, move.lo : move.hi].t()
                    one.place(move.lo, move.hi).view(one.need.dtype).view(part.shape).copy_(part)
            one.left.remove(move.lo, move.hi)
            self._copied += move.nbytes
            tally.add(move.nbytes)
            tally.tell()

    def _from_host(self, todo: dict[tuple[str, int], _OpenPiece], tally: _Tally) -> None:
        """What peers have sent ahead."""
        for (tensor, dim), one in todo.items():
            unit = one.need.piece.unit_bytes
            for lo, hi, data in self._staged.of(tensor, dim):
                for start, stop in one.left.meet(lo, hi):
                    one.place(start, stop).copy_(data[(start - lo) * unit : (stop - lo) * unit])
                    one.left.remove(start, stop)
                    self._moved += (stop - start) * unit
                    tally.add((stop - start) * unit)
        tally.tell()

    # -------------------------------------------------------------------- from other workers

    def _from_peers(self, todo: dict[tuple[str, int], _OpenPiece], tally: _Tally) -> None:
        plan = self._asks(self._moves(frozenset(self._gone)), todo) if todo else {}
        while plan and not self._cancel.is_set:
            results = self._fetch_all(plan, todo, tally)
            tally.tell()
            failed: set[str] = set()
            for source, found in results:
                if found.left or found.missing:
                    failed.add(self._peers.holders[source].worker)
                    log.warning(
                        "weights from %s: %s", self._peers.holders[source].worker,
                        found.reason or "some are not there",
                    )  # fmt: skip
            if not failed:
                return
            self._gone |= {*failed, self._peers.worker}
            plan = self._asks(self._moves(frozenset(self._gone)), todo)

    def _moves(self, gone: frozenset[str]) -> tuple[WeightMove, ...]:
        if gone not in self._planned:
            self._planned[gone] = self._peers.moves(gone)
        return self._planned[gone]

    def _asks(
        self, moves: Sequence[WeightMove], todo: dict[tuple[str, int], _OpenPiece]
    ) -> dict[int, list[PieceRange]]:
        """What of the moves is still missing, by the holder that gives it."""
        found: dict[int, list[PieceRange]] = {}
        for move in moves:
            one = todo.get((move.tensor, move.dim))
            if one is None or move.link not in _PEERS or move.source == CHECKPOINT:
                continue
            unit = one.need.piece.unit_bytes
            found.setdefault(move.source, []).extend(
                PieceRange(move.tensor, move.dim, lo, hi, (hi - lo) * unit)
                for lo, hi in one.left.meet(move.lo, move.hi)
            )
        return {source: pieces for source, pieces in found.items() if pieces}

    def _fetch_all(
        self,
        plan: dict[int, list[PieceRange]],
        todo: dict[tuple[str, int], _OpenPiece],
        tally: _Tally,
    ) -> list[tuple[int, Fetched]]:
        """From all sources side by side; raises what `progress` does, when all have ended."""
        parts = [(source, part) for source, pieces in plan.items() for part in _halves(pieces)]
        results: dict[int, Fetched] = {}

        def fetch(number: int, source: int, pieces: list[PieceRange]) -> None:
            results[number] = self._fetch(source, pieces, todo, tally)

        threads = [
            threading.Thread(
                target=fetch, args=(number, *part), name="weights-receiver", daemon=True
            )
            for number, part in enumerate(parts)
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                while thread.is_alive():
                    thread.join(_LOOK_S)
                    tally.tell()
        except BaseException:
            self._cancel.cut()
            for thread in threads:
                thread.join()  # they write to memory that is about to be given back
            raise
        for number, (_, pieces) in enumerate(parts):
            self._account(pieces, results.get(number), todo)
        return [(parts[number][0], found) for number, found in results.items()]

    def _fetch(
        self, source: int, pieces: list[PieceRange], todo: dict[tuple[str, int], _OpenPiece],
        tally: _Tally,
    ) -> Fetched:  # fmt: skip
        opened = [todo[piece.tensor, piece.dim] for piece in pieces]
        first = self._arena.data.data_ptr()
        places = [
            one.place(piece.lo, piece.hi).data_ptr() - first
            for one, piece in zip(opened, pieces, strict=True)
        ]

        sink = WeightSink(self._arena, pieces, places)
        return self._fetched(source, pieces, sink, self._cancel, tally.add)

    def _fetched(
        self, source: int, pieces: Sequence[PieceRange], sink: Sink, cancel: Cancel,
        progress: Callable[[int], None] = lambda _: None,
    ) -> Fetched:  # fmt: skip
        """Fill a sink from one source, on a thread of its own."""
        peers, holder = self._peers, self._peers.holders[source]

        def ask(spans: Ranges) -> AskWeights:
            return AskWeights(
                epoch=holder.epoch,
                item_bytes=DTYPE_BYTES[peers.shards.dtype],
                pieces=tuple(pieces),
                spans=spans,
                rate_bytes_per_s=peers.rate_bytes_per_s,
            )

        address = holder.address, holder.data_port
        deadline = max(peers.deadline, time.monotonic())
        paced = peers.rate_bytes_per_s > 0.0
        return self._fetcher.fetch(Job(address, ask, sink, deadline, cancel, progress, paced))

    def _account(
        self,
        pieces: list[PieceRange],
        found: Fetched | None,
        todo: dict[tuple[str, int], _OpenPiece],
    ) -> None:
        """A range counts when all of it has come."""
        if found is None:
            return
        self._moved += found.moved_bytes
        at = 0
        for number, piece in enumerate(pieces):
            whole = not found.left.meet(at, at + piece.nbytes) and number not in found.missing
            if whole:
                todo[piece.tensor, piece.dim].left.remove(piece.lo, piece.hi)
            at += piece.nbytes

    # ------------------------------------------------------------------------- from files

    def _from_files(self, todo: dict[tuple[str, int], _OpenPiece], tally: _Tally) -> None:
        for one in todo.values():
            for lo, hi in one.left:
                out = one.need.shaped(one.raw, lo, hi)
                for nbytes in self._files.read(one.need.part, one.need.piece.dim, lo, hi, out):
                    self._read += nbytes
                    tally.add(nbytes)
                    tally.tell()


def _halves(pieces: list[PieceRange]) -> list[list[PieceRange]]:
    """Two parts of about as many bytes, or all of them where that is little."""
    total = sum(piece.nbytes for piece in pieces)
    if total < _HALVED_BYTES or len(pieces) < 2:
        return [pieces]
    at, middle = 0, 1
    for number, piece in enumerate(pieces[:-1], 1):
        at += piece.nbytes
        middle = number
        if 2 * at >= total:
            break
    return [pieces[:middle], pieces[middle:]]
