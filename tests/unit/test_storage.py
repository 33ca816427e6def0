"""The service's part of checkpoint_dir: probed before use; checkpoints whole or not at all."""

from __future__ import annotations

import asyncio
import logging
import stat
from pathlib import Path

import msgspec
import pytest

from flexslurm.control.directory_probe import TOKEN_NAME, probe_directory
from flexslurm.control.installed import InstalledGear, InstalledReplica, ReplicaKey, SeatedWorker
from flexslurm.control.members import GpuAt
from flexslurm.engine import faults
from flexslurm.engine.load import RunningKv
from flexslurm.gear import Estimates, Gear, Replica, Signature, Stage
from flexslurm.head.checkpoint_writer import CheckpointWriter
from flexslurm.head.light_checkpoint import take_checkpoint, weights_version
from flexslurm.head.storage import Storage
from flexslurm.messages import DirectoryProbed

KEY = ReplicaKey(4, 1)


def gear_in_place() -> InstalledGear:
    stages = (Stage("a100", 2, 0, 4, 8, 0), Stage("a100", 1, 4, 6, 8, 1))
    replica = Replica(stages, 4, 16, 64)
    seats = tuple(
        SeatedWorker(GpuAt(f"a{n // 2}", n % 2), f"w{n}", f"node{n // 2}", "10.0.0.1", 1)
        for n in range(3)
    )
    gear = Gear("g", Signature(), 16, (replica,), Estimates(1, 1, 1, 1, 1))
    return InstalledGear(gear, {0: InstalledReplica(KEY, replica, seats)})


RUNNING = {KEY: [RunningKv("r/0", (3, 5), 20, 1, 40, 1)]}


def checkpoint(epoch: int):
    return take_checkpoint("h-1", epoch, "/model", "v1", gear_in_place(), RUNNING)


def begun(path: Path) -> Storage:
    storage = Storage(path, "demo")
    storage.begin()
    assert storage.fault == ""
    return storage


def test_a_checkpoint_says_what_lives_where(tmp_path: Path) -> None:
    storage = begun(tmp_path)
    storage.save(checkpoint(7))
    found = storage.latest()
    assert found == checkpoint(7)
    [one] = found.replicas
    assert (one.number, one.epoch, one.index) == (0, 4, 1)
    assert [(s.worker, s.lo, s.hi, s.tp_rank) for s in one.stages] == [
        ("w0", 0, 4, 0), ("w1", 0, 4, 1), ("w2", 4, 6, 0),
    ]  # fmt: skip
    assert [(t.sequence, t.blocks, t.computed) for t in found.tables] == [("r/0", (3, 5), 20)]


def test_the_last_few_are_kept_and_a_damaged_one_is_passed_over(tmp_path: Path) -> None:
    storage = begun(tmp_path)
    for epoch in (8, 9, 10, 11):
        storage.save(checkpoint(epoch))
    names = sorted(path.name for path in storage.path.glob("shift-*"))
    assert names == ["shift-10.json", "shift-11.json", "shift-9.json"]
    (storage.path / "shift-11.json").write_text("{")
    found = storage.latest()
    assert found is not None and found.epoch == 10


def test_a_restarted_head_clears_what_was_parked_and_reads_what_was_noted(tmp_path: Path) -> None:
    storage = begun(tmp_path)
    storage.save(checkpoint(7))
    parked = storage.path / "kv-w0-e7-t000001.park"
    parked.write_bytes(b"x")
    again = Storage(tmp_path, "demo")
    found = again.begin()
    assert found is not None and found.epoch == 7
    assert not parked.exists()


def test_a_directory_that_cannot_be_made_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    storage = Storage(blocked, "demo")
    with caplog.at_level(logging.WARNING):
        assert storage.begin() is None
    assert "Not a directory" in storage.fault and "not used" in caplog.text
    assert storage.ask("a") is None and not storage.good_for(())


