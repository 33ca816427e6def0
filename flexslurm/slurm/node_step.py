"""One task of the one step over an allocation: runs on its node what is ordered in a directory.

`python -m flexslurm.slurm.node_step DIR` is what `srun` starts, once on each node. It takes orders
from DIR/NODE/*.order.json, passes on Slurm's signals, and says in DIR/NODE/*.status.json how each
ended. It never decides what runs; it ends with its step, or when DIR/end is there and nothing runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexslurm.slurm import processes
from flexslurm.slurm.awaited import next_signal
from flexslurm.slurm.json_files import read_json, write_json

BEAT_EVERY_S = 2.0
_LOOK_EVERY_S = 0.4
_GONE_S = 60.0
"""A shared directory that cannot be read for so long is taken for removed."""
_CLEAN_S = 5.0
_PR_SET_CHILD_SUBREAPER = 36
_PASSED_ON = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_WAITED_FOR = {signal.SIGCHLD, signal.SIGCONT, *_PASSED_ON}
# What Slurm tells a task of its place and its GPUs; the rest of the environment is the order's.
_OWN = ("CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")


@dataclass(slots=True)
class Running:
    """A process that was ordered."""

    pid: int
    kill_wait_s: float
    kill_at: float | None = None


class NodeTask:
    """The task of one node, from the step's start to its end."""

    def __init__(self, directory: Path, node: str) -> None:
        self._place = directory / node
        self._end = directory / "end"
        self._running: dict[str, Running] = {}
        self._seen: set[str] = set()
        self._beats = 0
        self._beat_at = 0.0
        self._read_at = time.monotonic()
        self._clean_until = 0.0

    def run(self) -> None:
        self._place.mkdir(parents=True, exist_ok=True)
        while time.monotonic() < self._read_at + _GONE_S:
            self._beat()
            number = next_signal(_WAITED_FOR, _LOOK_EVERY_S)
            if number in _PASSED_ON:
                self._tell(number)
            self._reap()
            self._look()
            self._kill_late()
            self._kill_orphans()
            if not self._running and self._end.exists():
                return

    def _beat(self) -> None:
        """A number that changes: clocks and file times of nodes may differ."""
        if time.monotonic() >= self._beat_at:
            self._beats += 1
            self._beat_at = time.monotonic() + BEAT_EVERY_S
            with contextlib.suppress(OSError):
                write_json(self._place / "beat.json", {"beat": self._beats, "pid": os.getpid()})

    def _look(self) -> None:
        """New orders, and those that shall end."""
        try:
            names = sorted(path.name for path in self._place.iterdir())
        except OSError:
            return
        self._read_at = time.monotonic()
        for name in names:
            order, _, kind = name.partition(".")
            if kind == "order.json" and order not in self._seen:
                self._seen.add(order)
                self._start(order)
            elif kind == "stop" and order in self._running:
                self._stop(self._running[order])

    def _start(self, order: str) -> None:
        told = read_json(self._place / f"{order}.order.json")
        try:
            pid = _spawn(told)
        except (OSError, KeyError, TypeError, ValueError) as error:
            self._say(order, exit_code=127, reason=f"cannot start it: {error}")
            return
        self._running[order] = Running(pid, float(told.get("kill_wait_s", 5.0)))
        self._say(order)

    def _stop(self, running: Running) -> None:
        if running.kill_at is None:
            running.kill_at = time.monotonic() + running.kill_wait_s
            with contextlib.suppress(ProcessLookupError):
                os.kill(running.pid, signal.SIGTERM)

    def _kill_late(self) -> None:
        for running in self._running.values():
            if running.kill_at is not None and time.monotonic() > running.kill_at:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(running.pid, signal.SIGKILL)

    def _kill_orphans(self) -> None:
        """What an ended process has left behind, in sessions of its own too, holds its GPUs."""
        if time.monotonic() > self._clean_until:
            return
        now, ours = processes.everything(), {running.pid for running in self._running.values()}
        roots = [p for p in now if p.parent == os.getpid() and p.pid not in ours]
        for process in processes.with_descendants(roots, now):
            processes.send(process, signal.SIGKILL)

    def _tell(self, number: signal.Signals) -> None:
        """With proctrack/cgroup Slurm signals this process alone."""
        for running in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(running.pid, number)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                order = next((o for o, r in self._running.items() if r.pid == ended[0]), None)
                if order is not None:
                    del self._running[order]
                    self._clean_until = time.monotonic() + _CLEAN_S
                    self._kill_orphans()
                    self._say(order, exit_code=os.waitstatus_to_exitcode(ended[1]))

    def _say(self, order: str, exit_code: int | None = None, reason: str = "") -> None:
        with contextlib.suppress(OSError):
            data = {"exit_code": exit_code, "reason": reason}
            write_json(self._place / f"{order}.status.json", data)


def _spawn(told: dict[str, Any]) -> int:
    """Raises OSError, and KeyError and such for an order that is none."""
    own = {k: v for k, v in os.environ.items() if k.startswith("SLURM") or k in _OWN}
    log = Path(told["log"])
    log.parent.mkdir(parents=True, exist_ok=True)
    return processes.spawn_logged(told["command"], {**told["env"], **own}, log)


def main(argv: list[str]) -> int:
    signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED_FOR)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    node = os.environ.get("SLURMD_NODENAME") or os.uname().nodename.split(".")[0]
    NodeTask(Path(argv[1]), node).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
