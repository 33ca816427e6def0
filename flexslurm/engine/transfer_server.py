"""The data server of a worker: gives pages and weights to whoever has the service's key.

A thread accepts, and each connection has one of its own: at low priority once it was asked for
something at a limited rate, since then a gear serves beside it. What there is to give is
behind `Catalogue`; how fast, is in what is asked: those who ask for the same rate share one link.
Never takes anything: who needs something comes for it.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from flexslurm.engine import faults
from flexslurm.engine.byte_runs import Source
from flexslurm.engine.faults import InjectedFault, Point
from flexslurm.engine.niceness import be_nice
from flexslurm.engine.rate import Bucket, piece_bytes
from flexslurm.engine.spans import Spans
from flexslurm.engine.transfer_wire import (
    CHUNK_BYTES,
    HURRIED_BYTES,
    AskPages,
    AskWeights,
    Channel,
    Offer,
    Refusal,
)
from flexslurm.errors import FlexslurmError, ProtocolError

log = logging.getLogger(__name__)

_MAX_CONNECTIONS = 96
_MAX_STRANGERS = 32
"""Connections that have not shown the key yet; they have HANDSHAKE_S for it."""
_IDLE_S = 30.0
REST = 3.0
"""Where steps are computed on the processors that send: so long is rested for each second of work.

