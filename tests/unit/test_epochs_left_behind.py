"""Memory of an epoch that left something behind is never counted free: its process ends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from flexslurm.engine import faults
from flexslurm.engine.nursery_server import WorkerSpec
from flexslurm.engine.tenancy import Tenancy
from flexslurm.engine.worker import Exit, Worker
from flexslurm.gear import Replica, Slot, Stage
from flexslurm.messages import Install, Peer, Retire
from flexslurm.wire.keys import create_keys


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    """One whose head never answers."""
    create_keys(tmp_path / "keys.json")
    spec = WorkerSpec(
        gpu=0, endpoint="tcp://127.0.0.1:1", keys=str(tmp_path / "keys.json"), agent="a",
        address="127.0.0.1",
    )  # fmt: skip
    worker = Worker("w", spec, torch.device("cpu"))
    yield worker
    worker._transfers.shutdown()
    for end in (worker._wake_r, worker._wake_w):
        os.close(end)


def failing(worker: Worker, nowhere: Path) -> Tenancy:
    """An epoch whose install fails: there is no model."""
    replica = Replica((Stage("a100", 1, 0, 6, 8, 0),), 4, 16, 64)
    slot = Slot(0, 0, 0)
    peers = (Peer(slot, "w", "127.0.0.1"),)
    install = Install(
        epoch=7, model=str(nowhere), dtype="float64", block_tokens=16, slot=slot, replica=replica,
        peers=peers, arena_bytes=1 << 20, timeout_s=1.0,
    )  # fmt: skip
    tenancy = Tenancy(install, worker._host)
    worker._tenancies[7] = tenancy
    return tenancy


def ended(worker: Worker, tenancy: Tenancy) -> Exit:
    """How the worker ends whose agent goes away once the epoch is torn down."""
    tenancy.start()
    tenancy._stop.set()  # the head does not want to hear the cause first
    tenancy._thread.join(200)
    assert not tenancy._thread.is_alive()
    assert worker._tenancies == {}
    lifeline, agent = os.pipe()
    os.close(agent)
    try:
        return worker.run(lifeline)
    finally:
        os.close(lifeline)


def test_an_epoch_that_leaves_nothing_ends_no_process(worker: Worker, tmp_path: Path) -> None:
    assert ended(worker, failing(worker, tmp_path / "none")) is Exit.ASKED


@pytest.mark.parametrize("what", ["a group", "memory that is read", "who knows what"])
def test_an_epoch_that_leaves_something_ends_its_process(
    worker: Worker, tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenancy = failing(worker, tmp_path / "none")
    if what == "a group":
        monkeypatch.setattr(tenancy._groups, "close", lambda timeout_s: ["7/r0/s0"])
    elif what == "memory that is read":
        monkeypatch.setattr(worker._transfers, "close", lambda epoch, timeout_s: False)
    else:
        monkeypatch.setattr(worker._transfers, "close", lambda epoch, timeout_s: 1 / 0)
    assert ended(worker, tenancy) is Exit.STUCK


def test_an_epoch_that_cannot_be_closed_ends_its_process(worker: Worker, tmp_path: Path) -> None:
    tenancy = failing(worker, tmp_path / "none")
    faults.arm("retire:1:raise")
    try:
        worker._bury(tenancy, Retire(epoch=7))
    finally:
        faults.arm("")
    assert ended(worker, tenancy) is Exit.STUCK
