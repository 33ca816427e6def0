"""The journal: what was acknowledged is read back, torn tails are cut, and it does not grow."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexslurm.control.restore import Memory
from flexslurm.errors import ServiceError
from flexslurm.wire.journal import Journal, read_journal

records = st.lists(
    st.dictionaries(st.text(max_size=8), st.integers() | st.text(max_size=20), max_size=4),
    min_size=1,
    max_size=6,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("journal")


def write(path: Path, items: list[dict[str, object]]) -> None:
    path.unlink(missing_ok=True)
    journal = Journal(path)
    journal.open()
    for item in items:
        journal.append(item, sync=False)
    journal.close()


@given(items=records, data=st.data())
@settings(max_examples=60, deadline=None)
def test_torn_at_any_byte_keeps_every_whole_record(
    folder: Path, items: list[dict[str, object]], data: st.DataObject
) -> None:
    path = folder / "torn"
    write(path, items)
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut])
    kept = whole[:cut].count(b"\n")
    assert read_journal(path)[0] == items[:kept]
    again = Journal(path)
    again.open()
    again.append({"after": 1})
    again.close()
    assert read_journal(path)[0] == [*items[:kept], {"after": 1}]


def test_damage_before_the_end_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "j"
    write(path, [{"a": 1}, {"b": 2}, {"c": 3}])
    lines = path.read_bytes().split(b"\n")
    lines[1] = lines[1].replace(b"2", b"5")
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(ServiceError, match=":2: the journal is damaged"):
        read_journal(path)


def test_a_missing_journal_is_empty(tmp_path: Path) -> None:
    assert read_journal(tmp_path / "none") == ([], 0)


def test_a_failed_write_leaves_no_half_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "j"
    journal = Journal(path)
    journal.open()
    journal.append({"first": 1})

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("flexslurm.wire.journal.os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        journal.append({"lost": 2})
    monkeypatch.undo()
    journal.append({"second": 3})
    journal.close()
    assert read_journal(path)[0] == [{"first": 1}, {"second": 3}]


# ------------------------------------------------------------------------ what is remembered

FRAGMENTS = ("a-1", "a-2", "b-1")
events = st.one_of(
    st.builds(lambda e: {"event": "epoch", "epoch": e}, st.integers(1, 50)),
    st.builds(
        lambda f, c: {"event": "cordon", "fragment": f, "cordon": c},
        st.sampled_from(FRAGMENTS),
        st.booleans(),
    ),
    st.builds(lambda s: {"event": "accepted", "seq": s, "prompt": 3}, st.sampled_from("xyz")),
    st.builds(lambda s: {"event": "ended", "seq": s}, st.sampled_from("xyz")),
    st.builds(lambda all_end: {"event": "stopped", "pilots_end": all_end}, st.booleans()),
)


def known(memory: Memory) -> tuple[object, ...]:
    return memory.epoch, memory.cordoned, dict(memory.open_requests)


@given(items=st.lists(events, max_size=30), restarts=st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_a_restart_and_a_shorter_journal_change_nothing_that_is_remembered(
    folder: Path, items: list[dict[str, object]], restarts: int
) -> None:
    path = folder / "kept"
    write(path, items)
    plain = Memory()
    for item in items:
        plain.take(item)
    for _ in range(restarts):
        memory = Memory()
        journal = Journal(path, memory)
        journal.open()
        journal.close()
        assert known(memory) == known(plain)


def test_requests_that_have_ended_leave_the_journal_while_it_is_written(tmp_path: Path) -> None:
    path, memory = tmp_path / "j", Memory()
    journal = Journal(path, memory, most_bytes=10_000)
    journal.open()
    journal.append({"event": "epoch", "epoch": 7})
    journal.append({"event": "accepted", "seq": "open", "prompt": 1})
    for number in range(2000):
        for event in ("accepted", "ended"):
            journal.append({"event": event, "seq": str(number)}, sync=False)
        assert path.stat().st_size < 11_000
    journal.close()
    again = Memory()
    journal = Journal(path, again)
    journal.open()
    journal.close()
    assert again.epoch == 7 and list(again.open_requests) == ["open"]


def test_an_old_journal_of_many_requests_becomes_short(tmp_path: Path) -> None:
    path = tmp_path / "j"
    requests = [{"event": e, "seq": str(n)} for n in range(500) for e in ("accepted", "ended")]
    write(path, [{"event": "epoch", "epoch": 3}, *requests])
    journal = Journal(path, Memory())
    journal.open()
    journal.append({"event": "epoch", "epoch": 4})
    journal.close()
    assert len(read_journal(path)[0]) == 3


def test_a_journal_that_cannot_be_shortened_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    path, memory = tmp_path / "j", Memory()
    journal = Journal(path, memory, most_bytes=100)
    journal.open()
    monkeypatch.setattr("flexslurm.wire.journal.write_atomically", full)
    for number in range(10):
        journal.append({"event": "epoch", "epoch": number})
    journal.close()
    assert len(read_journal(path)[0]) == 10
    assert "cannot shorten the journal" in caplog.text


def test_decisions_that_are_kept_have_a_bound() -> None:
    memory = Memory()
    for epoch in range(10_000):
        memory.take({"event": "epoch", "epoch": epoch})
    assert len(list(memory.records())) < 300
    assert memory.epoch == 9999


def test_what_could_not_be_written_is_not_written_later(tmp_path: Path) -> None:
    """A full disk that gets room again before the file is closed."""
    path = tmp_path / "j"
    journal = Journal(path)
    journal.open()
    journal.append({"first": 1})
    size = path.stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 5, before[1]))
    try:
        with pytest.raises(OSError, match=r"No space left|File too large"):
            journal.append({"lost": "x" * 100})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.stat().st_size == size
    journal.append({"second": 3})
    journal.close()
    assert read_journal(path)[0] == [{"first": 1}, {"second": 3}]
