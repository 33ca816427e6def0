"""Which service a command means that names none, and what is said of one that was stopped."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexslurm.cli.main import run
from flexslurm.cli.service_places import find_service, service_to_be
from flexslurm.errors import ServiceError
from flexslurm.wire.service_dir import HeadAddress, Pilots, ServiceDir

ADDRESS = HeadAddress("h-1", "tcp://127.0.0.1:1", "http://127.0.0.1:2", "node", 1)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLEXSLURM_SERVICES", str(tmp_path))
    return tmp_path


def launched(root: Path, name: str, *, running: bool) -> ServiceDir:
    directory = ServiceDir(root / name)
    directory.create()
    directory.service.write_text(f"name: {name}\n")
    directory.write_pilots(Pilots("slurm", head_job="7" if running else None))
    if running:
        directory.publish_head(ADDRESS)
    return directory


def test_the_only_one_that_runs_is_meant(root: Path) -> None:
    launched(root, "old", running=False)
    launched(root, "older", running=False)
    running = launched(root, "chat", running=True)
    assert find_service(None, None).path == running.path
    launched(root, "other", running=True)
    with pytest.raises(ServiceError) as caught:
        find_service(None, None)
    assert "services here: chat, old (stopped), older (stopped), other" in str(caught.value)


def test_the_only_one_there_is_is_meant_though_stopped(root: Path) -> None:
    only = launched(root, "old", running=False)
    assert find_service(None, None).path == only.path
    launched(root, "older", running=False)
    with pytest.raises(ServiceError, match=r"old \(stopped\), older \(stopped\)"):
        find_service(None, None)


def test_a_directory_is_meant_as_it_is_named(root: Path) -> None:
    """A word alone too: by `launch` and `script` as by the commands that look for the service."""
    assert service_to_be("chat", "box", "/shared").path == Path("box").absolute()
    assert service_to_be("chat", None, "/shared").path == root / "chat"


def test_the_status_of_a_stopped_one_says_so(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = launched(root, "old", running=False)
    assert run(["status"]) == 7
    told = capsys.readouterr().err
    assert f"the service in {directory.path} has been stopped" in told
    assert f"rm -r {directory.path}" in told


def test_stopping_it_twice_is_no_fault(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = launched(root, "old", running=False)
    for _ in range(2):
        assert run(["stop"]) == 0
        told = capsys.readouterr().out
        assert told.endswith(f" the service in {directory.path} has been stopped already\n")


def test_the_only_word_of_logs_is_the_part_where_it_names_no_service(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = launched(root, "chat", running=True)
    (directory.logs / "head").mkdir()
    (directory.logs / "head/chat.head.7.batch.log").write_text("the head's line\n")
    assert run(["logs", "head"]) == 0
    assert capsys.readouterr().out == "the head's line\n"
    assert run(["logs", "chat"]) == 0
    assert "chat.head.7.batch.log" in capsys.readouterr().out
    assert run(["logs", "hed"]) == 7
    assert "did you mean 'head'?" in capsys.readouterr().err


def test_a_file_in_place_of_the_directory_is_told(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "chat").write_text("")
    for words in (["status", "chat"], ["stop", "chat"], ["logs", "chat"]):
        assert run(words) == 7
        assert f"there is no service in {root}/chat" in capsys.readouterr().err


def test_a_pending_or_damaged_one_has_not_been_stopped(root: Path) -> None:
    directory = launched(root, "chat", running=True)
    directory.forget_head()
    assert not directory.stopped()
    (directory.path / "pilots.json").write_text("{")
    assert not directory.stopped()
    directory.forget_pilots()
    assert not directory.stopped()


def test_a_launch_without_a_site_file_says_how_to_get_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("FLEXSLURM_SITE", raising=False)
    assert run(["launch", "service.yaml"]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "--site" in told and "FLEXSLURM_SITE" in told and "flexslurm site discover" in told
