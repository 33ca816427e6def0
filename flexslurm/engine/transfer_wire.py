"""How two workers speak over a data connection: proof of the key, frames, chunks; decides nothing.

The server speaks first: magic and a nonce. The client answers with a nonce of its own and the proof
that it has the service's key, and gets the server's proof. Nothing else is read from a stranger,
and nothing is sent to one. After that: frames (a message in msgpack, with a code that only holders
of the key can make for this connection and this place in it) and chunks of bytes with a CRC-32.

    client: ask                  server: offer, then chunks in any order, then the end
                                         or a refusal, also in place of a chunk
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import struct
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import TypeVar

import msgspec

from flexslurm.errors import ProtocolError
from flexslurm.wire.keys import ServiceKeys

MAGIC = b"flexslurm-data-1"
CHUNK_BYTES = 4 << 20
"""At most: beside a gear that serves, each chunk takes the interpreter from it a few times."""
HURRIED_BYTES = 1 << 20
"""Where no rate bounds it: a link that turns out slow is told from one that is dead."""
MAX_FRAME_BYTES = 16 << 20
IO_TIMEOUT_S = 10.0
"""A peer that neither takes nor gives anything for so long is gone."""
HANDSHAKE_S = 5.0
MAX_VIEWS = 512
"""Buffers of one call to the system."""
_NONCE_BYTES = 32
_CODE_BYTES = 16
_FRAME = struct.Struct("!I")
_CHUNK = struct.Struct("!BQII")
_TIMEVAL = struct.Struct("@ll")
"""The system's `struct timeval`."""

Views = list[memoryview]
Ranges = tuple[tuple[int, int], ...]


class PieceRange(msgspec.Struct, frozen=True, array_like=True):
    """A range of a tensor, as `reshard.WeightMove` has it."""

    tensor: str
    dim: int
    lo: int
    hi: int
    nbytes: int


class AskPages(msgspec.Struct, frozen=True, tag="pages", forbid_unknown_fields=True):
    """Pages of an epoch: for each block, each layer, each head; the model's own numbers.

    They make one run of bytes, of which `spans` are asked for.
    """

    epoch: int
    layers: tuple[int, int]
    heads: tuple[int, int]
    blocks: tuple[int, ...]
    page_bytes: int
    spans: Ranges
    rate_bytes_per_s: float = 0.0


class AskWeights(msgspec.Struct, frozen=True, tag="weights", forbid_unknown_fields=True):
    """Ranges of the tensors of an epoch's model, one after another."""

    epoch: int
    item_bytes: int
    pieces: tuple[PieceRange, ...]
    spans: Ranges
    rate_bytes_per_s: float = 0.0


class Offer(msgspec.Struct, frozen=True, tag="offer", forbid_unknown_fields=True):
    """What will come: of `total` bytes the spans asked for, less the items that are not here."""

    total: int
    missing: tuple[int, ...] = ()
    """Places among the blocks, or the pieces, of the ask."""


class Refusal(msgspec.Struct, frozen=True, tag="refusal", forbid_unknown_fields=True):
    """The source does not give what was asked for; asking again would not help."""

    reason: str


class _Kind(IntEnum):
    DATA = 1
    END = 2
    REFUSAL = 3


class ChunkHead(msgspec.Struct, frozen=True):
    """`nbytes` bytes of the run, from `offset` on, follow on the connection."""

    offset: int
    nbytes: int
    crc: int


_ask = msgspec.msgpack.Decoder(AskPages | AskWeights)
_answer = msgspec.msgpack.Decoder(Offer | Refusal)
_encode = msgspec.msgpack.encode
T = TypeVar("T")


def data_key(keys: ServiceKeys) -> bytes:
    """What members of a service prove to each other that they have."""
    return hmac.digest(keys.member_secret, MAGIC, "sha256")


def crc_of(views: Sequence[memoryview]) -> int:
    """CRC-32 of some memory, one view after the other."""
    crc = 0
    for view in views:
        crc = zlib.crc32(view, crc)
    return crc


