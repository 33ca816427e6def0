"""Blocked signals are waited for: what comes is told, and nothing else, whatever comes between."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from flexslurm.slurm.awaited import next_signal

OURS = (signal.SIGUSR1, signal.SIGUSR2)
STOPPED = """\
import os, signal, subprocess, sys
from flexslurm.slurm.awaited import next_signal
ours = {signal.SIGUSR1, signal.SIGUSR2}
signal.pthread_sigmask(signal.SIG_BLOCK, ours)
me = os.getpid()
os.kill(me, signal.SIGUSR1)
assert next_signal(ours, 60) is signal.SIGUSR1
subprocess.Popen(["sh", "-c", f"sleep 0.2; kill -STOP {me}; sleep 0.5; kill -CONT {me}; echo on"])
print([next_signal(ours, 0.5) for _ in range(2)])
"""


@pytest.fixture(autouse=True)
def _blocked() -> object:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, OURS)
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_what_came_before_is_told_one_by_one() -> None:
    for number in OURS:
        signal.raise_signal(number)
    assert {next_signal(OURS, 60.0), next_signal(OURS, 60.0)} == set(OURS)
    assert next_signal(OURS, 0.0) is None


def test_only_what_is_asked_for_is_taken() -> None:
    signal.raise_signal(signal.SIGUSR2)
    assert next_signal([signal.SIGUSR1], 0.05) is None
    assert next_signal([signal.SIGUSR2], 60.0) is signal.SIGUSR2


def test_it_waits_as_long_as_it_is_told() -> None:
    began = time.monotonic()
    assert next_signal(OURS, 0.2) is None
    assert time.monotonic() - began >= 0.2


def test_a_process_that_was_stopped_hears_of_nothing_that_did_not_come() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STOPPED], capture_output=True, text=True, timeout=200, check=True
    )
    assert "[None, None]" in done.stdout
