"""The arithmetic under transfers: rates, what is still missing, faults by name."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexslurm.engine import faults
from flexslurm.engine.rate import Bucket, piece_bytes
from flexslurm.engine.spans import Spans
from flexslurm.engine.transfer_server import Links
from flexslurm.errors import EnvironmentFault


def test_a_bucket_gives_a_links_time() -> None:
    bucket = Bucket(100.0)
    assert bucket.wait_s(50, 10.0) == 0.5
    assert bucket.wait_s(50, 10.2) == pytest.approx(0.8)  # behind the first, on the same link
    assert bucket.wait_s(10, 11.02) == pytest.approx(0.08)  # a little late: made good
    assert bucket.wait_s(10, 20.0) == pytest.approx(0.1)  # idle time is not saved up


@given(st.lists(st.integers(1, 1000), min_size=1), st.lists(st.floats(0, 5)))
def test_a_bucket_is_never_faster_than_its_rate(sizes: list[int], pauses: list[float]) -> None:
    bucket, now, sent, began = Bucket(100.0), 0.0, 0, 0.0
    for number, size in enumerate(sizes):
        now += pauses[number] if number < len(pauses) else 0.0
        now += bucket.wait_s(size, now)
        sent += size
        assert now - began >= sent / 100.0 - 0.05 * (1 + number)


def test_slow_links_are_used_evenly() -> None:
    assert piece_bytes(0.0, 4 << 20, 1 << 20) == 1 << 20
    assert piece_bytes(10e9, 4 << 20, 1 << 20) == 4 << 20
    assert piece_bytes(10e6, 4 << 20, 1 << 20) == 200_000
    assert piece_bytes(1e3, 4 << 20, 1 << 20) == 32 << 10


small = st.tuples(st.integers(0, 40), st.integers(0, 40))


@given(st.lists(st.tuples(st.booleans(), small)), small)
def test_spans_agree_with_sets(
    steps: list[tuple[bool, tuple[int, int]]], ask: tuple[int, int]
) -> None:
    spans, model = Spans(), set[int]()
    for add, (start, stop) in steps:
        if add:
            spans.add(start, stop)
            model |= set(range(start, stop))
        else:
            spans.remove(start, stop)
            model -= set(range(start, stop))
        found = [n for lo, hi in spans for n in range(lo, hi)]
        assert found == sorted(model)
        assert spans.total == len(model)
        assert bool(spans) == bool(model)
        assert Spans.are_proper(tuple(spans), 40)
        assert all(a[1] < b[0] for a, b in zip(list(spans), list(spans)[1:], strict=False))
    met = {n for lo, hi in spans.meet(*ask) for n in range(lo, hi)}
    assert met == model & set(range(*ask))


@pytest.mark.parametrize(
    "ranges", [((3, 3),), ((5, 4),), ((0, 5), (4, 6)), ((4, 6), (0, 2)), ((0, 11),), ((-1, 2),)]
)
def test_spans_that_are_not_proper(ranges: tuple[tuple[int, int], ...]) -> None:
    assert not Spans.are_proper(ranges, 10)


def test_faults_by_name() -> None:
    try:
        faults.arm("transfer.chunk:2:raise, transfer.corrupt:3+:spoil")
        seen = []
        for _ in range(4):
            try:
                seen.append(faults.reach(faults.Point.CHUNK))
            except faults.InjectedFault:
                seen.append("raised")
        assert seen == [False, "raised", False, False]
        assert [faults.reach(faults.Point.CORRUPT) for _ in range(5)] == [False] * 2 + [True] * 3
        wrong = (
            "nowhere:1:raise",
            "step:x:raise",
            "step:1:sing",
            "step",
            "step:1:kill",
            "step:1:stop=0",
            "step@x:1:hang",
        )
        for text in wrong:
            with pytest.raises(EnvironmentFault, match="cannot read"):
                faults.arm(text)
    finally:
        faults.arm("")


def test_faults_from_a_file_that_changes(tmp_path: Path) -> None:
    file = tmp_path / "faults"
    victim = subprocess.Popen(["sleep", "60"])
    try:
        faults.arm(f"@{file}")
        assert not faults.reach(faults.Point.STEP)
        file.write_text(f"step@1:1:raise, step:2:full, retire:1:kill={victim.pid}")
        assert not faults.reach(faults.Point.STEP)
        with pytest.raises(OSError, match="injected at step"):
            faults.reach(faults.Point.STEP)
        faults.reach(faults.Point.RETIRE)
        assert victim.wait(60) == -signal.SIGKILL
        me, kill = os.getpid(), f"retire:1:kill={victim.pid}"
        done = (tmp_path / "faults.done").read_text().splitlines()
        assert done == [f"{me} step:2:full", f"{me} {kill}"]
        file.unlink()
        assert not any(faults.reach(faults.Point.STEP) for _ in range(3))
    finally:
        faults.arm("")
        victim.kill()
        victim.wait(60)


def test_the_page_of_faults_has_them_all(root: Path) -> None:
    page = (root / "docs" / "faults.md").read_text()
    for point in faults.Point:
        assert f"`{point}`" in page
    for deed in faults.Deed:
        assert f"| `{deed}" in page


def test_a_link_that_rests_is_free_later() -> None:
    bucket = Bucket(100.0)
    assert bucket.wait_s(10, 0.0) == pytest.approx(0.1)
    bucket.rest(0.5, 0.1)
    assert bucket.wait_s(10, 0.1) == pytest.approx(0.6), "the rest, and its own bytes"
    assert bucket.wait_s(10, 5.0) == pytest.approx(0.1), "what is past is not waited for"


@pytest.mark.parametrize(("rest", "waits_s"), [(3.0, 600.0), (0.0, 0.0)])
def test_whoever_sends_beside_steps_on_its_processors_rests(rest: float, waits_s: float) -> None:
    links = Links(rest)
    links.worked(1e12, 200.0)
    assert links.wait_s(1e12, 1) == pytest.approx(waits_s, abs=60.0)
    links.worked(0.0, 200.0)
    assert links.wait_s(0.0, 1) == 0.0, "what is in a hurry never does"
