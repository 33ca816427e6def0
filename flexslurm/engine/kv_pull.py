"""Fills blocks of an epoch with pages that are elsewhere; never decides which, or from whom.

From another epoch on the same GPU pages are shared at once. From another worker, from this one's
host memory and from files they are copied, by a crew, and the head is told what has come.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from flexslurm.engine import faults
from flexslurm.engine.byte_runs import Sink, Source, pour
from flexslurm.engine.faults import InjectedFault, Point
from flexslurm.engine.niceness import be_nice
from flexslurm.engine.page_runs import PageSink
from flexslurm.engine.parking import FileSet, ParkedRun, ParkedSet, ParkingLot, files_of
from flexslurm.engine.rate import Bucket, piece_bytes
from flexslurm.engine.spans import Spans
from flexslurm.engine.tenants import Tenant, Tenants
from flexslurm.engine.transfer_client import Cancel, Fetched, Fetcher, Job
from flexslurm.engine.transfer_wire import CHUNK_BYTES, HURRIED_BYTES, AskPages, Ranges
from flexslurm.errors import FlexslurmError, ProtocolError, StaleEpoch
from flexslurm.messages import KvPulled, Message, PullKv

log = logging.getLogger(__name__)


class KvPuller:
    """Pulls of one worker; `pull` is called on the link's thread and does not hold it up."""

    def __init__(
        self, worker: str, tenants: Tenants, fetcher: Fetcher, lot: ParkingLot,
        send: Callable[[Message], None],
    ) -> None:  # fmt: skip
        self._worker, self._tenants, self._fetcher = worker, tenants, fetcher
        self._lot, self._send = lot, send

    def pull(self, order: PullKv) -> None:
        """Fill blocks, and answer; what takes time is done by the crew."""
        began = time.monotonic()
        try:
            tenant = self._tenants.find(order.epoch)
            self._check_pull(tenant, order)
            if order.source.worker == self._worker and order.directory is None:
                source = self._living(order.source.epoch)
                if source is not None:
                    failed = self._share(tenant, source, order)
                    why = "the source does not have them" if failed else ""
                    self._pulled(order, began, 0, failed, why)
                    return
        except FlexslurmError as error:
            self._pulled(order, began, 0, _own(order), error.message)
            return
        job, paced = partial(self._pull, tenant, order, began), order.rate_bytes_per_s > 0.0
        if not self._tenants.work(order.epoch, job, paced=paced):
            self._pulled(order, began, 0, _own(order), "too many pulls wait")

    def _check_pull(self, tenant: Tenant, order: PullKv) -> None:
        tenant.check_blocks(_own(order))
        tenant.part(order.layers, order.heads)
        theirs = {block for block, _ in order.pairs}
        if len(theirs) != len(order.pairs):
            raise ProtocolError("a source's block is pulled twice")

    def _share(self, tenant: Tenant, source: Tenant, order: PullKv) -> tuple[int, ...]:
        source.check_blocks(tuple(block for block, _ in order.pairs))
        theirs = source.part(order.layers, order.heads)
        ours = tenant.part(order.layers, order.heads)
        if source.arena is not tenant.arena:
            raise ProtocolError("the source is in another arena")
        return tuple(tenant.store.share(source.store, order.pairs, theirs, ours))

    def _living(self, epoch: int) -> Tenant | None:
        with contextlib.suppress(StaleEpoch):
            return self._tenants.find(epoch)
        return None

    def _pull(self, tenant: Tenant, order: PullKv, began: float, cancel: Cancel) -> None:
        own = _own(order)
        try:
            faults.reach(Point.PULL)
            part = tenant.part(order.layers, order.heads)
            tenant.store.claim(own, *part)
            sink = PageSink(tenant.arena, tenant.store, own, *part)
            found = self._filled(tenant, order, sink, cancel)
        except (FlexslurmError, OSError, InjectedFault) as error:
            self._pulled(order, began, 0, own, str(error), cancel)
            return
        current = set(sink.current())
        left = [n for n in range(sink.items) if found.left.meet(*sink.item(n))]
        failed = {*found.missing, *left}
        lost = tuple(b for n, b in enumerate(own) if n in failed or b not in current)
        why = found.reason or (
            "the source does not have them" if failed else "they were freed meanwhile"
        )
        here = order.directory is None and order.source.worker == self._worker
        moved = 0 if here else found.moved_bytes
        self._pulled(order, began, moved, lost, why if lost else "", cancel)

    def _filled(self, tenant: Tenant, order: PullKv, sink: PageSink, cancel: Cancel) -> Fetched:
        source, blocks = order.source, tuple(block for block, _ in order.pairs)
        deadline = time.monotonic() + order.timeout_s
        sets: list[ParkedSet] = []
        if order.directory is not None:
            sets += _open_files(Path(order.directory), source.worker, source.epoch)
        elif source.worker == self._worker:
            sets += self._lot.find(source.epoch)
        if sets:
            try:
                check_page(tenant.store.page_bytes, sets[0].box.page_bytes)
                parked = ParkedRun(sets, blocks, order.layers, order.heads)
                return _drain(parked, sink, order.rate_bytes_per_s, deadline, cancel)
            finally:
                for one in sets:
                    if isinstance(one, FileSet):
                        one.close()

        def ask(spans: Ranges) -> AskPages:
            return AskPages(
                epoch=source.epoch, layers=order.layers, heads=order.heads, blocks=blocks,
                page_bytes=tenant.store.page_bytes, spans=spans,
                rate_bytes_per_s=order.rate_bytes_per_s,
            )  # fmt: skip

        address = source.address, source.data_port
        paced = order.rate_bytes_per_s > 0.0
        return self._fetcher.fetch(Job(address, ask, sink, deadline, cancel, paced=paced))

    def _pulled(
        self, order: PullKv, began: float, moved: int, failed: tuple[int, ...], reason: str,
        cancel: Cancel | None = None,
    ) -> None:  # fmt: skip
        if cancel is not None and cancel.is_set:
            return  # the epoch is being retired: nobody waits for it
        if failed:
            log.info("epoch %d: %d blocks were not pulled: %s", order.epoch, len(failed), reason)
        self._send(
            KvPulled(
                worker=self._worker, epoch=order.epoch, ticket=order.ticket, moved_bytes=moved,
                seconds=time.monotonic() - began, failed=failed, reason=reason,
            )
        )  # fmt: skip