All connections together then take a quarter of one processor from whoever serves.
"""


class Catalogue(Protocol):
    """What a worker has to give."""

    def pages(self, ask: AskPages) -> Source:
        """Raises StaleEpoch or ProtocolError where that is not here."""
        ...

    def weights(self, ask: AskWeights) -> Source: ...


class Links:
    """Rates that several connections keep together; `rest`: see REST."""

    def __init__(self, rest: float) -> None:
        self._rest = rest
        self._lock = threading.Lock()
        self._buckets: dict[float, Bucket] = {}

    def wait_s(self, rate_bytes_per_s: float, nbytes: int) -> float:
        """Take so many bytes of a link of this rate; how long they take from now."""
        if rate_bytes_per_s <= 0.0:
            return 0.0
        with self._lock:
            return self._bucket(rate_bytes_per_s).wait_s(nbytes, time.monotonic())

    def worked(self, rate_bytes_per_s: float, seconds: float) -> None:
        """So much of a processor went into what was sent just now."""
        if rate_bytes_per_s > 0.0 and self._rest:
            with self._lock:
                self._bucket(rate_bytes_per_s).rest(self._rest * seconds, time.monotonic())

    def _bucket(self, rate_bytes_per_s: float) -> Bucket:
        if rate_bytes_per_s not in self._buckets and len(self._buckets) >= _MAX_CONNECTIONS:
            self._buckets.clear()
        return self._buckets.setdefault(rate_bytes_per_s, Bucket(rate_bytes_per_s))


class TransferServer:
    """Listens from its making until `close`."""

    def __init__(
        self, address: str, key: bytes, catalogue: Catalogue, *, rest: float = REST
    ) -> None:
        """Raises OSError where the address cannot be listened at."""
        self._key, self._catalogue = key, catalogue
        self._lock = threading.Condition()
        self._channels: set[Channel] = set()
        """Those that have shown the key."""
        self._open = 0
        self._sending: dict[Channel, int] = {}
        """The epoch that a channel is sending of, if it holds its memory."""
        self._links = Links(rest)
        self._closed = False
        self._listener = _listen(address)
        self.port = int(self._listener.getsockname()[1])
        self.sent_bytes = 0
        self.refused = 0
        """Connections of strangers, and those that broke the protocol."""
        self._thread = threading.Thread(target=self._accept, name="data-server", daemon=True)
        self._thread.start()

    def forget(self, epoch: int, timeout_s: float) -> bool:
        """Break off what is being sent of an epoch's memory; whether all of it ended in time.

        The catalogue must not have it any more.
        """
        end = time.monotonic() + timeout_s
        with self._lock:
            while True:
                concerned = [c for c, sent in self._sending.items() if sent == epoch]
                for channel in concerned:
                    channel.cut()
                self._lock.notify_all()
                left = end - time.monotonic()
                if not concerned or left <= 0.0:
                    return not concerned
                self._lock.wait(left)

    def close(self) -> None:
        """Stop listening and cut all connections; idempotent."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for channel in self._channels:
                channel.cut()
            self._lock.notify_all()
        self._thread.join(5.0)
        with self._lock:
            self._lock.wait_for(lambda: not self._open, 5.0)

    # ---------------------------------------------------------------------------- threads

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, peer = self._listener.accept()
            except OSError as error:
                if not self._closed:  # out of descriptors, for one
                    log.warning("the data server cannot accept: %s", error)
                    time.sleep(0.1)
                continue
            with self._lock:
                strangers = self._open - len(self._channels)
                full = self._open >= _MAX_CONNECTIONS or strangers >= _MAX_STRANGERS
                self._open += not full
            if full:
                sock.close()
                continue
            threading.Thread(
                target=self._attend, args=(sock, peer[0]), name="data-sender", daemon=True
            ).start()

    def _attend(self, sock: socket.socket, peer: str) -> None:
        try:
            self._converse(sock)
        except ProtocolError as error:
            self.refused += 1
            log.info("data connection of %s: %s", peer, error.message)
        except (OSError, InjectedFault) as error:
            log.debug("data connection of %s ended: %s", peer, error)
        finally:
            sock.close()
            with self._lock:
                self._open -= 1
                self._lock.notify_all()

    def _converse(self, sock: socket.socket) -> None:
        channel = Channel.accept(sock, self._key)
        with self._lock:
            if self._closed:
                return
            self._channels.add(channel)
        try:
            while True:
                ask = channel.ask(_IDLE_S)
                self._answer(channel, ask)
        finally:
            with self._lock:
                self._channels.discard(channel)

    def _answer(self, channel: Channel, ask: AskPages | AskWeights) -> None:
        with self._registered(channel, ask.epoch):
            try:
                if isinstance(ask, AskPages):
                    source = self._catalogue.pages(ask)
                else:
                    source = self._catalogue.weights(ask)
            except FlexslurmError as error:
                channel.send(Refusal(error.message))
                return
            self._send(channel, ask, source)

    @contextmanager
    def _registered(self, channel: Channel, epoch: int) -> Iterator[None]:
        """Be seen by `forget`; before the catalogue is asked, so that none is missed."""
        with self._lock:
            self._sending[channel] = epoch
        try:
            yield
        finally:
            with self._lock:
                del self._sending[channel]
                self._lock.notify_all()

    def _send(self, channel: Channel, ask: AskPages | AskWeights, source: Source) -> None:
        left = Spans(ask.spans)
        if not Spans.are_proper(ask.spans, source.total):
            raise ProtocolError("spans that are not a rising part of what was asked for")
        missing = source.missing()
        for number in missing:
            left.remove(*source.item(number))
        channel.send(Offer(source.total, missing))
        if ask.rate_bytes_per_s > 0.0:
            be_nice()  # for good: a client that is in a hurry has other connections
        size = piece_bytes(ask.rate_bytes_per_s, CHUNK_BYTES, HURRIED_BYTES)
        for start, stop in left:
            lo = start
            while lo < stop:
                hi = source.upto(lo, min(lo + size, stop))
                if not self._send_piece(channel, ask.rate_bytes_per_s, source, lo, hi):
                    channel.send_refusal("it is not here any more")
                    return
                lo = hi
        channel.send_end()

    def _send_piece(
        self, channel: Channel, rate_bytes_per_s: float, source: Source, lo: int, hi: int
    ) -> bool:
        wait_s = self._links.wait_s(rate_bytes_per_s, hi - lo)
        if wait_s > 0.0:
            with self._lock:
                self._lock.wait_for(lambda: channel.is_cut, wait_s)
        faults.reach(Point.CHUNK)
        began_s = time.thread_time()
        with source.lend(lo, hi) as views:
            if views is None:
                return False
            channel.send_chunk(lo, views, spoil=faults.reach(Point.CORRUPT))
        self._links.worked(rate_bytes_per_s, time.thread_time() - began_s)
        with self._lock:
            self.sent_bytes += hi - lo
        return True


def _listen(address: str) -> socket.socket:
    found = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, proto, _, where = found[0]
    listener = socket.socket(family, kind, proto)
    try:
        listener.bind(where)
        listener.listen(_MAX_CONNECTIONS)
    except OSError:
        listener.close()
        raise
    return listener
