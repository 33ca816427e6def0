"""A demo on a private Slurm that a signal ends leaves no process, no daemon and no file."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from ended_demo import end_demo

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("moment", "number"),
    [("submitted a100-1", signal.SIGINT), ("Slurm preempts", signal.SIGTERM)],
)
def test_nothing_is_left(moment: str, number: signal.Signals, tiny_model: Path) -> None:
    told = end_demo(tiny_model, moment, number)
    assert "the cluster is up (slurm)" in told
