"""A demo on local processes that a signal ends leaves no process and no file."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from ended_demo import end_demo

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("submitted a100-1", signal.SIGTERM),  # its launch has submitted a part
        ("without disturbance", signal.SIGHUP),  # streams are about to run
        ("is told to leave", signal.SIGTERM),  # the shift in the middle of them
    ],
)
def test_nothing_is_left(moment: str, number: signal.Signals, tiny_model: Path) -> None:
    end_demo(tiny_model, moment, number, "--local")
