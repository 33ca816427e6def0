"""Process groups of an epoch: they form over the head, work, and end, whatever a peer does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.engine_head import EngineHead

Said = list[dict[str, Any]]
Run = Callable[..., Said]


@pytest.fixture
def head(tmp_path: Path) -> Iterator[EngineHead]:
    head = EngineHead(tmp_path)
    for epoch in (1, 2):
        head.open(epoch)
    yield head
    head.close()


@pytest.fixture
def run(head: EngineHead, root: Path) -> Run:
    def run_case(case: str, size: int = 3) -> Said:
        command = [sys.executable, "-m", "tests.cluster.engine_members"]
        arguments = [case, str(size), head.endpoint, str(head.keys_path)]
        done = subprocess.run(
            [*command, *arguments],
            cwd=root,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        assert lines, done.stderr
        return lines

    return run_case


def by_rank(said: Said, what: str) -> dict[int, dict[str, Any]]:
    return {line["rank"]: line for line in said if line["what"] == what}


def test_two_epochs_side_by_side_work_and_leave_nothing(run: Run) -> None:
    said = run("works")
    sums, closed, both = (by_rank(said, what) for what in ("sums", "closed", "closed both"))
    assert set(sums) == set(closed) == set(both) == {0, 1, 2}
    for rank in range(3):
        assert (sums[rank]["first"], sums[rank]["second"]) == (3.0, 3.0)
        assert sums[rank]["received"] == (rank - 1) % 3
        assert (sums[rank]["group_rank"], sums[rank]["group_size"]) == (rank, 3)
        assert closed[rank]["left"] == [] and closed[rank]["second"] == 3.0
        assert both[rank]["left"] == [] and both[rank]["ports"] == 0


def test_killed_peer_ends_an_all_reduce(run: Run) -> None:
    said = run("killed_in_all_reduce")
    waited, closed = by_rank(said, "all-reduce"), by_rank(said, "close")
    assert set(waited) == set(closed) == {0, 1}
    assert all(line["outcome"] == "RuntimeError" and line["s"] < 1.3 for line in waited.values())
    assert all(line["outcome"] == "done" and line["s"] < 1.0 for line in closed.values())


def test_killed_peer_ends_a_receive_and_the_news_spreads(run: Run) -> None:
    waited = by_rank(run("killed_in_recv"), "recv")
    assert set(waited) == {0, 1}
    assert all(line["outcome"] == "RuntimeError" and line["s"] < 1.3 for line in waited.values())


def test_abort_ends_an_all_reduce_with_a_peer_that_hangs(run: Run) -> None:
    said = run("stopped_in_all_reduce")
    waited, again, closed = (by_rank(said, what) for what in ("all-reduce", "again", "closed"))
    assert set(waited) == {0, 1}
    assert all(line["outcome"] == "RuntimeError" and line["s"] < 1.5 for line in waited.values())
    assert all(line["outcome"] == "RuntimeError" and line["s"] < 0.5 for line in again.values())
    assert all(line["left"] == [] and line["s"] < 1.0 for line in closed.values())


def test_forming_is_called_back_when_a_member_never_comes(run: Run) -> None:
    said = run("cancelled_while_forming")
    formed, waited, other = (by_rank(said, what) for what in ("form", "wait", "other epoch"))
    assert set(formed) == {0, 1}
    assert all(line["outcome"] == "StaleEpoch" and line["s"] < 1.5 for line in formed.values())
    assert all(line["outcome"] == "StaleEpoch" for line in waited.values())
    assert all(line["outcome"] == "DeadlineExceeded" for line in other.values())