class Channel:
    """One connection after the proof; one thread at a time, but `cut` from any.

    Everything raises ConnectionError (TimeoutError among them as OSError) when the peer is gone,
    and ProtocolError when it says what the protocol does not allow.
    """

    def __init__(self, sock: socket.socket, key: bytes) -> None:
        self._sock, self._key = sock, key
        self._sent = self._received = 0
        self._closing = threading.Lock()
        self.is_cut = False

    # ---------------------------------------------------------------------------- the proof

    @classmethod
    def accept(cls, sock: socket.socket, key: bytes) -> Channel:
        """As the server; raises ProtocolError for a stranger."""
        end = time.monotonic() + HANDSHAKE_S
        nonce = secrets.token_bytes(_NONCE_BYTES)
        sock.settimeout(HANDSHAKE_S)
        sock.sendall(MAGIC + nonce)
        given = _receive(sock, _NONCE_BYTES + 32, end)
        theirs, proof = given[:_NONCE_BYTES], given[_NONCE_BYTES:]
        if not hmac.compare_digest(proof, _proof(key, b"client", nonce, theirs)):
            raise ProtocolError("a stranger asked for data: it does not have the service's key")
        sock.sendall(_proof(key, b"server", nonce, theirs))
        return cls._opened(sock, key, nonce, theirs)

    @classmethod
    def connect(cls, sock: socket.socket, key: bytes) -> Channel:
        """As the client; raises ProtocolError where the server is not of this service."""
        end = time.monotonic() + HANDSHAKE_S
        given = _receive(sock, len(MAGIC) + _NONCE_BYTES, end)
        if given[: len(MAGIC)] != MAGIC:
            raise ProtocolError("what answers there is no data server of this version")
        nonce, mine = given[len(MAGIC) :], secrets.token_bytes(_NONCE_BYTES)
        sock.sendall(mine + _proof(key, b"client", nonce, mine))
        try:
            proof = _receive(sock, 32, end)
        except ConnectionError:
            raise ProtocolError("the data server does not take our key") from None
        if not hmac.compare_digest(proof, _proof(key, b"server", nonce, mine)):
            raise ProtocolError("the data server does not have the service's key")
        return cls._opened(sock, key, nonce, mine)

    @classmethod
    def _opened(cls, sock: socket.socket, key: bytes, *nonces: bytes) -> Channel:
        # The system keeps the time: so a chunk is one call, and the interpreter is let go of once.
        sock.settimeout(None)
        _be_patient(sock, socket.SO_RCVTIMEO, IO_TIMEOUT_S)
        _be_patient(sock, socket.SO_SNDTIMEO, IO_TIMEOUT_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return cls(sock, _proof(key, b"session", *nonces))

    # --------------------------------------------------------------------------- messages

    def send(self, message: AskPages | AskWeights | Offer | Refusal) -> None:
        body = _encode(message)
        assert len(body) <= MAX_FRAME_BYTES, f"a message of {len(body)} bytes"
        code = self._code(self._sent, body)
        self._sent += 1
        self._send_all([memoryview(_FRAME.pack(len(body)) + code + body)])

    def ask(self, idle_s: float) -> AskPages | AskWeights:
        """The next thing the client asks for, waited for as long as `idle_s`."""
        _be_patient(self._sock, socket.SO_RCVTIMEO, idle_s)
        head = _receive(self._sock, _FRAME.size)
        _be_patient(self._sock, socket.SO_RCVTIMEO, IO_TIMEOUT_S)
        return self._decoded(head, _ask)

    def answer(self) -> Offer | Refusal:
        return self._decoded(_receive(self._sock, _FRAME.size), _answer)

    def _decoded(self, head: bytes, decoder: msgspec.msgpack.Decoder[T]) -> T:
        (length,) = _FRAME.unpack(head)
        if length > MAX_FRAME_BYTES:
            raise ProtocolError(f"a frame of {length} bytes")
        code = _receive(self._sock, _CODE_BYTES)
        body = _receive(self._sock, length)
        if not hmac.compare_digest(code, self._code(self._received, body)):
            raise ProtocolError("a frame was not made with the service's key")
        self._received += 1
        try:
            return decoder.decode(body)
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"a data frame cannot be read: {error}") from None

    def _code(self, number: int, body: bytes) -> bytes:
        return hmac.digest(self._key, number.to_bytes(8, "big") + body, "sha256")[:_CODE_BYTES]

    # ----------------------------------------------------------------------------- chunks

    def send_chunk(self, offset: int, views: Views, *, spoil: bool = False) -> None:
        """`spoil`: with a wrong checksum."""
        nbytes = sum(view.nbytes for view in views)
        crc = crc_of(views) ^ spoil
        self._send_all([memoryview(_CHUNK.pack(_Kind.DATA, offset, nbytes, crc)), *views])

    def send_end(self) -> None:
        self._send_all([memoryview(_CHUNK.pack(_Kind.END, 0, 0, 0))])

    def send_refusal(self, reason: str) -> None:
        """In place of a chunk: what was offered cannot be given any more."""
        body = reason.encode()[:1000]
        self._send_all([memoryview(_CHUNK.pack(_Kind.REFUSAL, 0, len(body), 0) + body)])

    def chunk(self) -> ChunkHead | None:
        """The head of the next chunk, or None at the end; `take` must follow.

        Raises ProtocolError where the source refuses to go on.
        """
        kind, offset, nbytes, crc = _CHUNK.unpack(_receive(self._sock, _CHUNK.size))
        if nbytes > CHUNK_BYTES:
            raise ProtocolError(f"a chunk of {nbytes} bytes")
        if kind == _Kind.END:
            return None
        if kind == _Kind.REFUSAL:
            reason = _receive(self._sock, min(nbytes, 1000)).decode(errors="replace")
            raise ProtocolError(f"the source does not go on: {reason}")
        if kind != _Kind.DATA or nbytes == 0:
            raise ProtocolError(f"a chunk of kind {kind} with {nbytes} bytes")
        return ChunkHead(offset, nbytes, crc)

    def take(self, views: Views) -> None:
        """Receive a chunk's bytes."""
        left = views
        while left:
            with _in_time():
                count = self._sock.recvmsg_into(left[:MAX_VIEWS], 0, socket.MSG_WAITALL)[0]
            if count == 0:
                raise ConnectionResetError("the source has closed the connection")
            left = _rest(left, count)

    def _send_all(self, views: Views) -> None:
        left = views
        while left:
            with _in_time():
                count = self._sock.sendmsg(left[:MAX_VIEWS])
            left = _rest(left, count)

    # -------------------------------------------------------------------------------- end

    def cut(self) -> None:
        """Break what is under way on it, here and at the peer; from any thread, idempotent."""
        self.is_cut = True
        with self._closing, contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with self._closing:
            self._sock.close()


