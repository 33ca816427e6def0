"""What the processes of one service hold, seen from outside; never changes or ends anything.

A shift must leave no process, thread, descriptor, port or shared memory behind. What a status
says of itself (memory, epochs) is `shift_ground`'s to look at.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import leaks
import psutil

from flexslurm.messages import StatusAnswer
from tests.service_harness import RunningService

ALONE_PORTS, GROUP_PORTS = 2, 3
"""A worker listens for data and in its own world; and in groups: of its stage, and between."""
MORE_THREADS, MORE_DESCRIPTORS = 24, 40
"""Above a fresh worker's, while connections of a shift are kept, and their threads."""
NURSERY = "nursery_server"


@dataclass(frozen=True)
class Holds:
    """One process."""

    threads: int
    descriptors: int
    listening: int


def holds(pid: int) -> Holds:
    """Raises psutil.Error."""
    process = psutil.Process(pid)
    with process.oneshot():
        listening = sum(c.status == psutil.CONN_LISTEN for c in process.net_connections("tcp"))
        return Holds(process.num_threads(), process.num_fds(), listening)


def ports_left(name: str, pid: int, *, grouped: bool) -> list[str]:
    """More ports on which a worker listens than its part of the gear explains; pid 0: none is."""
    if not pid:
        return []
    try:
        listening = holds(pid).listening
    except psutil.Error as error:
        return [f"{name}: {error}"]
    most = ALONE_PORTS + (GROUP_PORTS if grouped else 0)
    return [f"{name}: {listening} listening ports, at most {most}"] if listening > most else []


class Census:
    """Of one service, from its start on."""

    def __init__(self, service: RunningService, before: leaks.Snapshot) -> None:
        """`before`: what there was before the service."""
        self._service, self._before = service, before
        self._token = os.environ[leaks.TOKEN_VARIABLE]
        self._base: dict[str, Holds] = {}

    def left(self, status: StatusAnswer) -> list[str]:
        """Processes that belong to no living part of the service, and shared memory."""
        known = {gpu.pid for fragment in status.fragments for gpu in fragment.gpus if gpu.pid}
        roots = [*self._service.processes("flexslurm.head"), *self._service.processes("--fragment")]
        now = leaks.take(self._token)
        found = [f"process {pid}: {what}" for pid, what in self._strays(now, roots, known)]
        shm = now.shared_memory - self._before.shared_memory
        return found + [f"shared memory {n}" for n in sorted(shm) if not leaks.held_by_others(n)]

    def _strays(
        self, now: leaks.Snapshot, roots: Iterable[int], known: set[int]
    ) -> Iterator[tuple[int, str]]:
        """Who is neither head nor agent nor keeper nor of theirs, or a worker nobody knows."""
        family: set[int] = set()
        for pid in roots:
            family |= _family(pid)
        for pid, _, what in now.processes - self._before.processes:
            if pid not in family or (_is_worker(pid) and pid not in known):
                yield pid, what

    def begin(self, status: StatusAnswer) -> None:
        """Note what there is now: `too_much` compares with it."""
        for name, one in self.counts(status).items():
            known = self._base.get(name.split()[0], Holds(0, 0, 0))
            self._base[name.split()[0]] = Holds(
                max(known.threads, one.threads),
                max(known.descriptors, one.descriptors),
                max(known.listening, one.listening),
            )

    def too_much(
        self, status: StatusAnswer, threads: int = MORE_THREADS, descriptors: int = MORE_DESCRIPTORS
    ) -> list[str]:
        """Who has so many threads or descriptors more than its like had at `begin`."""
        try:
            counts = self.counts(status)
        except psutil.Error as error:
            return [str(error)]
        found = []
        for name, one in counts.items():
            base = self._base.get(name.split()[0])
            if base is not None and one.threads > base.threads + threads:
                found.append(f"{name}: {one.threads} threads, {base.threads} at the start")
            if base is not None and one.descriptors > base.descriptors + descriptors:
                found.append(f"{name}: {one.descriptors} descriptors, {base.descriptors} before")
        return found

    def counts(self, status: StatusAnswer) -> dict[str, Holds]:
        """What every process of the service holds that a shift may touch. Raises psutil.Error."""
        found = {}
        for fragment in status.fragments:
            for gpu in fragment.gpus:
                if gpu.pid:
                    found[f"worker {gpu.pid}"] = holds(gpu.pid)
        for name, text in (("head", "flexslurm.head.main"), ("agent", "flexslurm.head.agent_proc")):
            for pid in self._service.processes(text):
                found[f"{name} {pid}"] = holds(pid)
        return found


def _family(pid: int) -> set[int]:
    """The process, its descendants, and those above it."""
    try:
        process = psutil.Process(pid)
        return {pid, *(p.pid for p in process.parents()),
                *(p.pid for p in process.children(recursive=True))}  # fmt: skip
    except psutil.Error:
        return set()


def _is_worker(pid: int) -> bool:
    """Whether it was forked from a fork server of workers: it has its parent's command line."""
    try:
        process = psutil.Process(pid)
        parent = process.parent()
        line = process.cmdline()
        return parent is not None and any(NURSERY in a for a in line) and line == parent.cmdline()
    except psutil.Error:
        return False
