"""The census of a service finds what it is for: one that cannot fail would be worth nothing."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import shared_memory
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import leaks

from tests.service_census import Census, ports_left

TOKEN = os.environ[leaks.TOKEN_VARIABLE]
GROWS = """
import os, sys, threading
sys.stdout.write("small\\n"); sys.stdout.flush(); sys.stdin.readline()
for _ in range(int(sys.argv[1])):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
kept = [os.pipe() for _ in range(int(sys.argv[2]))]
sys.stdout.write("grown\\n"); sys.stdout.flush(); sys.stdin.readline()
"""


class Grower:
    """A process that has more threads and pipes once it is told."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process, self.pid = process, process.pid
        self._hear()

    def _hear(self) -> None:
        assert self._process.stdout is not None and self._process.stdout.readline()

    def grow(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        self._hear()


@contextmanager
def grower(threads: int, pipes: int) -> Iterator[Grower]:
    command = [sys.executable, "-c", GROWS, str(threads), str(pipes)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield Grower(process)
        finally:
            process.kill()


def service(*parts: int) -> Any:
    """One whose head and agents are these processes."""
    return SimpleNamespace(processes=lambda text: iter(parts), directory=Path("/none"))


def status(*workers: int) -> Any:
    gpus = [SimpleNamespace(pid=pid) for pid in workers]
    return SimpleNamespace(fragments=[SimpleNamespace(gpus=gpus)])


def test_a_process_of_no_living_part_is_left() -> None:
    before = leaks.take(TOKEN)
    with grower(0, 0) as one, grower(0, 0) as stray:
        found = Census(service(one.pid), before).left(status())
    assert len(found) == 1 and found[0].startswith(f"process {stray.pid}: ")
    assert Census(service(), before).left(status()) == []


def test_shared_memory_is_left() -> None:
    census = Census(service(), leaks.take(TOKEN))
    memory = shared_memory.SharedMemory(create=True, size=64)
    try:
        assert census.left(status()) == [f"shared memory {memory.name.lstrip('/')}"]
    finally:
        memory.unlink()  # first, so that it is never there without a holder
        memory.close()
    assert census.left(status()) == []


def test_threads_and_descriptors_beyond_the_bound_are_left() -> None:
    census = Census(service(), leaks.take(TOKEN))
    with grower(5, 4) as one:
        census.begin(status(one.pid))
        assert census.too_much(status(one.pid), 0, 0) == []
        one.grow()
        threads, descriptors = census.too_much(status(one.pid), 4, 7)
        assert "threads" in threads and "descriptors" in descriptors
        assert census.too_much(status(one.pid), 5, 8) == []
    assert census.too_much(status(one.pid), 5, 8), "a worker that is gone is no clean one"


def test_more_ports_than_the_gear_explains_are_left() -> None:
    assert ports_left("no worker", 0, grouped=False) == []
    before = len(ports_left("here", os.getpid(), grouped=True))
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(6)]
    try:
        assert ports_left("here", os.getpid(), grouped=False)
        assert ports_left("here", os.getpid(), grouped=True)
    finally:
        for one in sockets:
            one.close()
    assert len(ports_left("here", os.getpid(), grouped=True)) == before == 0