def _proof(key: bytes, who: bytes, *nonces: bytes) -> bytes:
    return hmac.digest(key, who + b"".join(nonces), "sha256")


def _receive(sock: socket.socket, count: int, end: float | None = None) -> bytes:
    """Exactly so many bytes; raises ConnectionError at the end of the connection.

    `end`: when all of them must be there, else each for itself within the socket's timeout.
    """
    found = bytearray(count)
    view, at = memoryview(found), 0
    while at < count:
        if end is not None:
            sock.settimeout(max(end - time.monotonic(), 0.001))
        with _in_time():
            more = sock.recv_into(view[at:], 0, socket.MSG_WAITALL)
        if more == 0:
            raise ConnectionResetError("the peer has closed the connection")
        at += more
    return bytes(found)


def _be_patient(sock: socket.socket, side: int, seconds: float) -> None:
    """How long one call to the system may wait for the peer."""
    whole = int(seconds)
    sock.setsockopt(socket.SOL_SOCKET, side, _TIMEVAL.pack(whole, int((seconds - whole) * 1e6)))


@contextlib.contextmanager
def _in_time() -> Iterator[None]:
    """What the system says when the time was up, as Python says it."""
    try:
        yield
    except BlockingIOError:
        raise TimeoutError("the peer neither takes nor gives anything") from None


def _rest(views: Views, done: int) -> Views:
    """What is left of buffers of which `done` bytes are through."""
    for number, view in enumerate(views):
        if done < view.nbytes:
            return [view[done:], *views[number + 1 :]] if done else views[number:]
        done -= view.nbytes
    return []
