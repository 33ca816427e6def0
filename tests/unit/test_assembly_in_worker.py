"""A worker makes what needs no memory first, and takes memory when it is told to go on."""

from __future__ import annotations

import os
import queue
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from flexslurm.engine.groups import start_default_world
from flexslurm.engine.install import Installer
from flexslurm.engine.nursery_server import WorkerSpec
from flexslurm.engine.tenancy import Tenancy
from flexslurm.engine.tiny import write_tiny_model
from flexslurm.engine.worker import Worker
from flexslurm.gear import Replica, Slot, Stage
from flexslurm.messages import (
    Assemble,
    Assembled,
    Install,
    Installed,
    InstallFailed,
    InstallProgress,
    Message,
    Peer,
    RendezvousAdd,
    RendezvousGet,
    RendezvousSet,
    RendezvousValue,
    Retire,
    Retired,
)
from flexslurm.wire.keys import create_keys

LAYERS = 2
Sent = queue.Queue[Message]


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[tuple[Worker, Sent]]:
    """A worker and what it tells the head, which is told from here."""
    start_default_world(torch.device("cpu"))
    create_keys(tmp_path / "keys.json")
    spec = WorkerSpec(
        gpu=0, endpoint="tcp://127.0.0.1:1", keys=str(tmp_path / "keys.json"), agent="a",
        address="127.0.0.1",
    )  # fmt: skip
    worker, sent = Worker("w", spec, torch.device("cpu")), Sent()
    worker._link.send = sent.put  # type: ignore[assignment, method-assign]
    yield worker, sent
    worker._transfers.shutdown()
    worker._link.close()
    for end in (worker._wake_r, worker._wake_w):
        os.close(end)


def install(tmp_path: Path) -> Install:
    model = write_tiny_model(tmp_path / "model", layers=LAYERS)
    replica = Replica((Stage("a100", 1, 0, LAYERS, 8, 0),), 4, 16, 64)
    slot = Slot(0, 0, 0)
    return Install(
        epoch=7, model=str(model), dtype="float64", block_tokens=16, slot=slot, replica=replica,
        peers=(Peer(slot, "w", "127.0.0.1"),), arena_bytes=64 << 20, timeout_s=60.0, probe=(1, 2),
    )  # fmt: skip


def heard(one: Worker, sent: Sent) -> Message:
    """The next thing that is no progress; its only member has met everybody."""
    while True:
        match message := sent.get(timeout=200.0):
            case RendezvousAdd() | RendezvousGet():
                said = RendezvousValue(epoch=7, key=message.key, ask=message.ask, value=b"1")
                one._take(said)
            case InstallProgress() | RendezvousSet():
                pass
            case _:
                return message


def test_memory_is_taken_when_there_is_room(worker: tuple[Worker, Sent], tmp_path: Path) -> None:
    one, sent = worker
    order = install(tmp_path)
    one._take(Assemble(install=order, room_s=60.0))
    assert heard(one, sent) == Assembled(worker="w", epoch=7, staged=True), "nobody else has any"
    assert one._used() == 0 and sent.empty()
    one._take(Assemble(install=order, room_s=60.0))  # said twice
    one._take(order)
    done = heard(one, sent)
    assert isinstance(done, Installed) and one._used() >= done.weights_bytes > 0
    one._take(order)  # said twice
    one._take(Retire(epoch=7))
    assert heard(one, sent) == Retired(worker="w", epoch=7)
    assert one._used() == 0


def test_what_waits_for_room_can_be_called_back(
    worker: tuple[Worker, Sent], tmp_path: Path
) -> None:
    one, sent = worker
    one._take(Assemble(install=install(tmp_path), room_s=60.0))
    assert isinstance(heard(one, sent), Assembled)
    one._take(Retire(epoch=7))
    assert heard(one, sent) == Retired(worker="w", epoch=7)
    assert one._tenancies == {} and one._used() == 0


def test_room_is_waited_for_as_long_as_the_head_says(
    worker: tuple[Worker, Sent], tmp_path: Path
) -> None:
    one, sent = worker
    one._take(Assemble(install=install(tmp_path), room_s=0.01))
    assert isinstance(heard(one, sent), Assembled)
    failed = heard(one, sent)
    assert isinstance(failed, InstallFailed) and "no room for the stage" in failed.reason


def test_workers_of_all_replicas_on_a_host_share_what_it_may_stage(
    worker: tuple[Worker, Sent], tmp_path: Path
) -> None:
    one, _ = worker
    one._transfers.lot._limit_bytes = 4000
    order = msgspec.structs.replace(install(tmp_path), host_workers=4)
    tenancy = Tenancy(order, one._host)
    installer = Installer(order, one._host, lambda: False, tenancy)
    assert 4 * installer._staging_bytes() == 2000, "half is for KV"


def test_groups_close_only_when_nothing_is_kept_of_an_epoch(
    worker: tuple[Worker, Sent], tmp_path: Path
) -> None:
    """Streams wait from the first word to the second, and not for groups to close."""
    one, sent = worker
    one._take(install(tmp_path))
    assert isinstance(done := heard(one, sent), Installed)
    (tenancy,) = one._tenancies.values()
    closed: list[float] = []
    tenancy._groups.close = closed.append  # type: ignore[assignment, method-assign]
    one._take(Retire(epoch=7, keep_weights=True))
    assert heard(one, sent) == Retired(worker="w", epoch=7)
    assert one._used() == done.weights_bytes and not closed, "pages are free, weights are kept"
    one._take(Retire(epoch=7))
    assert heard(one, sent) == Retired(worker="w", epoch=7)
    assert len(closed) == 1 and one._tenancies == {} and one._used() == 0
