"""What a test left behind: processes, threads, descriptors, shared memory; never ends anything.

Processes are recognised by a token in their environment, so that an orphan that has left our
process tree (a daemon, a Slurm step) is found too, and other people's processes are not.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path

import psutil

TOKEN_VARIABLE = "FLEXSLURM_TEST_SESSION"
SHM = Path("/dev/shm")

# Helpers that CPython and libraries keep for the life of the process, by design.
_LASTING_PROCESSES = ("multiprocessing.resource_tracker",)
_LASTING_THREADS = ("tqdm_monitor",)
# Descriptors of libraries: shared objects, their data files, and the null and random devices.
_LASTING_FILES = ("/dev/", "/proc/", "/sys/", "/usr/", "/lib")


@dataclass(frozen=True)
class Snapshot:
    """What there was at one moment."""

    processes: frozenset[tuple[int, float, str]]
    threads: frozenset[tuple[int, str]]
    descriptors: frozenset[tuple[int, str]]
    shared_memory: frozenset[str]


def take(token: str) -> Snapshot:
    """Look around; `token` is the value of TOKEN_VARIABLE that our processes carry."""
    resource_tracker.ensure_running()  # it lasts, with a pipe: it must not count as new later
    return Snapshot(
        frozenset(_processes(token)),
        frozenset(
            (thread.ident or 0, thread.name)
            for thread in threading.enumerate()
            if not thread.name.startswith(_LASTING_THREADS)
        ),
        frozenset(_descriptors()),
        frozenset(entry.name for entry in SHM.iterdir()) if SHM.is_dir() else frozenset(),
    )


def left_since(before: Snapshot, token: str, within_s: float = 100.0) -> list[str]:
    """One line per thing that is new since `before` and still there after `within_s`."""
    return _settle(lambda: _new(before, take(token)), within_s)


def _settle(look: Callable[[], list[str]], within_s: float) -> list[str]:
    deadline = time.monotonic() + within_s
    while True:
        found = look()
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


def _new(before: Snapshot, after: Snapshot) -> list[str]:
    lines = [f"process {pid}: {what}" for pid, _, what in after.processes - before.processes]
    lines += [f"thread {name}" for _, name in after.threads - before.threads]
    lines += [f"descriptor {fd}: {what}" for fd, what in after.descriptors - before.descriptors]
    shm = after.shared_memory - before.shared_memory
    lines += [f"shared memory {name}" for name in shm if not held_by_others(name)]
    return sorted(lines)


def _processes(token: str) -> list[tuple[int, float, str]]:
    found = []
    family = _family()
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        try:
            ours = process.pid in family or process.environ().get(TOKEN_VARIABLE) == token
            if not ours or process.status() == psutil.STATUS_ZOMBIE:
                continue
            command = " ".join(process.cmdline()) or process.name()
            if not any(lasting in command for lasting in _LASTING_PROCESSES):
                found.append((process.pid, process.create_time(), command[:200]))
        except psutil.Error:
            continue
    return found


def _family() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def _descriptors() -> list[tuple[int, str]]:
    """But for copies of standard error: DeepSpeed keeps one from when it is first imported."""
    found = []
    standard_error = os.fstat(2)
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = str(entry.readlink())
            if os.path.samestat(os.fstat(int(entry.name)), standard_error):
                continue
        except OSError:
            continue
        if not target.startswith(_LASTING_FILES) and "site-packages" not in target:
            found.append((int(entry.name), target))
    return found


def held_by_others(name: str) -> bool:
    """Whether a live process that is not of this session maps or holds a shared-memory file.

    So it is with one that is gone by now: nobody has left it.
    """
    path = str(SHM / name)
    token = os.environ.get(TOKEN_VARIABLE)
    family = {os.getpid(), *_family()}
    for process in psutil.process_iter():
        try:
            if process.pid in family or process.environ().get(TOKEN_VARIABLE) == token:
                continue
            if _holds(Path("/proc") / str(process.pid), path):
                return True
        except (psutil.Error, OSError):
            continue
    return not Path(path).exists()


def _holds(process: Path, path: str) -> bool:
    """It is open before it is mapped."""
    for fd in (process / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if str(fd.readlink()) == path:
                return True
    return path in (process / "maps").read_text()