def test_the_directory_is_its_owners_alone(tmp_path: Path) -> None:
    storage = begun(tmp_path)
    assert stat.S_IMODE(storage.path.stat().st_mode) == 0o700


def test_an_agent_sees_the_same_directory_and_leaves_nothing(tmp_path: Path) -> None:
    storage = begun(tmp_path)
    ask = storage.ask("a1")
    assert ask is not None and storage.ask("a1") is None, "asked once"
    before = sorted(storage.path.iterdir())
    assert probe_directory(Path(ask.path), ask.token) == ""
    assert sorted(storage.path.iterdir()) == before
    assert not storage.good_for(["a1"])
    storage.heard(DirectoryProbed(incarnation="a1", path=ask.path))
    assert storage.good_for(["a1"]) and not storage.good_for(["a1", "a2"])
    storage.forget_all_but(["a2"])
    assert not storage.good_for(["a1"])


def test_another_directory_of_the_same_name_is_told(tmp_path: Path) -> None:
    assert "No such file" in probe_directory(tmp_path / "nowhere", "t")
    (tmp_path / TOKEN_NAME).write_text("another head's")
    assert "not the same directory" in probe_directory(tmp_path, "t")


def test_a_directory_that_an_agent_cannot_use_is_not_good(tmp_path: Path) -> None:
    storage = begun(tmp_path)
    storage.heard(DirectoryProbed(incarnation="a", path=str(storage.path)))
    storage.heard(DirectoryProbed(incarnation="a", path=str(storage.path), reason="read-only"))
    assert not storage.good_for(["a"])
    storage.heard(DirectoryProbed(incarnation="b", path="/another"))
    assert not storage.good_for(["b"])


def test_other_weights_have_another_version(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"1234")
    (tmp_path / "config.json").write_text("{}")
    before = weights_version(tmp_path)
    assert weights_version(tmp_path) == before
    (tmp_path / "model.safetensors").write_bytes(b"12345")
    assert weights_version(tmp_path) != before


def test_the_keeper_writes_the_last_one_and_says_what_it_cannot(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    storage = Storage(tmp_path, "demo")
    keeper = CheckpointWriter(storage, "h-1", str(tmp_path))
    assert keeper.begin() is None

    async def notes() -> None:
        for epoch in (1, 2, 3):
            keeper.note(epoch, gear_in_place(), RUNNING)
        await keeper.close()
        for path in storage.path.iterdir():
            path.unlink()
        storage.path.rmdir()
        keeper.note(4, gear_in_place(), RUNNING)
        await keeper.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(notes())
    assert "no light checkpoint of epoch 4" in caplog.text
    assert "epoch 1" not in caplog.text


def test_a_full_disk_keeps_the_last_checkpoint_and_leaves_no_draft(tmp_path: Path) -> None:
    storage = begun(tmp_path)
    storage.save(checkpoint(7))
    before = sorted(storage.path.iterdir())
    faults.arm("checkpoint.write:1:full")
    try:
        with pytest.raises(OSError, match=r"injected at checkpoint\.write"):
            storage.save(checkpoint(8))
    finally:
        faults.arm("")
    assert sorted(storage.path.iterdir()) == before
    assert storage.latest() == checkpoint(7)


def test_a_new_head_journals_what_it_found(tmp_path: Path) -> None:
    begun(tmp_path).save(checkpoint(7))
    keeper = CheckpointWriter(Storage(tmp_path, "demo"), "h-2", str(tmp_path))
    record = keeper.begin()
    assert record is not None
    assert (record["event"], record["epoch"], record["sequences"]) == ("found", 7, 1)
    assert record["same_weights"] is False
    assert msgspec.json.encode(record)


def test_without_a_directory_nothing_is_kept() -> None:
    keeper = CheckpointWriter(None, "h-1", "/model")
    assert keeper.begin() is None and keeper.ask("a", ["a"]) is None
    keeper.note(1, gear_in_place(), RUNNING)
    assert keeper.take(DirectoryProbed(incarnation="a", path="/x")), "it is nobody else's"
