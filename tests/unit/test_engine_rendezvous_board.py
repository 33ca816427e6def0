"""The board: values meet asks in any order, epochs stay apart, bounds hold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexslurm.errors import ProtocolError, StaleEpoch
from flexslurm.messages import RendezvousAdd, RendezvousGet, RendezvousSet, RendezvousValue
from flexslurm.wire import rendezvous_board
from flexslurm.wire.rendezvous_board import RendezvousBoard


def put(key: str, value: bytes, epoch: int = 1) -> RendezvousSet:
    return RendezvousSet(epoch=epoch, key=key, value=value)


def get(key: str, ask: int, epoch: int = 1) -> RendezvousGet:
    return RendezvousGet(epoch=epoch, key=key, ask=ask)


def add(key: str, amount: int, ask: int = 0, epoch: int = 1) -> RendezvousAdd:
    return RendezvousAdd(epoch=epoch, key=key, amount=amount, ask=ask)


def value(key: str, ask: int, data: bytes, epoch: int = 1) -> RendezvousValue:
    return RendezvousValue(epoch=epoch, key=key, ask=ask, value=data)


@pytest.fixture
def board() -> RendezvousBoard:
    board = RendezvousBoard()
    board.open(1)
    return board


def test_a_set_key_is_answered_at_once(board: RendezvousBoard) -> None:
    assert board.handle("a", put("k", b"v")) == []
    assert board.handle("b", get("k", 4)) == [("b", value("k", 4, b"v"))]


def test_asks_wait_for_the_value_and_are_answered_once(board: RendezvousBoard) -> None:
    assert board.handle("b", get("k", 4)) == []
    assert board.handle("c", get("k", 1)) == []
    assert board.handle("c", get("other", 2)) == []
    answers = board.handle("a", put("k", b"v"))
    assert answers == [("b", value("k", 4, b"v")), ("c", value("k", 1, b"v"))]
    assert board.handle("a", put("k", b"w")) == []
    assert board.waiting == 1


def test_counters_count_and_wake_asks(board: RendezvousBoard) -> None:
    assert board.handle("b", get("n", 9)) == []
    answers = board.handle("a", add("n", 2, ask=5))
    assert answers == [("b", value("n", 9, b"2")), ("a", value("n", 5, b"2"))]
    assert board.handle("a", add("n", -3, ask=6)) == [("a", value("n", 6, b"-1"))]


def test_epochs_do_not_meet(board: RendezvousBoard) -> None:
    board.open(2)
    board.handle("a", put("k", b"old"))
    assert board.handle("b", get("k", 1, epoch=2)) == []
    assert board.handle("a", put("k", b"new", epoch=2)) == [("b", value("k", 1, b"new", epoch=2))]


def test_a_closed_epoch_is_stale_and_forgotten(board: RendezvousBoard) -> None:
    board.handle("a", put("k", b"v"))
    board.handle("a", get("never", 1))
    board.close(1)
    board.close(1)
    assert board.waiting == 0
    with pytest.raises(StaleEpoch, match="epoch 1"):
        board.handle("a", get("k", 2))
    board.open(1)
    assert board.handle("a", get("k", 3)) == []


def test_opening_twice_keeps_what_is_there(board: RendezvousBoard) -> None:
    board.handle("a", put("k", b"v"))
    board.open(1)
    assert board.handle("a", get("k", 1)) == [("a", value("k", 1, b"v"))]


def test_a_lost_member_is_not_answered(board: RendezvousBoard) -> None:
    for member in ("a", "b"):
        board.handle(member, get("k", 1))
    board.handle("a", get("only a", 2))
    board.forget("a")
    assert board.waiting == 1
    assert board.handle("c", put("k", b"v")) == [("b", value("k", 1, b"v"))]


def test_a_text_is_no_counter(board: RendezvousBoard) -> None:
    board.handle("a", put("k", b"text"))
    with pytest.raises(ProtocolError, match="no counter"):
        board.handle("a", add("k", 1))


def test_bounds(board: RendezvousBoard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_board, "MAX_KEYS", 2)
    monkeypatch.setattr(rendezvous_board, "MAX_ASKS_PER_KEY", 2)
    with pytest.raises(ProtocolError, match="bytes"):
        board.handle("a", put("k", b"x" * (rendezvous_board.MAX_VALUE_BYTES + 1)))
    board.handle("a", put("1", b""))
    board.handle("a", put("2", b""))
    board.handle("a", put("2", b"again"))
    with pytest.raises(ProtocolError, match="keys"):
        board.handle("a", put("3", b""))
    board.handle("a", get("x", 1))
    board.handle("a", get("x", 2))
    with pytest.raises(ProtocolError, match="asks"):
        board.handle("a", get("x", 3))


_moves = st.lists(
    st.one_of(
        st.builds(put, st.sampled_from("xy"), st.binary(max_size=2), st.integers(1, 2)),
        st.builds(get, st.sampled_from("xy"), st.integers(0, 99), st.integers(1, 2)),
    ),
    max_size=30,
)


@given(_moves)
def test_every_ask_gets_the_value_at_the_time_in_any_order(
    moves: list[RendezvousSet | RendezvousGet],
) -> None:
    board = RendezvousBoard()
    board.open(1)
    board.open(2)
    values: dict[tuple[int, str], bytes] = {}
    due: dict[tuple[int, str], list[int]] = {}
    for move in moves:
        place = (move.epoch, move.key)
        answers = [message for _, message in board.handle("m", move)]
        if isinstance(move, RendezvousSet):
            values[place] = move.value
            expected = due.pop(place, [])
        elif place in values:
            expected = [move.ask]
        else:
            due.setdefault(place, []).append(move.ask)
            expected = []
        assert [answer.ask for answer in answers] == expected
        assert all(answer.value == values[place] for answer in answers)
    assert board.waiting == sum(len(asks) for asks in due.values())
