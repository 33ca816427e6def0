"""The journal: what was acknowledged is read back, torn tails are cut, other damage is told."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