def check_page(asked_bytes: int, here_bytes: int) -> None:
    """Raises ProtocolError where pages differ in size."""
    if asked_bytes != here_bytes:
        raise ProtocolError(
            f"pages of {asked_bytes} bytes are asked for; here they have {here_bytes}"
        )


def _own(order: PullKv) -> tuple[int, ...]:
    return tuple(block for _, block in order.pairs)


def _open_files(directory: Path, worker: str, epoch: int) -> list[FileSet]:
    """What a worker parked there and is whole; raises StaleEpoch where that is nothing."""
    found = []
    for path in files_of(directory, worker, epoch):
        try:
            found.append(FileSet(path))
        except (OSError, ProtocolError) as error:
            log.warning("parked pages are lost: %s", error)
    if not found:
        raise StaleEpoch(f"nothing of epoch {epoch} that {worker} parked is in {directory}")
    return found


def _drain(
    source: Source, sink: Sink, rate_bytes_per_s: float, deadline: float, cancel: Cancel
) -> Fetched:
    """Copy what this process has, or can read; what is damaged is left."""
    found = Fetched(Spans([(0, sink.total)]), set(source.missing()))
    for number in found.missing:
        found.left.remove(*sink.item(number))
    bucket = None
    if rate_bytes_per_s > 0.0:
        be_nice()
        bucket = Bucket(rate_bytes_per_s)
    size = piece_bytes(rate_bytes_per_s, CHUNK_BYTES, HURRIED_BYTES)
    for start, stop in list(found.left):
        lo = start
        while lo < stop:
            hi = source.upto(lo, min(lo + size, stop))
            wait_s = bucket.wait_s(hi - lo, time.monotonic()) if bucket is not None else 0.0
            if cancel.wait(wait_s) or time.monotonic() >= deadline:
                found.reason = "it was called off" if cancel.is_set else "the time was up"
                return found
            try:
                with source.lend(lo, hi) as views, sink.into(lo, hi) as landing:
                    assert views is not None
                    pour(views, landing.views)
                    landing.keep()
            except (OSError, ProtocolError) as error:
                found.reason = str(error)
                log.warning("parked pages are lost: %s", error)
            else:
                found.left.remove(lo, hi)
                found.moved_bytes += hi - lo
            lo = hi
    return found
