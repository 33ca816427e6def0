"""The keeper of one local job: runs its command as Slurm would run a pilot's step.

`python -m flexslurm.slurm.local_job JOB_DIR` reads JOB_DIR/job.json, starts one task per node in
a session of its own and writes JOB_DIR/status.json. SIGTERM cancels: tasks get SIGTERM, and all
that is left SIGKILL after the kill wait. SIGUSR1 preempts as JOB_DIR/preempt.json says: SIGTERM,
the grace time, SIGKILL, and the job starts again after a while. Imports nothing heavy: one such
process stands beside every local job.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from flexslurm.slurm import processes
from flexslurm.slurm.awaited import next_signal
from flexslurm.slurm.json_files import write_json
from flexslurm.slurm.states import EXIT_GIVE_BACK

_SIGNALS = {signal.SIGCHLD, signal.SIGTERM, signal.SIGUSR1}
_PR_SET_CHILD_SUBREAPER = 36
_AGAIN_S = 1.0


class LocalJob:
    """One job from its start to its end, requeues included."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.job: dict[str, Any] = json.loads((directory / "job.json").read_text("utf-8"))
        self.restarts = 0
        self.cancelled = False
        self.started_at = 0.0
        self.tasks: dict[int, int | None] = {}
        """Exit codes by pid; None while it runs."""

    def run(self) -> None:
        pause = 0.0
        while True:
            if self._wait_pending(pause):
                return self._write("CANCELLED")
            again = self._run_once()
            if self.cancelled:
                return self._write("CANCELLED", exit_code=self._worst())
            if again is None:
                code = self._worst()
                return self._write("FAILED" if code else "COMPLETED", exit_code=code)
            self.restarts += 1
            pause = again

    def _wait_pending(self, seconds: float) -> bool:
        """Wait; whether the job was cancelled meanwhile."""
        self._write("PENDING", reason="requeued, waits to start again" if self.restarts else "")
        deadline = time.monotonic() + seconds
        while not self.cancelled and (left := deadline - time.monotonic()) > 0:
            self.cancelled = self._next_signal(left) is signal.SIGTERM or self.cancelled
        return self.cancelled

    def _run_once(self) -> float | None:
        """Run until the tasks end; seconds until it shall start again, None for never."""
        self.tasks = {self._spawn(index): None for index in range(self.job["nodes"])}
        self.started_at = time.monotonic()
        self._write("RUNNING")
        kill_at: float | None = None
        again: float | None = None
        while None in self.tasks.values():
            left = None if kill_at is None else kill_at - time.monotonic()
            if left is not None and left <= 0:
                self._kill_all()
                kill_at = time.monotonic() + 1.0
                continue
            number = self._next_signal(left)
            if number is signal.SIGTERM and not self.cancelled:
                self.cancelled = True
                self._tell(signal.SIGTERM)
                kill_at = time.monotonic() + self.job["kill_wait_s"]
                self._write("COMPLETING")
            elif number is signal.SIGUSR1 and kill_at is None:
                order = json.loads((self.directory / "preempt.json").read_text("utf-8"))
                again = order["away_s"]
                self._tell(signal.SIGTERM)
                kill_at = time.monotonic() + order["grace_s"]
                self._write("RUNNING", preempt_at=kill_at)
            self._reap()
        self._kill_all()
        if again is None and self._worst() in (EXIT_GIVE_BACK, -signal.SIGTERM):
            again = _AGAIN_S
        return again

    def _spawn(self, index: int) -> int:
        job = self.job
        log = Path(job["log_dir"]) / f"{job['name']}.{job['id']}.{job['name']}-{index}.log"
        env = dict(job["env"])
        if job["identity"]:  # what an agent reads of a Slurm step
            env |= {"SLURMD_NODENAME": f"{job['name']}-{index}", "SLURM_JOB_ID": job["id"]}
            if self.restarts:
                env["SLURM_RESTART_COUNT"] = str(self.restarts)
        return processes.spawn_logged(job["command"], env, log)

    def _next_signal(self, timeout_s: float | None) -> signal.Signals | None:
        """The next signal within the time (an hour at most): all of ours are blocked."""
        return next_signal(_SIGNALS, 3600.0 if timeout_s is None else min(3600.0, timeout_s))

    def _reap(self) -> None:
        """Collect tasks and orphans that have become our children."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid in self.tasks:
                    self.tasks[pid] = os.waitstatus_to_exitcode(status)

    def _tell(self, number: signal.Signals) -> None:
        """Signal the tasks themselves, as Slurm does with proctrack/cgroup."""
        for pid, code in self.tasks.items():
            if code is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def _kill_all(self) -> None:
        """End all that descends from us, orphans of the tasks included; at most 5 s."""
        deadline = time.monotonic() + 5.0
        while time.monotonic() < deadline:
            self._reap()
            now = processes.everything()
            found = processes.with_descendants([p for p in now if p.parent == os.getpid()], now)
            if not found:
                return
            for process in found:
                processes.send(process, signal.SIGKILL)
            time.sleep(0.02)

    def _worst(self) -> int:
        """The exit code that counts: the first that is not 0."""
        return next((code for code in self.tasks.values() if code), 0)

    def _write(
        self,
        state: str,
        *,
        exit_code: int | None = None,
        reason: str = "",
        preempt_at: float | None = None,
    ) -> None:
        tasks = [p.identity for p in map(processes.look, self.tasks) if p is not None]
        data = {
            "state": state, "reason": reason, "exit_code": exit_code, "restarts": self.restarts,
            "preempt_at": preempt_at, "tasks": tasks, "started_at": self.started_at,
        }  # fmt: skip
        write_json(self.directory / "status.json", data)


def main(argv: list[str]) -> int:
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    keeper = LocalJob(Path(argv[1]))
    try:
        keeper.run()
    except Exception as error:  # noqa: BLE001 - the process's main loop: it says why, and ends
        keeper._kill_all()
        keeper._write("FAILED", exit_code=1, reason=f"cannot run it: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
