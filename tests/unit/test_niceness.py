"""Paced transfers stand back at both ends, by threads of their own; those in a hurry do not."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from flexslurm.engine.niceness import NICENESS
from flexslurm.messages import ParkKv
from tests.transfer_sides import Side, check, pull, two_sides, write

OTHERS: set[threading.Thread] = set()
"""Threads of sides that an earlier test closed may still be on their way out."""


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side]]:
    OTHERS.clear()
    OTHERS.update(threading.enumerate())
    yield from two_sides()


def priorities(*names: str) -> dict[str, set[int]]:
    """Of the living threads of these sides with such names."""
    found: dict[str, set[int]] = {name: set() for name in names}
    for thread in set(threading.enumerate()) - OTHERS:
        if thread.name in found and thread.native_id is not None:
            nice = os.getpriority(os.PRIO_PROCESS, thread.native_id)
            found[thread.name].add(nice)
    return found


def test_what_is_paced_stands_back_and_what_is_urgent_does_not(sides: tuple[Side, Side]) -> None:
    one, two = sides
    usual = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    source, target = one.store(1), two.store(2)
    write(source, range(6))
    pairs = [(block, block) for block in range(3)]
    two.transfers.pull(pull(one, 1, 2, pairs, ticket=1, rate_bytes_per_s=1e9))
    assert not two.answer(1).failed
    found = priorities("data-receiver", "paced-receiver", "data-sender")
    assert found["paced-receiver"] == found["data-sender"] == {NICENESS}
    assert found["data-receiver"] == set()
    rest = [(block, block) for block in range(3, 6)]
    two.transfers.pull(pull(one, 1, 2, rest, ticket=2))
    assert not two.answer(2).failed
    found = priorities("data-receiver", "paced-receiver", "data-sender")
    assert found["data-receiver"] == {usual}
    assert found["data-sender"] == {usual, NICENESS}, "not over the connection of the paced one"
    check(target, [*pairs, *rest], (0, 4), (0, 3))


def test_what_is_parked_ahead_stands_back_and_what_a_pause_waits_for_does_not(
    sides: tuple[Side, Side],
) -> None:
    one, _ = sides
    usual = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    write(one.store(1), range(4))
    ahead = ParkKv(epoch=1, ticket=1, blocks=(0, 1), rate_bytes_per_s=1e9, deadline_s=60.0)
    one.transfers.park(ahead)
    assert not one.answer(1).failed
    assert priorities("data-receiver", "paced-receiver") == {
        "data-receiver": set(),
        "paced-receiver": {NICENESS},
    }
    one.transfers.park(ParkKv(epoch=1, ticket=2, blocks=(2, 3), deadline_s=60.0))
    assert not one.answer(2).failed
    assert priorities("data-receiver") == {"data-receiver": {usual}}
