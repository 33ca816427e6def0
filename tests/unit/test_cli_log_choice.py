"""Which logs are meant: those of the jobs there are now, by every name that the list shows."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flexslurm.cli.log_choice import LogFile, age, choose, listing
from flexslurm.cli.log_files import log_files
from flexslurm.cli.main import run
from flexslurm.errors import ServiceError
from flexslurm.slurm.script import log_pattern
from flexslurm.wire.service_dir import Pilot, Pilots, ServiceDir

NAMES = {
    "head/chat.head.3.batch.log": 10.0,
    "head/chat.head.9.batch.log": 50.0,
    "a100-1/chat.a100-1.1.batch.log": 11.0,
    "a100-1/chat.a100-1.1.n1.log": 12.0,
    "a100-1/1.n1/worker-0-w-aa.log": 13.0,
    "a100-1/chat.a100-1.7.n2.log": 52.0,
    "a100-1/7.n2/nursery.log": 53.0,
    "a100-1/7.n2/worker-0-w-bb.log": 54.0,
    "a100-1/7.n2/worker-1-w-cc.log": 55.0,
    "a100-2/chat.a100-2.local-4.chat.a100-2-0.log": 56.0,
    "a100-2/local-4.chat.a100-2-0/worker-0-w-dd.log": 57.0,
    "urgent.log": 5.0,
}
FILES = [LogFile(name, 1, at) for name, at in NAMES.items()]
NOW = frozenset({"9", "7", "local-4"})


def names(part: str, jobs: frozenset[str] = NOW) -> set[str]:
    return {file.name for file in choose(FILES, part, jobs)}


def test_the_job_is_read_out_of_the_name() -> None:
    jobs = [file.job for file in FILES]
    assert jobs == ["3", "9", "1", "1", "1", "7", "7", "7", "7", "local-4", "local-4", None]


@pytest.mark.parametrize("service", ["chat", "head", "a100-1", "x.3", "head.3", "7"])
@pytest.mark.parametrize("part", ["head", "a100-1"])
@pytest.mark.parametrize("job", ["7", "local-4"])
def test_the_job_is_found_whatever_the_service_is_called(service: str, part: str, job: str) -> None:
    pattern = log_pattern(Path(part), f"{service}.{part}", "%j.%n")
    node = f"{service}.{part}-0" if job.startswith("local-") else "a1003"
    name = pattern.replace("%j", job).replace("%n", node)
    assert LogFile(name, 0, 0.0).job == job


def test_a_part_is_its_job_of_now_and_not_its_workers() -> None:
    assert names("head") == {"head/chat.head.9.batch.log"}
    assert names("a100-1") == {"a100-1/chat.a100-1.7.n2.log"}


def test_where_no_job_is_there_the_latest_is_meant() -> None:
    assert names("head", frozenset()) == {"head/chat.head.9.batch.log"}
    assert names("a100-1", frozenset({"3"})) == {"a100-1/chat.a100-1.7.n2.log"}


def test_a_job_a_directory_and_a_worker_are_parts_too() -> None:
    assert names("1") == {name for name in NAMES if "a100-1.1." in name or "/1.n1/" in name}
    assert names("a100-1/7.n2") == {name for name in NAMES if "/7.n2/" in name}
    assert names("w-bb") == names("worker-0-w-bb") == {"a100-1/7.n2/worker-0-w-bb.log"}


@pytest.mark.parametrize("name", NAMES)
def test_whatever_is_listed_can_be_asked_for(name: str) -> None:
    assert any(line.endswith(f"  {name}") for line in listing(FILES, NOW, 60.0))
    assert names(name) == {name}


def test_a_slip_is_told_the_nearest_name() -> None:
    with pytest.raises(ServiceError) as near:
        names("a100-11")
    assert "did you mean 'a100-1" in (near.value.hint or "")
    with pytest.raises(ServiceError) as far:
        names("zzzzzzzzzzzzzz")
    assert far.value.hint == "there is: a100-1, a100-2, head, urgent.log"


def test_the_list_tells_now_from_earlier() -> None:
    lines = listing(FILES, NOW, 60.0)
    split = lines.index("of earlier jobs:")
    earlier = {line.split()[-1] for line in lines[split:] if ".log" in line and "  " in line}
    assert {name for name in earlier if "/" in name} == {
        name for name in NAMES if ".3." in name or "-1.1." in name or "/1.n1" in name
    }
    assert lines[0] == "head, job 9" and "10 s ago" in lines[1] and "1 B" in lines[1]
    stopped = listing(FILES, frozenset(), 60.0)
    assert "none of its jobs is there now" in stopped[0]
    assert listing([], NOW, 0.0) == ["no logs yet"]


def test_ages_are_short_and_never_negative() -> None:
    assert [age(s) for s in (-5.0, 59.9, 60.0, 7200.0, 200_000.0)] == [
        "0 s ago", "60 s ago", "1 min ago", "2 h ago", "2 d ago"
    ]  # fmt: skip


def test_the_command_shows_the_job_of_now(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = ServiceDir(tmp_path / "svc")
    directory.create()
    directory.service.write_text("name: chat\n")
    directory.write_pilots(Pilots("slurm", (Pilot("a100-1", "7", None, "a100", 1, 1),), "9"))
    for name, at in NAMES.items():
        path = directory.logs / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"of {name}\n")
        os.utime(path, (at, at))
    where = ["--service-dir", str(directory.path)]
    for part in ("head", "a100-1", "w-cc", "a100-1/7.n2/nursery.log", "urgent.log"):
        assert run(["logs", *where, part]) == 0
        (name,) = names(part)
        assert capsys.readouterr().out == f"of {name}\n"
    assert run(["logs", *where, "a100-1/7.n2"]) == 0
    assert capsys.readouterr().out.count("==> a100-1/7.n2/") == 3
    assert run(["logs", *where, "heed"]) == 7
    assert "did you mean 'head'?" in capsys.readouterr().err
    assert {file.name for file in log_files(directory.logs)} == set(NAMES)
    directory.write_pilots(Pilots("slurm"))
    assert run(["logs", *where]) == 0
    assert "none of its jobs is there now" in capsys.readouterr().out
