"""Encrypted, authenticated links of members to the head; never interprets a message.

The head has one ROUTER; every agent, worker and command line one DEALER whose routing id is its
incarnation. CURVE proves both sides: a peer without the service's keys is refused before its first
byte reaches a decoder, and the decoder only builds the message types it was given.
"""

from __future__ import annotations

import asyncio
import collections
import hmac
import logging
import os
import queue
import select
import threading
import time
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

import msgspec
import zmq
import zmq.auth.asyncio

from flexslurm.errors import DeadlineExceeded, EnvironmentFault, ProtocolError
from flexslurm.messages import FromHead, Message, ToHead
from flexslurm.wire.keys import ServiceKeys

log = logging.getLogger(__name__)

_DRAIN_LIMIT = 256  # messages handled before other tasks of the loop get a turn
_HIGH_WATER = 100_000
_MOST_QUEUED = 10_000
"""Messages of a link, each way, that wait beside those that zmq holds."""
_MAX_MESSAGE_BYTES = 256 * 2**20
_encoder = msgspec.msgpack.Encoder()

M = TypeVar("M", bound=Message)


class _OneKey:
    """Accepts exactly the members' public key, which pyzmq hands over in Z85."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        return hmac.compare_digest(key, self._public)


class HeadSocket:
    """The head's end of all links, inside an asyncio loop; `receive` is called on that loop."""

    def __init__(
        self, keys: ServiceKeys, receive: Callable[[str, Message], None], *, host: str
    ) -> None:  # fmt: skip
        self._receive = receive
        self._decoder = msgspec.msgpack.Decoder(ToHead)
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        self._auth = zmq.auth.asyncio.AsyncioAuthenticator(self._context)
        self._auth.start()
        self._auth.configure_curve_callback("*", _OneKey(keys.member_public))
        self._socket = self._context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.ROUTER_HANDOVER, 1),
            (zmq.LINGER, 200),
            (zmq.SNDHWM, _HIGH_WATER),
            (zmq.RCVHWM, _HIGH_WATER),
            (zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES),
            (zmq.CURVE_SERVER, 1),
        ):
            self._socket.setsockopt(option, value)
        self._socket.curve_secretkey = keys.head_secret
        self._socket.curve_publickey = keys.head_public
        try:
            self.port = int(self._socket.bind_to_random_port(f"tcp://{host}"))
        except zmq.ZMQError as error:
            self._end()
            raise EnvironmentFault(
                f"cannot open a control port on {host}: {error}",
                hint="the head listens on an address of its own node: see the site file's network",
            ) from error
        self._closed = False
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._drain)
        self._loop.call_soon(self._drain)
        self.refused = 0

    def send(self, member: str, message: Message) -> bool:
        """Queue a message; False when the member is not connected."""
        return self._put(member, _encoder.encode(message))

    def send_many(self, members: Iterable[str], message: Message) -> list[str]:
        """Encode once, queue for all; returns the members that are not connected."""
        data = _encoder.encode(message)
        return [member for member in members if not self._put(member, data)]

    def _put(self, member: str, data: bytes) -> bool:
        if self._closed:
            return False
        try:
            self._socket.send_multipart((member.encode(), data), zmq.NOBLOCK)
        except (zmq.Again, zmq.ZMQError) as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            return False
        # the descriptor is edge-triggered: a send may have consumed the edge of a message
        if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._loop.call_soon(self._drain)
        return True

    def _drain(self) -> None:
        for _ in range(_DRAIN_LIMIT):
            if self._closed:
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(frames)
        self._loop.call_soon(self._drain)

    def _take(self, frames: list[bytes]) -> None:
        try:
            member, data = frames
            message = self._decoder.decode(data)
            sender = member.decode()
        except (ValueError, msgspec.MsgspecError) as error:
            self.refused += 1
            log.warning("refused a message that does not follow the protocol: %s", error)
            return
        self._receive(sender, message)

    def close(self) -> None:
        """Close the port; queued messages get a short time to leave."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._fd)
        self._end()

    def _end(self) -> None:
        self._socket.close()
        self._auth.stop()
        self._context.term()


class HeadLink(Generic[M]):
    """A member's link to the head, usable from any thread; messages queue up for `recv`.

    With `on_message`, messages go there instead, on the link's own thread. zmq reconnects by
    itself; `silent_s` tells how long the head has said nothing. Both queues have a bound: what is
    not received is left with the head, and a head that takes nothing for so long is given up.
    """

    def __init__(
        self,
        endpoint: str,
        keys: ServiceKeys,
        identity: str,
        kind: type[M] | object = FromHead,
        on_message: Callable[[M], None] | None = None,
    ) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._on_message = on_message
        self._inbox: queue.Queue[M] = queue.Queue(_MOST_QUEUED)
        self._outbox: collections.deque[bytes] = collections.deque()
        self._wake_r, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._closing = threading.Event()
        self._last_heard = time.monotonic()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        for option, value in (
            (zmq.ROUTING_ID, identity.encode()),
            (zmq.LINGER, 500),
            (zmq.SNDHWM, _HIGH_WATER),
            (zmq.RCVHWM, _HIGH_WATER),
            (zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES),
            (zmq.RECONNECT_IVL, 100),
            (zmq.RECONNECT_IVL_MAX, 2000),
        ):
            self._socket.setsockopt(option, value)
        self._socket.curve_serverkey = keys.head_public
        self._socket.curve_publickey = keys.member_public
        self._socket.curve_secretkey = keys.member_secret
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self._socket.close(0)
            self._context.term()
            os.close(self._wake_r)
            os.close(self._wake_w)
            raise EnvironmentFault(f"cannot connect to {endpoint}: {error}") from error
        self._thread = threading.Thread(target=self._run, name="head-link", daemon=True)
        self._thread.start()

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self._last_heard

    def send(self, message: Message) -> None:
        """Queue a message for the head; never blocks.

        Raises ProtocolError once closed, and where the head has taken nothing for too long.
        """
        if self._closing.is_set():
            raise ProtocolError("the link to the head is closed")
        if len(self._outbox) >= _MOST_QUEUED:
            raise ProtocolError("the head does not take our messages")
        self._outbox.append(_encoder.encode(message))
        self._wake()

    def recv(self, timeout_s: float) -> M | None:
        """The next message, or None after `timeout_s`."""
        try:
            message = self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            return None
        self._wake()  # it may wait for room
        return message

    def ask(self, message: Message, timeout_s: float) -> M:
        """Send, and wait for the next message; raises DeadlineExceeded."""
        self.send(message)
        answer = self.recv(timeout_s)
        if answer is None:
            raise DeadlineExceeded(f"the head gave no answer within {timeout_s:g} s")
        return answer

    def close(self) -> None:
        """Send what is queued, for at most half a second, and close."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._wake()
        self._thread.join(timeout=5)
        os.close(self._wake_r)
        os.close(self._wake_w)

    def _wake(self) -> None:
        try:
            os.write(self._wake_w, b"x")
        except BlockingIOError:
            pass  # it is awake already
        except OSError:
            if not self._closing.is_set():
                raise

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_r, select.POLLIN)
        try:
            while not self._closing.is_set():
                # without room, only `recv` wakes us: the rest stays with zmq, and then the head
                poller.modify(self._socket, 0 if self._inbox.full() else zmq.POLLIN)
                events = dict(poller.poll(1000))
                if self._wake_r in events:
                    os.read(self._wake_r, 4096)
                self._flush()
                while not self._inbox.full() and self._readable():
                    self._take(self._socket.recv())
                self._flush()
        finally:
            self._flush()
            self._socket.close()
            self._context.term()

    def _readable(self) -> bool:
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def _flush(self) -> None:
        while self._outbox:
            try:
                self._socket.send(self._outbox[0], zmq.NOBLOCK)
            except zmq.Again:
                return
            self._outbox.popleft()

    def _take(self, data: bytes) -> None:
        self._last_heard = time.monotonic()
        try:
            message = self._decoder.decode(data)
        except msgspec.MsgspecError as error:
            log.warning("dropped a message that does not follow the protocol: %s", error)
            return
        if self._on_message is not None:
            self._on_message(message)
        else:
            self._inbox.put_nowait(message)  # there is room: only this thread puts
