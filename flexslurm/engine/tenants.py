"""Which epochs have memory on this GPU, and what is under way in it; moves nothing.

An epoch is entered when its install begins, opened when others may take from it and fill it, cut
when it is to end, and closed before its memory goes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from flexslurm.engine.arena import Arena
from flexslurm.engine.crew import Crew
from flexslurm.engine.kv_store import KvStore
from flexslurm.engine.transfer_client import Cancel
from flexslurm.errors import ProtocolError, StaleEpoch

_MOST_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Tenant:
    """An epoch's memory on this GPU."""

    epoch: int
    arena: Arena
    store: KvStore
    layers: tuple[int, int]
    """The model's own numbers, as with `heads`."""
    heads: tuple[int, int]

    def part(self, layers: tuple[int, int], heads: tuple[int, int]) -> tuple[slice, slice]:
        """Where layers and heads of the model are in the table; raises ProtocolError."""
        for asked, there in ((layers, self.layers), (heads, self.heads)):
            if not there[0] <= asked[0] < asked[1] <= there[1]:
                raise ProtocolError(f"{asked} is not in {there}, which epoch {self.epoch} has here")
        lo, first = self.layers[0], self.heads[0]
        return slice(layers[0] - lo, layers[1] - lo), slice(heads[0] - first, heads[1] - first)

    def check_blocks(self, blocks: tuple[int, ...]) -> None:
        """Raises ProtocolError for a block that is none, or is named twice."""
        count = self.store.shape.blocks
        if not all(0 <= block < count for block in blocks) or len(set(blocks)) != len(blocks):
            raise ProtocolError(f"blocks of epoch {self.epoch} are in [0,{count}), each once")


class Tenants:
    """The epochs of one worker; every method from any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._tenants: dict[int, Tenant] = {}
        self._kept: dict[int, Arena] = {}
        """Epochs that are closed and whose weights stay for a while."""
        self._cancels: dict[int, Cancel] = {}
        self._busy: dict[int, int] = {}
        """Jobs that touch an epoch's memory."""
        self._crew = Crew("data-receiver", _MOST_AT_ONCE)
        self._paced = Crew("paced-receiver", _MOST_AT_ONCE)
        """Apart, as a thread that stands back once does so for good."""

    def enter(self, epoch: int) -> Cancel:
        """What calls back all that is fetched for the epoch."""
        with self._changed:
            return self._cancels.setdefault(epoch, Cancel())

    def open(self, tenant: Tenant) -> None:
        with self._changed:
            self._tenants[tenant.epoch] = tenant

    def find(self, epoch: int) -> Tenant:
        """Raises StaleEpoch where it is not here, or not any more."""
        with self._changed:
            found = self._tenants.get(epoch)
        if found is None:
            raise StaleEpoch(f"epoch {epoch} is not here")
        return found

    def keep(self, epoch: int, arena: Arena) -> None:
        """Its weights can be had though it is closed, until `let_go`."""
        with self._changed:
            self._kept[epoch] = arena

    def let_go(self, epoch: int) -> Arena | None:
        """Its weights cannot be had any more; where they are, if they were kept."""
        with self._changed:
            return self._kept.pop(epoch, None)

    @property
    def kept(self) -> tuple[int, ...]:
        """Epochs that are closed and whose weights can be had."""
        with self._changed:
            return tuple(self._kept)

    def weights_of(self, epoch: int) -> Arena:
        """Where an epoch's weights are; raises StaleEpoch."""
        with self._changed:
            kept = self._kept.get(epoch)
        return self.find(epoch).arena if kept is None else kept

    def cut(self, epoch: int) -> None:
        """Call back what is being fetched for an epoch; idempotent."""
        with self._changed:
            cancel = self._cancels.get(epoch)
        if cancel is not None:
            cancel.cut()

    def forget(self, epoch: int) -> None:
        """It is not found any more; what is under way goes on."""
        with self._changed:
            self._tenants.pop(epoch, None)

    def settle(self, epoch: int, timeout_s: float) -> bool:
        """Wait until nothing is under way in the epoch's memory; whether that came in time."""
        with self._changed:
            idle = self._changed.wait_for(lambda: not self._busy.get(epoch), timeout_s)
            self._cancels.pop(epoch, None)
        return idle

    def work(self, epoch: int, job: Callable[[Cancel], None], *, paced: bool = False) -> bool:
        """Have a job done that touches the epoch's memory; False where too many wait.

        `paced`: its thread is to stand back for whoever serves.
        """
        with self._changed:
            self._busy[epoch] = self._busy.get(epoch, 0) + 1
            cancel = self._cancels.setdefault(epoch, Cancel())

        def run() -> None:
            try:
                job(cancel)
            finally:
                self._done(epoch)

        if (self._paced if paced else self._crew).do(run):
            return True
        self._done(epoch)
        return False

    def _done(self, epoch: int) -> None:
        with self._changed:
            self._busy[epoch] -= 1
            if not self._busy[epoch]:
                del self._busy[epoch]
            self._changed.notify_all()
