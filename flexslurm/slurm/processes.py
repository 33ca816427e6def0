"""Starting, finding and ending processes by identity through /proc; never kills by name.

A process is its pid and its start time in clock ticks: pids are used again, pairs are not.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Process:
    """One process of this machine, as it was when it was looked at."""

    pid: int
    start_ticks: int
    parent: int
    state: str
    name: str

    @property
    def identity(self) -> tuple[int, int]:
        return self.pid, self.start_ticks


def look(pid: int) -> Process | None:
    """The process with this pid now; None where there is none, or only its zombie."""
    try:
        text = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    head, _, tail = text.rpartition(")")
    fields = tail.split()
    if len(fields) < 20 or fields[0] in "ZX":
        return None
    name = head.partition("(")[2]
    return Process(pid, int(fields[19]), int(fields[1]), fields[0], name)


def alive(pid: int, start_ticks: int) -> bool:
    process = look(pid)
    return process is not None and process.start_ticks == start_ticks


def everything() -> list[Process]:
    found = (look(int(entry.name)) for entry in PROC.iterdir() if entry.name.isdigit())
    return [process for process in found if process is not None]


def environ(pid: int) -> dict[str, str]:
    """The environment a process was started with; empty where it may not be read."""
    try:
        raw = (PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return {}
    pairs = (item.partition(b"=") for item in raw.split(b"\0") if item)
    return {os.fsdecode(key): os.fsdecode(value) for key, _, value in pairs}


def with_descendants(roots: Iterable[Process], processes: Iterable[Process]) -> list[Process]:
    """`roots` and all that descend from them among `processes`."""
    children: defaultdict[int, list[Process]] = defaultdict(list)
    for process in processes:
        children[process.parent].append(process)
    found: dict[int, Process] = {}
    todo = list(roots)
    while todo:
        process = todo.pop()
        if process.pid not in found:
            found[process.pid] = process
            todo += children[process.pid]
    return list(found.values())


def ancestors(pid: int) -> set[int]:
    """The pids above and including `pid`."""
    above: set[int] = set()
    process = look(pid)
    while process is not None and process.pid not in above:
        above.add(process.pid)
        process = look(process.parent)
    return above


def send(process: Process, number: signal.Signals) -> None:
    """Signal exactly this process; one that has ended, or whose pid is another's, is left alone."""
    if alive(*process.identity):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, number)


def end_all(find: Callable[[], list[Process]], term_s: float, kill_s: float) -> list[Process]:
    """End what `find` finds: SIGTERM, SIGKILL after `term_s`, until nothing is found.

    `find` is asked again and again, since a process may start others while it ends, and until it
    finds nothing twice, since one that is just being started cannot be told yet. Returns what still
    lives after `term_s + kill_s`.
    """
    started = time.monotonic()
    told: set[tuple[int, int]] = set()
    empty = 0
    while True:
        left = find()
        waited = time.monotonic() - started
        empty = 0 if left else empty + 1
        if empty == 2 or waited > term_s + kill_s:
            return left
        for process in left:
            if waited >= term_s:
                send(process, signal.SIGKILL)
            elif process.identity not in told:
                told.add(process.identity)
                send(process, signal.SIGTERM)
        time.sleep(0.05)


def spawn_logged(command: Sequence[str], env: Mapping[str, str], log: Path) -> int:
    """Start a leader of a session of its own, its output added to `log`; its pid. Raises OSError.

    No signal is blocked in it, and SIGPIPE, which Python ignores, ends it as usual.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    return os.posix_spawnp(
        command[0], list(command), env, setsid=True, setsigmask=[], setsigdef=[signal.SIGPIPE],
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), flags, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
    )  # fmt: skip


def reap(pid: int) -> None:
    """Collect one ended child, so that it does not stay a zombie; others' children are no error."""
    with contextlib.suppress(ChildProcessError, OSError):
        os.waitpid(pid, os.WNOHANG)
