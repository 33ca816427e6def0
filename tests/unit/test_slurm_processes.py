"""Processes by identity: only what is meant is found and ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from flexslurm.slurm import processes
from flexslurm.slurm.processes import Process

SLEEP = "import time; time.sleep(60)"
STUBBORN = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); " + SLEEP
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-ISc', {SLEEP!r}])"


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    children: list[subprocess.Popen[bytes]] = []
    yield children
    for child in children:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


def start(started: list[subprocess.Popen[bytes]], code: str) -> Process:
    child = subprocess.Popen(
        [sys.executable, "-ISc", code], env={"MARK": "x=y"}, stdout=subprocess.PIPE
    )
    started.append(child)
    found = processes.look(child.pid)
    assert found is not None
    return found


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 200
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_process_is_what_it_was(started: list[subprocess.Popen[bytes]]) -> None:
    found = start(started, SLEEP)
    assert found.parent == os.getpid() and processes.alive(*found.identity)
    assert not processes.alive(found.pid, found.start_ticks + 1)
    until(lambda: processes.environ(found.pid).get("MARK") == "x=y")
    assert found.identity in {
        process.identity for process in processes.everything()
    }  # its state may change
    assert processes.ancestors(found.pid) >= {found.pid, os.getpid(), os.getppid()}


def test_a_zombie_is_not_alive(started: list[subprocess.Popen[bytes]]) -> None:
    found = start(started, SLEEP)
    os.kill(found.pid, signal.SIGKILL)
    os.waitid(os.P_PID, found.pid, os.WEXITED | os.WNOWAIT)
    assert processes.look(found.pid) is None and processes.environ(found.pid) == {}


def test_ending_goes_from_term_to_kill(started: list[subprocess.Popen[bytes]]) -> None:
    gentle, stubborn = start(started, SLEEP), start(started, STUBBORN)
    assert started[1].stdout is not None
    started[1].stdout.readline()

    def find() -> list[Process]:
        return [p for p in (gentle, stubborn) if processes.alive(*p.identity)]

    assert processes.end_all(find, term_s=0.3, kill_s=10) == []
    assert [child.wait() for child in started] == [-signal.SIGTERM, -signal.SIGKILL]


def test_descendants_are_found(started: list[subprocess.Popen[bytes]]) -> None:
    parent = start(started, PARENT)
    found: list[Process] = []

    def both() -> bool:
        nonlocal found
        found = processes.with_descendants([parent], processes.everything())
        return len(found) == 2

    until(both)
    assert {p.parent for p in found} == {os.getpid(), parent.pid}
    processes.send(found[1], signal.SIGKILL)


def test_another_process_with_the_same_pid_is_left_alone(
    started: list[subprocess.Popen[bytes]],
) -> None:
    found = start(started, SLEEP)
    processes.send(Process(found.pid, found.start_ticks - 1, 1, "S", "x"), signal.SIGKILL)
    assert processes.alive(*found.identity)
