"""Pages outside the GPU come back whole or not at all; bounds on memory, rate and time hold."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transfer_sides import (
    HEADS,
    LAYERS,
    PAGE,
    Side,
    check,
    gate_at,
    pull,
    two_sides,
    write,
)

from flexslurm.engine import faults, kv_park
from flexslurm.engine.faults import Point
from flexslurm.engine.parking import FileSet, FileWriter, ParkedBox, ParkingLot
from flexslurm.engine.transfer_client import Cancel
from flexslurm.errors import CapacityError, ProtocolError
from flexslurm.messages import ParkKv, UnparkKv


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side]]:
    yield from two_sides()


@pytest.mark.parametrize("on_disk", [False, True])
def test_parked_pages_come_back_in_part_and_whole(
    sides: tuple[Side, Side], on_disk: bool, tmp_path: Path
) -> None:
    one, two = sides
    old = one.store(1, layers=(1, 4))
    write(old, range(8), origin=(1, 0))
    place = str(tmp_path / "there") if on_disk else None
    one.transfers.park(ParkKv(epoch=1, ticket=8, blocks=(5, 2, 30, 3), directory=place))
    parked = one.answer(8)
    assert (parked.failed, parked.parked_bytes) == ((30,), 3 * 9 * PAGE)
    assert parked.reason == "they hold nothing"
    old.pool[torch.from_numpy(old.cells[2])] = 0.0
    old.pool[torch.from_numpy(old.cells[2]), 0, 0, 0] = -1.0
    one.transfers.park(ParkKv(epoch=1, ticket=9, blocks=(2, 7), directory=place))
    assert not one.answer(9).failed
    assert one.transfers.close(1, 1.0)
    old.close()
    assert one.arena.used_bytes == 0
    assert one.transfers.lot.used_bytes == (0 if on_disk else 6 * 9 * PAGE)
    new = two.store(2, (0, 4), (1, 2))
    pairs = [(5, 0), (7, 1), (3, 2)]
    two.transfers.pull(
        pull(one, 1, 2, [*pairs, (2, 3), (30, 4), (6, 5)], layers=(1, 4), heads=(1, 2),
             directory=place)
    )  # fmt: skip
    answer = two.answer(1)
    assert set(answer.failed) == {4, 5}
    check(new, pairs, (1, 4), (1, 2), origin=(0, 1))
    assert (new.pool[torch.from_numpy(new.cells[3, 1:]), 1] == 0.0).all(), "the later one counts"
    again = one.store(3)
    one.transfers.pull(pull(one, 1, 3, pairs, ticket=5, layers=(1, 4), directory=place))
    assert not one.answer(5).failed
    check(again, pairs, (1, 4), (0, HEADS))
    one.transfers.unpark(UnparkKv(epoch=1))
    assert one.transfers.lot.used_bytes == 0
    assert not on_disk or not list((tmp_path / "there").iterdir())
    two.transfers.pull(
        pull(one, 1, 2, pairs, ticket=6, layers=(1, 4), heads=(1, 2), directory=place)
    )
    assert two.answer(6).reason


class Clock:
    """Time that passes by waiting alone."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def wait(self, cancel: Cancel, seconds: float) -> bool:
        self.now += seconds
        return cancel.is_set


def test_parking_keeps_to_its_bound_rate_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    block = LAYERS * HEADS * PAGE
    side = Side("w-one", parked_bytes=5 * block)
    write(side.store(1), range(20))
    side.transfers.park(ParkKv(epoch=1, ticket=1, blocks=tuple(range(4))))
    assert not side.answer(1).failed
    side.transfers.park(ParkKv(epoch=1, ticket=2, blocks=(4, 5)))
    full = side.answer(2)
    assert full.failed == (4, 5)
    assert f"{2 * block} bytes cannot be parked: {4 * block} of {5 * block}" in full.reason
    side.transfers.unpark(UnparkKv(epoch=1))
    clock = Clock()
    monkeypatch.setattr(kv_park, "time", clock)
    monkeypatch.setattr(Cancel, "wait", lambda cancel, seconds: clock.wait(cancel, seconds))
    rate, deadline_s = 4.0, 0.9  # blocks each second: four take one
    side.transfers.park(
        ParkKv(
            epoch=1, ticket=3, blocks=(4, 5, 6, 7), rate_bytes_per_s=rate * block,
            deadline_s=deadline_s,
        )
    )  # fmt: skip
    late = side.answer(3)
    assert late.seconds == pytest.approx(deadline_s)
    assert late.failed == (7,), "three are through after three quarters of a second"
    assert late.reason == "the time was up"
    side.close()


