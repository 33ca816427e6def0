"""Nobody without the key gets anything, and no nonsense stops a data server."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transfer_sides import (
    KEY,
    PAGE,
    Side,
    pull,
    two_sides,
    write,
)

from flexslurm.engine.transfer_wire import (
    MAGIC,
    AskPages,
    AskWeights,
    Channel,
    Offer,
    PieceRange,
    Refusal,
    data_key,
)
from flexslurm.engine.transfers import Transfers
from flexslurm.errors import ProtocolError
from flexslurm.messages import DataSource
from flexslurm.wire.keys import ServiceKeys


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side]]:
    yield from two_sides()


def dial(side: Side) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", side.transfers.port), timeout=60)
    sock.settimeout(60)
    return sock


def all_of(sock: socket.socket) -> bytes:
    """Everything until the other side closes."""
    found = b""
    try:
        while more := sock.recv(65536):
            found += more
    except ConnectionResetError:
        pass
    return found


@given(st.binary(max_size=200))
@settings(suppress_health_check=list(HealthCheck), max_examples=40)
def test_strangers_get_a_nonce_and_nothing_else(said: bytes) -> None:
    side = stranger_side()
    with dial(side) as sock:
        sock.sendall(said)
        sock.shutdown(socket.SHUT_WR)
        found = all_of(sock)
    assert len(found) <= len(MAGIC) + 32
    assert found[: len(MAGIC)] == MAGIC
    still_serves(side)


_kept: list[Side] = []


def stranger_side() -> Side:
    if not _kept:
        _kept.append(Side("w-fuzz"))
        write(_kept[0].store(1), range(2))
    return _kept[0]


@pytest.fixture(scope="module", autouse=True)
def _end() -> Iterator[None]:
    yield
    for side in _kept:
        side.close()
    _kept.clear()


def still_serves(side: Side) -> None:
    with dial(side) as sock:
        channel = Channel.connect(sock, KEY)
        channel.send(AskPages(1, (0, 1), (0, 1), (0,), PAGE, ((0, PAGE),)))
        assert channel.answer() == Offer(PAGE)
        chunk = channel.chunk()
        assert chunk is not None
        assert chunk.nbytes == PAGE
        channel.take([memoryview(bytearray(PAGE))])
        assert channel.chunk() is None


def test_a_wrong_key_is_refused_on_both_sides(sides: tuple[Side, Side]) -> None:
    one, _ = sides
    with dial(one) as sock, pytest.raises(ProtocolError, match="does not take our key"):
        Channel.connect(sock, b"another" * 5)
    other = Side("w-x", key=b"x" * 32)
    write(other.store(1), range(1))
    one.store(2)
    one.transfers.pull(pull(other, 1, 2, [(0, 0)]))
    assert "does not take our key" in one.answer(1).reason
    other.close()


def test_a_server_that_has_not_the_key_gives_nothing(sides: tuple[Side, Side]) -> None:
    """One that sends back what it was sent."""
    one, _ = sides
    one.store(2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60)
        ended = threading.Event()

        def pretend() -> None:
            while not ended.is_set():
                sock, _ = listener.accept()
                with sock, contextlib.suppress(OSError):
                    sock.sendall(MAGIC + b"n" * 32)
                    sock.sendall(sock.recv(64)[-32:])

        thread = threading.Thread(target=pretend)
        thread.start()
        port = listener.getsockname()[1]
        order = pull(one, 1, 2, [(0, 0)], source=DataSource("w-one?", "127.0.0.1", port, 1))
        one.transfers.pull(order)
        assert "does not have the service's key" in one.answer(1).reason
        ended.set()
        dial_port(port)
        thread.join(60)


def dial_port(port: int) -> None:
    socket.create_connection(("127.0.0.1", port), timeout=60).close()


@given(st.binary(max_size=60), st.booleans())
@settings(max_examples=40)
def test_members_that_talk_nonsense_are_cut_off(body: bytes, signed: bool) -> None:
    side = stranger_side()
    with dial(side) as sock:
        channel = Channel.connect(sock, KEY)
        code = channel._code(0, body) if signed else b"c" * 16
        sock.sendall(len(body).to_bytes(4, "big") + code + body)
        assert all_of(sock) == b""
    still_serves(side)


wild = st.integers(-(2**40), 2**40)
pair = st.tuples(wild, wild) | st.tuples(st.integers(-1, 5), st.integers(-1, 5))
asks = st.builds(
    AskPages, epoch=st.sampled_from([1, 2, -1]), layers=pair, heads=pair,
    blocks=st.lists(wild | st.integers(-2, 3), max_size=4).map(tuple),
    page_bytes=st.sampled_from([PAGE, 0, -1]), spans=st.lists(pair, max_size=3).map(tuple),
    rate_bytes_per_s=st.floats(),
) | st.builds(
    AskWeights, epoch=st.sampled_from([1, 2]), item_bytes=wild | st.sampled_from([1, 8]),
    pieces=st.lists(
        st.builds(PieceRange, tensor=st.text(max_size=3), dim=st.integers(-1, 2), lo=wild, hi=wild,
                  nbytes=wild), max_size=3,
    ).map(tuple),
    spans=st.lists(pair, max_size=3).map(tuple), rate_bytes_per_s=st.floats(),
)  # fmt: skip


@given(asks)
@settings(max_examples=150)
def test_any_ask_of_a_member_is_answered_or_cut_off(ask: AskPages | AskWeights) -> None:
    side = stranger_side()
    with dial(side) as sock:
        channel = Channel.connect(sock, KEY)
        channel.send(ask)
        try:
            answer = channel.answer()
            if isinstance(answer, Offer):
                while (chunk := channel.chunk()) is not None:
                    channel.take([memoryview(bytearray(chunk.nbytes))])
            else:
                assert isinstance(answer, Refusal)
        except (ConnectionError, ProtocolError):
            pass
    still_serves(side)
    side.arena.check_integrity()


def test_a_huge_frame_is_not_read(sides: tuple[Side, Side]) -> None:
    one, _ = sides
    with dial(one) as sock:
        Channel.connect(sock, KEY)
        sock.sendall(b"\xff\xff\xff\xff" + b"x" * 16)
        assert all_of(sock) == b""


def test_members_prove_the_services_key() -> None:
    keys = [ServiceKeys(b"a", b"b", b"c", secret) for secret in (b"d" * 40, b"e" * 40)]
    assert data_key(keys[0]) != data_key(keys[1])
    assert data_key(keys[0]) == data_key(msgspec.structs.replace(keys[0]))


def test_without_an_address_to_listen_at_there_is_no_port() -> None:
    side = Transfers("w", "192.0.2.1", KEY, lambda _: None)
    assert side.port == 0
    assert side.close(1, 0.1)
    side.shutdown()
