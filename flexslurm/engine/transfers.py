"""The data plane of a worker: what the head asks of its memory, what other workers come for.

Puts together the data server, the fetcher, pulls and parking; never decides what moves.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from flexslurm.engine import faults
from flexslurm.engine.arena import Arena
from flexslurm.engine.byte_runs import Source
from flexslurm.engine.faults import Point
from flexslurm.engine.kv_park import KvParker
from flexslurm.engine.kv_pull import KvPuller, check_page
from flexslurm.engine.page_runs import PageSource
from flexslurm.engine.parking import ParkedRun, ParkingLot
from flexslurm.engine.tenants import Tenant, Tenants
from flexslurm.engine.transfer_client import Cancel, Fetcher
from flexslurm.engine.transfer_server import REST, TransferServer
from flexslurm.engine.transfer_wire import AskPages, AskWeights
from flexslurm.engine.weight_runs import WeightSource
from flexslurm.errors import ProtocolError, StaleEpoch
from flexslurm.messages import Message, ParkKv, PullKv, UnparkKv

log = logging.getLogger(__name__)

_ITEM_BYTES = (1, 2, 4, 8)


class Transfers:
    """Those of one worker; every method from any thread, messages from the link's."""

    def __init__(
        self, worker: str, address: str, key: bytes, send: Callable[[Message], None],
        *, parked_bytes: int | None = None, rest: float = REST,
    ) -> None:  # fmt: skip
        """`parked_bytes`: bound on host memory, see ParkingLot; `rest`: of the data server."""
        self.fetcher = Fetcher(key)
        self.lot = ParkingLot(parked_bytes)
        self._tenants = Tenants()
        self._puller = KvPuller(worker, self._tenants, self.fetcher, self.lot, send)
        self._parker = KvParker(worker, self._tenants, self.lot, send)
        self._server: TransferServer | None = None
        try:
            faults.reach(Point.LISTEN)
            self._server = TransferServer(address, key, self, rest=rest)
        except OSError as error:
            log.warning("no data server at %s: %s; nobody can take from here", address, error)

    @property
    def port(self) -> int:
        """Where the data server listens; 0 where it does not."""
        return 0 if self._server is None else self._server.port

    @property
    def sent_bytes(self) -> int:
        return 0 if self._server is None else self._server.sent_bytes

    # ----------------------------------------------------------------- the life of an epoch

    def enter(self, epoch: int) -> Cancel:
        """An install begins; what it fetches is called back by `cut`."""
        return self._tenants.enter(epoch)

    def open(self, tenant: Tenant) -> None:
        """Pulls into it may come, and others may take from it."""
        self._tenants.open(tenant)

    def cut(self, epoch: int) -> None:
        """The epoch is to end: call back what is being fetched for it."""
        self._tenants.cut(epoch)

    def close(self, epoch: int, timeout_s: float) -> bool:
        """See that nothing touches the epoch's memory any more; whether that came in time."""
        end = time.monotonic() + timeout_s
        self._tenants.cut(epoch)
        self._tenants.forget(epoch)
        sent = self._server is None or self._server.forget(epoch, timeout_s)
        return self._tenants.settle(epoch, max(end - time.monotonic(), 0.0)) and sent

    def keep_weights(self, epoch: int, arena: Arena) -> None:
        """After `close`: its weights may be taken until `let_go`."""
        self._tenants.keep(epoch, arena)

    @property
    def kept(self) -> tuple[int, ...]:
        """Epochs of which weights are kept."""
        return self._tenants.kept

    def let_go(self, epoch: int, timeout_s: float) -> bool:
        """Free weights that were kept of an epoch that is closed; whether there were any."""
        arena = self._tenants.let_go(epoch)
        if arena is None:
            return False
        if self._server is not None:
            self._server.forget(epoch, timeout_s)
        arena.weights.release(epoch)
        arena.settle()
        return True

    def shutdown(self) -> None:
        """End the server and close what connections are kept; idempotent."""
        if self._server is not None:
            self._server.close()
        self.fetcher.close()

    # --------------------------------------------------------------------------- messages

    def pull(self, order: PullKv) -> None:
        self._puller.pull(order)

    def park(self, order: ParkKv) -> None:
        self._parker.park(order)

    def unpark(self, order: UnparkKv) -> None:
        self._parker.unpark(order)

    # ---------------------------------------------------- what there is to give (`Catalogue`)

    def pages(self, ask: AskPages) -> Source:
        """Raises StaleEpoch and ProtocolError."""
        try:
            tenant = self._tenants.find(ask.epoch)
        except StaleEpoch:
            sets = self.lot.find(ask.epoch)
            check_page(ask.page_bytes, sets[0].box.page_bytes)
            return ParkedRun(sets, ask.blocks, ask.layers, ask.heads)
        tenant.check_blocks(ask.blocks)
        check_page(ask.page_bytes, tenant.store.page_bytes)
        part = tenant.part(ask.layers, ask.heads)
        return PageSource(tenant.arena, tenant.store, ask.blocks, *part)

    def weights(self, ask: AskWeights) -> Source:
        """Raises StaleEpoch and ProtocolError."""
        arena = self._tenants.weights_of(ask.epoch)
        model = arena.weights.model_of(ask.epoch)
        if model is None:
            raise StaleEpoch(f"epoch {ask.epoch} is not here")
        proper = all(0 <= p.lo < p.hi and p.dim in (0, 1) and p.nbytes > 0 for p in ask.pieces)
        if not proper or ask.item_bytes not in _ITEM_BYTES:
            raise ProtocolError("ranges of tensors that cannot be")
        return WeightSource(arena, model, ask.pieces, ask.item_bytes)
