"""Shift after shift on the same processes: no thread, descriptor, port or byte more than before."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.service_harness import check, finish, oracle, some_asks, tiny_service, tiny_site
from tests.shift_ground import Ground, ground, layout

pytestmark = [pytest.mark.shared_service, pytest.mark.timeout(420)]
LONG = 40
WALK = (layout(1, 1, 1), f"2x({layout(2)})", layout(2, 2))
SLACK_DESCRIPTORS = 4
"""What a process may open late and keep: fewer than one for each shift by far."""
SETTLES_WITHIN_S = 60.0
"""Connections between workers are kept for half a minute, and so are their threads."""
KEPT_S = 40.0


@pytest.fixture(scope="module")
def walker(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Ground]:
    home = tmp_path_factory.mktemp("leftovers")
    settings = tiny_service(tiny_model, [("a100", 2, 2)])
    expected = oracle(tiny_model, some_asks(3, LONG))
    with ground(home, tiny_model, settings, tiny_site(), expected, LONG) as walker:
        yield walker


def walk(walker: Ground) -> None:
    """Once through all gears under load, and back in the last."""
    asks = some_asks(3, LONG)
    threads = walker.service.start(asks)
    for gear in WALK:
        walker.shift_to(gear)
    finish(threads, 60)
    check(asks, walker.expected)


@pytest.mark.slow
@pytest.mark.long
def test_shifts_leave_no_more_threads_and_descriptors_than_there_were(walker: Ground) -> None:
    for _ in range(2):
        walk(walker)
    walker.check_clean()
    first = walker.seats()
    # What is kept for a while after a shift must not be counted: as much could leak unseen.
    time.sleep(KEPT_S)
    walker.census.begin(walker.service.status())
    for _ in range(8):
        walk(walker)
    walker.check_clean()
    assert [seat.gpu.pid for seat in walker.seats()] == [seat.gpu.pid for seat in first]
    deadline = time.monotonic() + SETTLES_WITHIN_S
    while found := walker.census.too_much(walker.service.status(), 0, SLACK_DESCRIPTORS):
        assert time.monotonic() < deadline, "\n".join(found)
        time.sleep(0.5)
