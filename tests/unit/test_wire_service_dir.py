"""The service directory: one who changes it at a time, and damage that is told as such."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from flexslurm.errors import EnvironmentFault, ServiceError, ServiceExists
from flexslurm.messages import ToCli
from flexslurm.wire import files
from flexslurm.wire.files import write_atomically
from flexslurm.wire.service_dir import HeadAddress, ServiceDir
from flexslurm.wire.transport import HeadLink


def test_only_one_changes_a_service_at_a_time(tmp_path: Path) -> None:
    first, second = ServiceDir(tmp_path / "a"), ServiceDir(tmp_path / "a")
    with first.changing(), pytest.raises(ServiceExists), second.changing(0.1):
        pytest.fail("two at once")
    with second.changing():
        pass


def test_a_stop_waits_for_a_launch_to_end(tmp_path: Path) -> None:
    first, second = ServiceDir(tmp_path / "a"), ServiceDir(tmp_path / "a")
    order: list[str] = []
    held = threading.Event()

    def launch() -> None:
        with first.changing():
            held.set()
            order.append("launched")

    thread = threading.Thread(target=launch)
    thread.start()
    assert held.wait(60)
    with second.changing(60.0):
        order.append("stopped")
    thread.join(60)
    assert order == ["launched", "stopped"]


@pytest.mark.parametrize(
    "control", ["garbage", "ipc:///tmp/x", "tcp://", "tcp://a b:1", "tcp://a:b"]
)
def test_an_address_that_is_none_is_damage(tmp_path: Path, control: str) -> None:
    directory = ServiceDir(tmp_path)
    directory.publish_head(HeadAddress("h", control, "http://a:1", "n", 1))
    with pytest.raises(ServiceError, match="is damaged"):
        directory.head()
    directory.forget_head()
    assert directory.head() is None


def test_a_port_that_cannot_be_is_said(tmp_path: Path) -> None:
    directory = ServiceDir(tmp_path / "a")
    directory.create()
    with pytest.raises(EnvironmentFault, match="cannot connect"):
        HeadLink("tcp://:::1:x", directory.keys(), "c-1", ToCli)


def test_a_directory_of_other_things_is_left_as_it_is(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "thesis.tex").touch()
    for make in (ServiceDir(tmp_path).create, ServiceDir(tmp_path).changing().__enter__):
        with pytest.raises(EnvironmentFault, match="not a service's"):
            make()
    assert {path.name for path in tmp_path.iterdir()} == {"thesis.tex"}
    assert tmp_path.stat().st_mode & 0o777 == 0o755


def test_jobs_are_found_by_their_files(tmp_path: Path) -> None:
    directory = ServiceDir(tmp_path)
    directory.jobs.mkdir()
    for name in ("local-3", "12_submission.sh", "12_submitted.pkl", "14_0_log.out", "abc.sh", "77"):
        (directory.jobs / name).touch()
    assert directory.jobs_found() == ("12", "14", "local-3")


@pytest.mark.parametrize("place", ["/dev/null/x", "/proc/x", "x" * 300])
def test_a_place_that_cannot_be_made_is_said(tmp_path: Path, place: str) -> None:
    made = ServiceDir(tmp_path / place)
    with pytest.raises(EnvironmentFault, match="cannot make the service"), made.changing():
        pytest.fail("it was made")


def test_a_file_that_cannot_be_written_is_named_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x"
    write_atomically(path, b"old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="No space") as caught:
        write_atomically(path, b"new")
    assert caught.value.filename == str(path)
    assert [p.name for p in tmp_path.iterdir()] == ["x"]
    assert path.read_bytes() == b"old"
