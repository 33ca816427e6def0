"""Links: authenticated, encrypted, typed; strangers and nonsense get nowhere."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq

from flexslurm.errors import DeadlineExceeded, EnvironmentFault, ProtocolError, ServiceError
from flexslurm.messages import AgentBeat, Message, StopWorkers, Welcome
from flexslurm.wire.keys import ServiceKeys, create_keys, load_keys
from flexslurm.wire.transport import HeadLink, HeadSocket

WELCOME = Welcome(head="h", beat_s=1, lost_s=5)


def with_head(
    keys: ServiceKeys, member: Callable[[str, HeadSocket], None], *, answer: Message = WELCOME
) -> tuple[list[tuple[str, Message]], int]:
    """Run `member(endpoint, head)` in a thread beside a head that answers everything."""
    heard: list[tuple[str, Message]] = []

    async def run() -> int:
        def receive(sender: str, message: Message) -> None:
            heard.append((sender, message))
            head.send(sender, answer)

        head = HeadSocket(keys, receive, host="127.0.0.1")
        try:
            await asyncio.to_thread(member, f"tcp://127.0.0.1:{head.port}", head)
        finally:
            head.close()
        return head.refused

    return heard, asyncio.run(run())


@pytest.fixture
def keys(tmp_path: Path) -> ServiceKeys:
    return create_keys(tmp_path / "keys.json")


def test_messages_arrive_in_order_both_ways(keys: ServiceKeys) -> None:
    def member(endpoint: str, _: HeadSocket) -> None:
        link: HeadLink[Message] = HeadLink(endpoint, keys, "me")
        for number in range(500):
            assert link.ask(AgentBeat(incarnation="me", number=number), 60) == WELCOME
        link.close()

    heard, _ = with_head(keys, member)
    assert [message.number for _, message in heard if isinstance(message, AgentBeat)] == list(
        range(500)
    )


def test_a_stranger_is_never_heard(keys: ServiceKeys) -> None:
    stranger = ServiceKeys(keys.head_public, b"", *zmq.curve_keypair())

    def member(endpoint: str, _: HeadSocket) -> None:
        link: HeadLink[Message] = HeadLink(endpoint, stranger, "spy")
        with pytest.raises(DeadlineExceeded):
            link.ask(AgentBeat(incarnation="spy", number=1), 0.5)
        link.close()

    assert with_head(keys, member)[0] == []


def test_a_false_head_gets_nothing(keys: ServiceKeys, tmp_path: Path) -> None:
    false_head = create_keys(tmp_path / "other.json")

    def member(endpoint: str, _: HeadSocket) -> None:
        link: HeadLink[Message] = HeadLink(endpoint, keys, "me")
        with pytest.raises(DeadlineExceeded):
            link.ask(AgentBeat(incarnation="me", number=1), 0.5)
        link.close()

    assert with_head(false_head, member)[0] == []


def test_nonsense_and_messages_of_the_wrong_direction_are_refused(keys: ServiceKeys) -> None:
    def member(endpoint: str, _: HeadSocket) -> None:
        link: HeadLink[Message] = HeadLink(endpoint, keys, "me")
        link.send(StopWorkers(gpus=(0,)))
        link._outbox.append(b"\xff\x00 not msgpack")
        assert link.ask(AgentBeat(incarnation="me", number=7), 60) == WELCOME
        link.close()

    heard, refused = with_head(keys, member)
    assert [type(message) for _, message in heard] == [AgentBeat]
    assert refused == 2


def test_sending_to_an_absent_member_is_told(keys: ServiceKeys) -> None:
    def member(_: str, head: HeadSocket) -> None:
        absent.extend(head.send_many(["nobody"], WELCOME))

    absent: list[str] = []
    with_head(keys, member)
    assert absent == ["nobody"]


def test_a_closed_link_refuses(keys: ServiceKeys) -> None:
    def member(endpoint: str, _: HeadSocket) -> None:
        link: HeadLink[Message] = HeadLink(endpoint, keys, "me")
        link.close()
        with pytest.raises(ProtocolError):
            link.send(AgentBeat(incarnation="me", number=1))

    with_head(keys, member)


def test_keys_are_private(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    keys = create_keys(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert load_keys(path) == keys
    assert keys.head_secret.decode() not in repr(keys)
    path.chmod(0o640)
    with pytest.raises(EnvironmentFault, match="others may read"):
        load_keys(path)
    with pytest.raises(ServiceError, match="No such file"):
        load_keys(tmp_path / "none")
    path.write_text("{}")
    path.chmod(0o600)
    with pytest.raises(ServiceError, match="damaged"):
        load_keys(path)


def test_what_is_not_received_waits_with_the_head_and_nothing_is_lost(
    keys: ServiceKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flexslurm.wire.transport._MOST_QUEUED", 10)
    held: list[int] = []

    def member(endpoint: str, _: HeadSocket) -> None:
        link: HeadLink[Message] = HeadLink(endpoint, keys, "me")
        for number in range(100):
            while True:
                try:
                    link.send(AgentBeat(incarnation="me", number=number))
                except ProtocolError:
                    time.sleep(0.001)
                else:
                    break
        for _ in range(100):
            assert link.recv(60) == WELCOME
            held.append(link._inbox.qsize())
        assert link.recv(0.05) is None
        link.close()

    with_head(keys, member)
    assert max(held) <= 10


def test_a_head_that_takes_nothing_is_given_up(
    keys: ServiceKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flexslurm.wire.transport._MOST_QUEUED", 10)
    monkeypatch.setattr("flexslurm.wire.transport._HIGH_WATER", 1)
    link: HeadLink[Message] = HeadLink("tcp://127.0.0.1:1", keys, "me")  # nobody listens
    try:
        with pytest.raises(ProtocolError, match="does not take"):
            for number in range(100):
                link.send(AgentBeat(incarnation="me", number=number))
                time.sleep(0.001)
    finally:
        link.close()


def test_a_port_that_cannot_be_opened_leaves_nothing_open(keys: ServiceKeys) -> None:
    before = set(Path("/proc/self/fd").iterdir())

    async def run() -> None:
        with pytest.raises(EnvironmentFault, match="cannot open a control port"):
            HeadSocket(keys, lambda sender, message: None, host="192.0.2.1")
        await asyncio.sleep(0)

    asyncio.run(run())
    assert {fd for fd in Path("/proc/self/fd").iterdir() if fd.exists()} <= before


def test_what_is_said_right_before_the_end_still_arrives(keys: ServiceKeys) -> None:
    """A head says farewell and closes: nobody waits in between."""

    async def run() -> Message:
        heard: asyncio.Event = asyncio.Event()
        head = HeadSocket(keys, lambda sender, message: heard.set(), host="127.0.0.1")
        link: HeadLink[Message] = HeadLink(f"tcp://127.0.0.1:{head.port}", keys, "me")
        link.send(AgentBeat(incarnation="me", number=1))
        await asyncio.wait_for(heard.wait(), 60)
        for _ in range(100):
            head.send("me", StopWorkers(gpus=(0,)))
        head.send("me", WELCOME)
        head.close()
        try:
            got = [await asyncio.to_thread(link.recv, 60.0) for _ in range(101)]
        finally:
            await asyncio.to_thread(link.close)
        return got[-1]

    assert asyncio.run(run()) == WELCOME
