"""Whatever Slurm prints: node lists round-trip, and no text ends in a traceback."""

from __future__ import annotations

import contextlib

from hypothesis import given
from hypothesis import strategies as st

from flexslurm.errors import FlexslurmError
from flexslurm.slurm.gres import parse_gres
from flexslurm.slurm.jobids import parse_job_id, submitted_id
from flexslurm.slurm.jobs import FIELDS, SEPARATOR, job_info, split_rows
from flexslurm.slurm.nodelist import compress, expand, expand_counts
from flexslurm.slurm.reasons import reason_in_words
from flexslurm.slurm.records import parse_records, parse_settings
from flexslurm.slurm.states import JobState, job_state, node_state
from flexslurm.slurm.times import format_duration, parse_duration, parse_time

stems = st.from_regex(r"\A[a-z][a-z0-9.-]{0,6}[a-z-]\Z")
digits = st.from_regex(r"\A[0-9]{0,5}\Z")
names = st.builds("{}{}".format, stems, digits)
runs = st.builds(
    lambda stem, first, count, width: [f"{stem}{n:0{width}d}" for n in range(first, first + count)],
    stems,
    st.integers(0, 2000),
    st.integers(1, 30),
    st.integers(1, 5),
)
node_sets = st.lists(st.one_of(names.map(lambda name: [name]), runs), max_size=8).map(
    lambda groups: list(dict.fromkeys(name for group in groups for name in group))
)
slurmish = st.text(alphabet="abgpnu019[]()-,:=/;+_*~#%@^$! \t.IDXNS\n", max_size=60)
anything = st.one_of(slurmish, st.text(max_size=60))


@given(node_sets)
def test_node_lists_round_trip(nodes: list[str]) -> None:
    try:
        text = compress(nodes)
    except FlexslurmError:
        assert len(nodes) == 1  # a lone name that is one of Slurm's words for nothing
        return
    assert expand(text) == nodes


@given(st.integers(0, 300), st.integers(1, 3000), st.integers(1, 5))
def test_a_run_becomes_one_range(first: int, count: int, width: int) -> None:
    nodes = [f"n{number:0{width}d}" for number in range(first, first + count)]
    text = compress(nodes)
    assert expand(text) == nodes
    assert text.count(",") == 0


@given(st.integers(1, 10**9))
def test_durations_round_trip_to_the_minute(seconds: int) -> None:
    read = parse_duration(format_duration(seconds))
    assert read is None or seconds <= read < seconds + 60 or read == 60


@given(anything)
def test_no_text_ends_in_a_traceback(text: str) -> None:
    for read in (expand, expand_counts, parse_gres, parse_job_id, submitted_id, parse_duration):
        with contextlib.suppress(FlexslurmError):
            read(text)
    assert isinstance(job_state(text), JobState)
    assert isinstance(node_state(text).base, str)
    assert isinstance(reason_in_words(text), str)
    parse_time(text)
    parse_settings(text)
    parse_records(f"JobId=1 {text}\n{text}", "JobId")


@given(st.lists(anything, min_size=len(FIELDS), max_size=len(FIELDS)))
def test_no_row_ends_in_a_traceback(cells: list[str]) -> None:
    row = dict(zip((name for name, _ in FIELDS), cells, strict=True))
    info = job_info(row, now=1.8e9, grace_s={})
    assert not info.state.over or info.state.value in JobState.__members__


@given(st.lists(st.text(st.characters(exclude_characters=SEPARATOR + "\n"), max_size=20)))
def test_rows_of_another_form_are_left_out(lines: list[str]) -> None:
    good = SEPARATOR.join(["7"] * len(FIELDS)) + SEPARATOR
    rows = split_rows("\n".join([*lines, good, *lines]))
    assert [row["jobid"] for row in rows] == ["7"]


@given(anything)
def test_a_state_never_heard_of_is_unknown(text: str) -> None:
    state = job_state(f"X{text.strip()}")
    assert state is JobState.UNKNOWN and not state.over and not state.active
