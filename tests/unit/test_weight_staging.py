"""Weights come to the host before there is room for them, and then nobody else is needed."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from flexslurm.engine import parking, weight_staging
from flexslurm.engine.arena import Arena
from flexslurm.engine.families import check_model
from flexslurm.engine.ownership import Holding, ShardMap
from flexslurm.engine.parking import ParkedBox, ParkingLot
from flexslurm.engine.reshard import LinkKind
from flexslurm.engine.stage import LoadedStage, StagePlan, build_stage
from flexslurm.engine.tenants import Tenant
from flexslurm.engine.transfer_client import Cancel
from flexslurm.engine.weight_pull import PeerFiller, Peers
from flexslurm.engine.weights import FileSource
from flexslurm.messages import WeightHolder
from tests.transfer_sides import Side, two_sides

FIRST, SECOND = Holding(0, 3, 1, 0), Holding(3, 6, 1, 0)
ARENA_BYTES = 16 << 20


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side]]:
    yield from two_sides()


@pytest.fixture
def model(tiny_model: Path) -> str:
    return str(tiny_model)


class Giver:
    """A worker that has one half of the model."""

    def __init__(self, side: Side, model: str, held: Holding) -> None:
        self.side, self.held, self.arena = side, held, Arena(ARENA_BYTES)
        self.stage = build_stage(plan(model, 1, held), self.arena)
        layers = held.lo, held.hi
        tenant = Tenant(1, self.arena, self.stage.store, layers, self.stage.heads)
        side.transfers.open(tenant)

    def holder(self) -> WeightHolder:
        held, port = self.held, self.side.transfers.port
        return WeightHolder(
            self.side.name, "n", "127.0.0.1", port, 1, held.lo, held.hi, held.tp, held.tp_rank
        )

    def close(self) -> None:
        assert self.side.transfers.close(1, 5.0)
        self.stage.close()
        assert self.arena.used_bytes == 0
        self.arena.close()


def plan(model: str, epoch: int, held: Holding) -> StagePlan:
    return StagePlan(model, epoch, held.lo, held.hi, held.tp, held.tp_rank, "float64", 4, 2)


@pytest.fixture
def giver(sides: tuple[Side, Side], model: str) -> Iterator[Giver]:
    made = Giver(sides[0], model, SECOND)
    yield made
    made.close()


class Taker:
    """A worker that is to have all layers, and takes what it lacks from the giver."""

    def __init__(self, side: Side, giver: Giver, model: str, files: FileSource) -> None:
        info, self.model, self.arena = check_model(Path(model)), model, Arena(ARENA_BYTES)
        self.peers = Peers(
            shards=ShardMap(info, "float64", 4),
            need=Holding(0, 6, 1, 0),
            worker="taker",
            node="n",
            holders=(giver.holder(),),
            rate_bytes_per_s=1e9,
            deadline=float("inf"),
        )
        fetcher = side.transfers.fetcher
        self.filler = PeerFiller(files, self.arena, self.peers, fetcher, Cancel())
        moves = self.peers.moves()
        self.lacks = sum(move.nbytes for move in moves if move.link is LinkKind.NODE)
        self.needs = sum(move.nbytes for move in moves)

    def build(self) -> LoadedStage:
        return build_stage(plan(self.model, 2, self.peers.need), self.arena, filler=self.filler)


@pytest.fixture
def taker(sides: tuple[Side, Side], giver: Giver, model: str) -> Iterator[Taker]:
    with FileSource(check_model(Path(model))) as files:
        made = Taker(sides[1], giver, model, files)
        yield made
        made.arena.close()


def same_as_from_files(stage: LoadedStage, model: str) -> bool:
    arena = Arena(ARENA_BYTES)
    other = build_stage(plan(model, 3, Holding(0, 6, 1, 0)), arena)
    found = all(
        torch.equal(a, b) for a, b in zip(stage_tensors(stage), stage_tensors(other), strict=True)
    )
    other.close()
    arena.close()
    return found


def stage_tensors(stage: LoadedStage) -> list[torch.Tensor]:
    return [value for _, value in sorted(stage._engine.named_parameters())]


def test_what_was_staged_needs_nobody_and_is_counted_as_moved(
    giver: Giver, taker: Taker, model: str
) -> None:
    assert taker.filler.stage(1 << 30, lambda: True)
    assert taker.arena.used_bytes == 0, "there is no room yet"
    giver.side.transfers.close(1, 5.0)  # it has nothing for anybody now
    stage = taker.build()
    assert stage.filled.moved_bytes == taker.lacks > 0
    assert stage.filled.read_bytes == taker.needs - taker.lacks
    assert same_as_from_files(stage, model)
    stage.close()


def test_what_has_no_room_on_the_host_is_fetched_in_the_end(
    giver: Giver, taker: Taker, model: str
) -> None:
    assert not taker.filler.stage(taker.lacks // 2, lambda: True)
    sent = giver.side.transfers.sent_bytes
    assert 0 < sent <= taker.lacks // 2
    taker.filler.go_on(0.0, float("inf"))
    stage = taker.build()
    assert stage.filled.moved_bytes == taker.lacks
    assert giver.side.transfers.sent_bytes == taker.lacks, "nothing came twice"
    assert same_as_from_files(stage, model)
    stage.close()


def test_it_is_given_up_when_there_is_room(giver: Giver, taker: Taker, model: str) -> None:
    """However much has come by then, nothing is wrong or missing."""
    taker.filler.stage(1 << 30, lambda: False)
    taker.filler.go_on(0.0, float("inf"))
    stage = taker.build()
    assert stage.filled.moved_bytes == taker.lacks
    assert same_as_from_files(stage, model)
    stage.close()


def test_a_peer_that_has_gone_leaves_it_to_the_files(
    giver: Giver, taker: Taker, model: str
) -> None:
    giver.side.transfers.close(1, 5.0)
    assert not taker.filler.stage(1 << 30, lambda: True)
    stage = taker.build()
    assert (stage.filled.moved_bytes, stage.filled.read_bytes) == (0, taker.needs)
    assert same_as_from_files(stage, model)
    stage.close()


def no_memory(*_: int) -> None:
    raise OSError(errno.ENOMEM, "Cannot allocate memory")


def test_a_host_that_gives_no_memory_costs_no_attempt(
    giver: Giver, taker: Taker, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_staging, "mmap", SimpleNamespace(mmap=no_memory))
    assert not taker.filler.stage(1 << 40, lambda: True)
    stage = taker.build()
    assert same_as_from_files(stage, model)
    stage.close()


def test_memory_that_is_not_given_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    lot, box = ParkingLot(1000), ParkedBox(1, (0, 1), (0, 1), 100)
    with monkeypatch.context() as patch:
        patch.setattr(parking, "mmap", SimpleNamespace(mmap=no_memory))
        with pytest.raises(OSError, match="Cannot allocate"):
            lot.open(box, 10)
    assert lot.spare_bytes == 1000
