"""What the measuring commands write is what the planner reads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexslurm.planner.links import LinkRow, read_links, write_links
from flexslurm.planner.profiles import Row, _parse, read_profile, write_profile

_words = st.text(st.sampled_from("abcxyz019.-_/+"), min_size=1, max_size=20)
_counts = st.integers(1, 10**6)
_seconds = st.floats(1e-9, 1e6)
_rows = st.one_of(
    st.builds(Row, st.just("decode"), _counts, _counts, st.integers(0, 10**6), _seconds),
    st.builds(Row, st.just("prefill"), _counts, _counts, _counts, _seconds),
    st.builds(
        Row,
        st.sampled_from(["step", "first", "last", "head"]),
        _counts,
        _counts,
        st.just(0),
        _seconds,
    ),
    st.builds(Row, st.just("load"), _counts, st.just(0), st.just(0), _seconds),
)
_abouts = st.fixed_dictionaries(
    {"model": _words, "gpu_type": _words, "tp": st.integers(1, 64), "dtype": _words}
)


@given(_abouts, st.lists(_rows, max_size=30))
def test_profile_rows_come_back(about: dict[str, object], rows: list[Row]) -> None:
    found_about, found = _parse(write_profile(about, rows), "p.csv")
    assert found_about == {key: str(value) for key, value in about.items()}
    assert [row[:4] for row in found] == [row[:4] for row in rows]
    assert [row.seconds for row in found] == pytest.approx([row.seconds for row in rows], rel=1e-8)


@given(_abouts, st.lists(_rows, max_size=20), _seconds, _seconds)
def test_any_profile_gives_times_that_never_fall(
    about: dict[str, object], rows: list[Row], one: float, two: float
) -> None:
    rows = [*rows, Row("decode", 1, 1, 8, one), Row("decode", 1, 4, 8, two)]
    profile = read_profile(write_profile(about, rows), "p.csv")
    assert profile.kind == (about["gpu_type"], about["tp"])
    times = [profile.layer_s(new, new * 8, new * 8, new) for new in (1, 2, 4, 16, 64)]
    assert times == sorted(times) and times[0] >= 0


_names = st.text(
    st.characters(codec="ascii", min_codepoint=33, max_codepoint=126), min_size=1
).filter(lambda name: not name.startswith("#"))


@given(
    st.lists(st.builds(LinkRow, _names, _names, _counts, _seconds), max_size=20),
    st.text(st.characters(codec="ascii"), max_size=40),
)
def test_links_come_back(rows: list[LinkRow], about: str) -> None:
    rows = [*rows, LinkRow("a", "b", 1, 1e-6), LinkRow("a", "b", 2, 1e-6)]
    found = read_links(write_links(rows, about), "links.csv")
    assert [row[:3] for row in found] == [row[:3] for row in rows]
    assert [row.seconds for row in found] == pytest.approx([row.seconds for row in rows], rel=1e-8)
