"""Copies pages out of the GPU, to host memory or to files, where they outlive their epoch."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from flexslurm.engine import faults
from flexslurm.engine.byte_runs import pour
from flexslurm.engine.faults import InjectedFault, Point
from flexslurm.engine.niceness import be_nice
from flexslurm.engine.page_runs import PageSource
from flexslurm.engine.parking import FileWriter, ParkedBox, ParkingLot
from flexslurm.engine.rate import Bucket
from flexslurm.engine.tenants import Tenant, Tenants
from flexslurm.engine.transfer_client import Cancel
from flexslurm.engine.transfer_wire import CHUNK_BYTES
from flexslurm.errors import FlexslurmError
from flexslurm.messages import KvParked, Message, ParkKv, UnparkKv

log = logging.getLogger(__name__)


class KvParker:
    """Parks for one worker; `park` is called on the link's thread and does not hold it up."""

    def __init__(
        self, worker: str, tenants: Tenants, lot: ParkingLot, send: Callable[[Message], None]
    ) -> None:
        self._worker, self._tenants, self._lot, self._send = worker, tenants, lot, send
        self._files: dict[int, list[Path]] = {}
        self._lock = threading.Lock()
        self._wanted: dict[int, set[int]] = {}
        """Tickets under way by epoch; one that was called off keeps nothing when it is done."""

    def park(self, order: ParkKv) -> None:
        """Copy blocks out of the GPU, and answer."""
        began = time.monotonic()
        try:
            tenant = self._tenants.find(order.epoch)
            tenant.check_blocks(order.blocks)
        except FlexslurmError as error:
            self._parked(order, began, 0, order.blocks, error.message)
            return
        with self._lock:
            self._wanted.setdefault(order.epoch, set()).add(order.ticket)
        job = partial(self._park, tenant, order, began)
        if not self._tenants.work(order.epoch, job, paced=_stands_back(order)):
            with self._lock:
                self._is_wanted(order)
            self._parked(order, began, 0, order.blocks, "too many transfers wait")

    def _park(self, tenant: Tenant, order: ParkKv, began: float, cancel: Cancel) -> None:
        shape = tenant.store.shape
        if _stands_back(order):
            be_nice()
        box = ParkedBox(order.epoch, tenant.layers, tenant.heads, tenant.store.page_bytes)
        part = slice(0, shape.layers), slice(0, shape.heads)
        source = PageSource(tenant.arena, tenant.store, order.blocks, *part)
        try:
            if order.directory is None:
                done, why = self._on_host(source, box, order, cancel)
            else:
                done, why = self._in_files(source, box, order, cancel)
        except (FlexslurmError, OSError, InjectedFault) as error:
            done, why = set(), str(error)
            with self._lock:
                self._is_wanted(order)
        failed = tuple(block for block in order.blocks if block not in done)
        self._parked(order, began, len(done) * box.block_bytes, failed, why if failed else "")

    def _on_host(
        self, source: PageSource, box: ParkedBox, order: ParkKv, cancel: Cancel
    ) -> tuple[set[int], str]:
        parked = self._lot.open(box, len(order.blocks))

        def keep(block: int, place: int) -> None:
            parked.places[block] = place

        try:
            why = self._copy_out(source, order, cancel, parked.buffer, keep)
        except BaseException:
            self._lot.discard(parked)
            raise
        with self._lock:
            if not self._is_wanted(order) or cancel.is_set:
                self._lot.discard(parked)
                return set(), "it was called off"
            self._lot.keep(parked)
        return set(parked.places), why

    def _in_files(
        self, source: PageSource, box: ParkedBox, order: ParkKv, cancel: Cancel
    ) -> tuple[set[int], str]:
        assert order.directory is not None
        writer = FileWriter(Path(order.directory), self._worker, box, order.ticket)
        buffer = memoryview(bytearray(box.block_bytes))
        done: set[int] = set()

        def keep(block: int, _: int) -> None:
            writer.add(block, buffer)
            done.add(block)

        try:
            why = self._copy_out(source, order, cancel, lambda _: buffer, keep)
            writer.finish()
        finally:
            writer.abandon()
        with self._lock:
            if not self._is_wanted(order) or cancel.is_set:
                writer.path.unlink(missing_ok=True)
                return set(), "it was called off"
            self._files.setdefault(order.epoch, []).append(writer.path)
        return done, why

    def _is_wanted(self, order: ParkKv) -> bool:
        """Whether nobody has called it off; it is no longer under way. Under the lock."""
        tickets = self._wanted.get(order.epoch, set())
        if order.ticket not in tickets:
            return False
        tickets.discard(order.ticket)
        if not tickets:
            del self._wanted[order.epoch]
        return True

    def _copy_out(
        self, source: PageSource, order: ParkKv, cancel: Cancel,
        buffer: Callable[[int], memoryview], keep: Callable[[int, int], None],
    ) -> str:  # fmt: skip
        """Copy block after block, as far as the time allows; why not all of them.

        `buffer(place)`: where the block goes that is number `place` of those that are copied;
        `keep`: it is there.
        """
        deadline = time.monotonic() + order.deadline_s
        missing = set(source.missing())
        bucket = Bucket(order.rate_bytes_per_s) if order.rate_bytes_per_s > 0.0 else None
        place = 0
        for number, block in enumerate(order.blocks):
            if number in missing:
                continue
            faults.reach(Point.PARK)
            lo, hi = source.item(number)
            wait_s = bucket.wait_s(hi - lo, time.monotonic()) if bucket is not None else 0.0
            off = cancel.wait(max(min(wait_s, deadline - time.monotonic()), 0.0))
            if off or order.ticket not in self._wanted.get(order.epoch, ()):
                return "it was called off"
            if time.monotonic() >= deadline:
                return "the time was up"
            if _copied(source, lo, hi, buffer(place)):
                keep(block, place)
                place += 1
        return "they hold nothing"

    def _parked(
        self, order: ParkKv, began: float, nbytes: int, failed: tuple[int, ...], reason: str
    ) -> None:
        if failed:
            log.info("epoch %d: %d blocks were not parked: %s", order.epoch, len(failed), reason)
        self._send(
            KvParked(
                worker=self._worker, epoch=order.epoch, ticket=order.ticket, parked_bytes=nbytes,
                seconds=time.monotonic() - began, failed=failed, reason=reason,
            )
        )  # fmt: skip

    def unpark(self, order: UnparkKv) -> None:
        """Drop what this worker has parked of an epoch, its files too, and what is under way."""
        with self._lock:
            self._wanted.pop(order.epoch, None)
            self._lot.forget(order.epoch)
            files = self._files.pop(order.epoch, [])
        for path in files:
            path.unlink(missing_ok=True)


def _stands_back(order: ParkKv) -> bool:
    """To host memory at a rate: ahead of a pause, beside what serves. To files: there is haste."""
    return order.directory is None and order.rate_bytes_per_s > 0.0


def _copied(source: PageSource, lo: int, hi: int, target: memoryview) -> bool:
    for start in range(lo, hi, CHUNK_BYTES):
        stop = min(start + CHUNK_BYTES, hi)
        with source.lend(start, stop) as views:
            if views is None:
                return False
            pour(views, [target[start - lo : stop - lo]])
    return True