def test_copies_that_nobody_wants_any_more_are_given_up_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A shift that is given up has its memory free for the next, however slow its copies were."""
    block = LAYERS * HEADS * PAGE
    side = Side("w-one", parked_bytes=4 * block)
    write(side.store(1), range(4))
    waits: list[float] = []

    def wait(cancel: Cancel, seconds: float) -> bool:
        waits.append(seconds)
        if len(waits) == 2:
            side.transfers.unpark(UnparkKv(epoch=1))
        return cancel.is_set

    monkeypatch.setattr(Cancel, "wait", wait)
    side.transfers.park(ParkKv(epoch=1, ticket=1, blocks=(0, 1, 2, 3)))
    answer = side.answer(1)
    assert answer.failed == (0, 1, 2, 3) and answer.reason == "it was called off"
    assert len(waits) == 2 and side.transfers.lot.used_bytes == 0
    side.transfers.park(ParkKv(epoch=1, ticket=2, blocks=(0, 1, 2, 3)))
    assert not side.answer(2).failed, "there is room for it"
    side.close()


def test_a_place_that_cannot_be_written_to_is_told(
    sides: tuple[Side, Side], tmp_path: Path
) -> None:
    one, _ = sides
    write(one.store(1), range(2))
    (tmp_path / "file").write_text("in the way")
    one.transfers.park(
        ParkKv(epoch=1, ticket=1, blocks=(0, 1), directory=str(tmp_path / "file" / "x"))
    )  # fmt: skip
    answer = one.answer(1)
    assert answer.failed == (0, 1)
    assert "Not a directory" in answer.reason
    faults.arm("transfer.park:2:raise")
    one.transfers.park(ParkKv(epoch=1, ticket=2, blocks=(0, 1), directory=str(tmp_path / "new")))
    assert one.answer(2).failed == (0, 1)
    assert not list((tmp_path / "new").iterdir()), "no draft is left"


@given(data=st.data())
@settings(suppress_health_check=list(HealthCheck), max_examples=40)
def test_damaged_files_are_told_not_read(tmp_path: Path, data: st.DataObject) -> None:
    box = ParkedBox(3, (0, 2), (1, 3), 64)
    writer = FileWriter(tmp_path, "w-x", box, data.draw(st.integers(0, 99)))
    for block in (4, 9):
        writer.add(block, bytes([block]) * box.block_bytes)
    writer.finish()
    content = bytearray(writer.path.read_bytes())
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    else:
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    writer.path.write_bytes(content)
    with pytest.raises(ProtocolError):
        found = FileSet(writer.path)
        try:
            for place in (0, 1):
                found.read(place * 4, place * 4 + 4)
        finally:
            found.close()
    writer.path.unlink()


def test_host_memory_that_is_not_kept_is_not_counted() -> None:
    lot, box = ParkingLot(1000), ParkedBox(1, (0, 1), (0, 1), 100)
    first = lot.open(box, 6)
    with pytest.raises(CapacityError):
        lot.open(box, 5)
    lot.discard(first)
    lot.keep(lot.open(box, 5))
    assert lot.used_bytes == lot.forget(1) == 500
    assert lot.forget(1) == lot.used_bytes == 0


@pytest.mark.parametrize("on_disk", [False, True])
def test_what_is_called_off_while_it_is_parked_is_not_kept(
    sides: tuple[Side, Side], on_disk: bool, tmp_path: Path
) -> None:
    one, _ = sides
    write(one.store(1), range(4))
    place = str(tmp_path / "there") if on_disk else None
    with gate_at(Point.PARK) as gate:
        one.transfers.park(ParkKv(epoch=1, ticket=1, blocks=(0, 1), directory=place))
        gate.wait()
        one.transfers.unpark(UnparkKv(epoch=1))
        one.transfers.park(ParkKv(epoch=1, ticket=2, blocks=(2,), directory=place))
    off = one.answer(1)
    assert off.failed == (0, 1) and off.reason == "it was called off"
    assert not one.answer(2).failed
    assert one.transfers.lot.used_bytes == (0 if on_disk else LAYERS * HEADS * PAGE)
    assert len(list((tmp_path / "there").glob("*"))) == (1 if on_disk else 0)
    one.transfers.unpark(UnparkKv(epoch=1))
    assert one.transfers.lot.used_bytes == 0
    assert not list((tmp_path / "there").glob("*"))


def test_a_damaged_file_costs_its_own_blocks_alone(
    sides: tuple[Side, Side], tmp_path: Path
) -> None:
    one, two = sides
    write(one.store(1), range(4))
    for ticket, block in ((1, 2), (2, 3)):
        one.transfers.park(ParkKv(epoch=1, ticket=ticket, blocks=(block,), directory=str(tmp_path)))
        assert not one.answer(ticket).failed
    damaged = min(tmp_path.glob("*.park"))
    damaged.write_bytes(damaged.read_bytes()[:40])
    new = two.store(2)
    two.transfers.pull(pull(one, 1, 2, [(2, 0), (3, 1)], ticket=3, directory=str(tmp_path)))
    assert two.answer(3).failed == (0,)
    check(new, [(3, 1)], (0, LAYERS), (0, HEADS))


@pytest.mark.parametrize("on_disk", [False, True])
def test_an_epoch_that_ends_while_it_is_parked_leaves_nothing_of_it(
    sides: tuple[Side, Side], on_disk: bool, tmp_path: Path
) -> None:
    one, _ = sides
    write(one.store(1), range(4))
    place = str(tmp_path / "there") if on_disk else None
    ending = one.transfers.enter(1)
    with ThreadPoolExecutor(1) as beside:
        with gate_at(Point.PARK) as gate:
            one.transfers.park(ParkKv(epoch=1, ticket=1, blocks=(0, 1), directory=place))
            gate.wait()
            closing = beside.submit(one.transfers.close, 1, 60.0)
            assert ending.wait(60)
        assert closing.result()
    assert one.answer(1).failed == (0, 1)
    assert one.transfers.lot.used_bytes == 0
    assert not list((tmp_path / "there").glob("*"))
