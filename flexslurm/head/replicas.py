"""The drivers that are open, by the replica they drive; opens and closes them, and decides nothing.

Each driver has a *seat*, a small number that tells it from all others that are open: it is what
the ledger and the router know a replica by. The number in its epoch, which is in its messages, may
be another driver's too.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

from flexslurm.control.installed import InstalledReplica, ReplicaKey
from flexslurm.engine.driver import Driver, Hooks
from flexslurm.gateway.port import StepTotals
from flexslurm.head.ledger import Adoption, Ledger
from flexslurm.head.ramp import Ramps
from flexslurm.messages import Message, StepDone, StepFailed

log = logging.getLogger(__name__)


class Replicas:
    """Invariant: the open drivers are those that are attached to the ledger."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        send: Callable[[tuple[str, ...], Message], object],
        broken: Callable[[ReplicaKey, str], None],
        now: Callable[[], float],
    ) -> None:
        self._ledger, self._send = ledger, send
        self._broken, self._now = broken, now
        self.open: dict[ReplicaKey, Driver] = {}
        self._arriving: dict[ReplicaKey, Driver] = {}
        """Made for a shift that is under way, and not attached."""
        self._ramps = Ramps()
        self._steps = StepTotals()

    def steps(self) -> StepTotals:
        """What was done so far, by drivers that are closed too."""
        return self._steps

    def driver(self, key: ReplicaKey) -> Driver | None:
        return self.open.get(key) or self._arriving.get(key)

    def arrive(self, one: InstalledReplica, block_tokens: int) -> Driver:
        """A driver for a new replica that does not serve yet; made once."""
        key = one.key
        found = self._arriving.get(key)
        if found is not None:
            return found
        taken = {driver.seat for driver in (*self.open.values(), *self._arriving.values())}
        self._arriving[key] = made = Driver(
            key.epoch,
            key.index,
            one.replica,
            block_tokens,
            one.workers,
            Hooks(
                send=self._send,
                emit=self._ledger.on_event,
                broken=lambda reason: self._broken(key, reason),
                now=self._now,
            ),
            seat=next(seat for seat in itertools.count() if seat not in taken),
            paused=True,
        )
        return made

    def forget_arriving(self) -> None:
        """The shift is given up: its drivers never served."""
        for driver in self._arriving.values():
            driver.close()
        self._arriving.clear()

    def switch(
        self,
        opened: Iterable[ReplicaKey],
        closed: Iterable[ReplicaKey],
        adoptions: Mapping[str, Adoption],
        speeds: Mapping[ReplicaKey, float],
    ) -> frozenset[str]:
        """Serve with the opened ones instead of the closed; returns what went on with its KV."""
        leaving = [self._take_out(key) for key in closed]
        coming = {key: self._arriving.pop(key) for key in opened}
        stays = bool(self.open)
        self.open |= coming
        drivers = list(coming.values())
        adopted = self._ledger.switch(
            drivers,
            [driver.seat for driver in leaving],
            adoptions,
            [speeds.get(key, 1.0) for key in coming],
            # A new replica begins with little where others serve; alone it must do everything.
            self._ramp(drivers) if stays else 1.0,
        )
        for key, driver in self.open.items():
            if key not in coming and key in speeds:
                self._ledger.weigh(driver.seat, speed=speeds[key])
        for driver in drivers:
            driver.resume()
        return adopted

    def _ramp(self, drivers: Sequence[Driver]) -> float:
        weights = [self._ramps.begin(driver.seat, driver.step_times.count) for driver in drivers]
        return min(weights, default=1.0)

    def detach(self, keys: Iterable[ReplicaKey], reason: str, *, failed: bool = False) -> None:
        """Close these replicas' drivers; their sequences wait, and go to others if they fit."""
        seats = [self._take_out(key).seat for key in keys if key in self.open]
        moved = self._ledger.detach(seats, failed=failed)
        log.info("paused %d of the replicas with %d sequences: %s", len(seats), len(moved), reason)
        climbing = set(self._ramps.seats)
        if self.open and all(driver.seat in climbing for driver in self.open.values()):
            for seat in self._ramps.alone():
                self._ledger.weigh(seat, ramp=1.0)

    def _take_out(self, key: ReplicaKey) -> Driver:
        driver = self.open.pop(key)
        self._ramps.drop(driver.seat)
        return driver

    def tick(self, now: float) -> None:
        """Look at drivers that do not serve yet; the ledger looks at the others."""
        for driver in list(self._arriving.values()):
            driver.tick(now)

    # ------------------------------------------------------------------ what workers say

    def on_step_done(self, done: StepDone) -> None:
        driver = self.driver(ReplicaKey(done.epoch, done.replica))
        if driver is None:
            return
        driver.on_step_done(done)
        so_far = self._steps
        self._steps = StepTotals(so_far.steps + 1, so_far.computed_s + done.compute_s, self._now())
        weight = self._ramps.look(driver.seat, driver.step_times.count)
        if weight is not None:
            log.info("replica %d of epoch %d: %.0f %% of its traffic", done.replica, done.epoch,
                     100 * weight)  # fmt: skip
            self._ledger.weigh(driver.seat, ramp=weight)

    def on_step_failed(self, failed: StepFailed) -> None:
        for driver in (*self.open.values(), *self._arriving.values()):
            if failed.worker in driver.workers and driver.epoch == failed.epoch:
                driver.on_step_failed(failed)
