"""Stands for one process of the one step where the head is: orders it, follows it, ends as it does.

`python -m flexslurm.slurm.step_order DIR NODE LOG KILL_WAIT_S STEP COMMAND…`, where STEP is the
record of the step's own srun. SIGTERM orders it to end. It never starts anything itself; a node
that says nothing for a while is taken for lost.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import time
from pathlib import Path

from flexslurm.slurm.json_files import read_json, write_json

READY_S = 120.0
"""For the step to start on the node."""
LOST_S = 15.0
_LOOK_EVERY_S = 0.4
LOST_CODE = 1
_OVER = ("FAILED", "COMPLETED", "CANCELLED")


class Order:
    """One order, from its placing to the end of its process."""

    def __init__(
        self, place: Path, step: Path, *, ready_s: float = READY_S, lost_s: float = LOST_S
    ) -> None:
        self._place, self._step = place, step
        self._ready_s, self._lost_s = ready_s, lost_s
        self._name = secrets.token_hex(6)
        self._stopped = False

    def put(self, command: list[str], log: Path, kill_wait_s: float) -> None:
        """Raises OSError where the directory cannot be written."""
        self._place.mkdir(parents=True, exist_ok=True)
        env = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")}
        data = {"command": command, "env": env, "log": str(log), "kill_wait_s": kill_wait_s}
        write_json(self._place / f"{self._name}.order.json", data)

    def stop(self) -> None:
        self._stopped = True

    def follow(self) -> tuple[int, str]:
        """Wait for its end; its exit code, and why where the node said nothing of it."""
        began = beat_at = time.monotonic()
        beat: object = None
        asked = False
        while True:
            if self._stopped and not asked:
                (self._place / f"{self._name}.stop").touch()
                asked = True
            ended = self._ended()
            if ended is not None:
                return ended
            now, seen = time.monotonic(), read_json(self._place / "beat.json").get("beat")
            if seen is not None and seen != beat:
                beat, beat_at = seen, now
            silent_s = now - (began if beat is None else beat_at)
            if silent_s > (self._ready_s if beat is None else self._lost_s):
                what = "has not started here" if beat is None else "says nothing here"
                return LOST_CODE, f"the step {what} for {silent_s:.0f} s"
            time.sleep(_LOOK_EVERY_S)

    def _ended(self) -> tuple[int, str] | None:
        over = str(read_json(self._step).get("state", "")) in _OVER  # before the last word is read
        told = read_json(self._place / f"{self._name}.status.json")
        if told.get("exit_code") is not None:
            return int(told["exit_code"]), str(told.get("reason", ""))
        return (LOST_CODE, "the step has ended: see the log of 'step'") if over else None


def main(argv: list[str]) -> int:
    directory, node, log, kill_wait_s, step, *command = argv[1:]
    order = Order(Path(directory) / node, Path(step))
    signal.signal(signal.SIGTERM, lambda number, frame: order.stop())
    order.put(command, Path(log), float(kill_wait_s))
    code, reason = order.follow()
    if reason:
        sys.stderr.write(f"{node}: {reason}\n")
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv))
