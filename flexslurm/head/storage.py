"""The service's part of `checkpoint_dir`: probed on every node before anything depends on it.

    CHECKPOINT_DIR/SERVICE/       0700
      head.token                  what the living head wrote
      shift-EPOCH.json            light checkpoints, the last few
      *.park                      KV that waits there (written by workers)

What is wrong with it is said, and then it is not used; it never keeps the service from serving.
"""

from __future__ import annotations

import contextlib
import logging
import re
import secrets
from collections.abc import Iterable
from pathlib import Path

import msgspec

from flexslurm.control.directory_probe import TOKEN_NAME, write_and_read_back
from flexslurm.engine import faults
from flexslurm.engine.faults import Point
from flexslurm.head.light_checkpoint import LightCheckpoint
from flexslurm.messages import DirectoryProbed, ProbeDirectory
from flexslurm.wire.files import write_atomically

log = logging.getLogger(__name__)

_KEPT = 3
_CHECKPOINT = re.compile(r"shift-(\d+)\.json")


class Storage:
    """One head's use of the directory."""

    def __init__(self, checkpoint_dir: Path, service: str) -> None:
        self.path = checkpoint_dir / service
        self.fault = "it has not been probed"
        """Why it is not used; "" if it is."""
        self._token = secrets.token_hex(8)
        self._asked: set[str] = set()
        self._good: set[str] = set()

    def begin(self) -> LightCheckpoint | None:
        """Probe it from here, and clear away what earlier heads left; what the last one noted."""
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.fault = write_and_read_back(self.path)
            if self.fault:
                return None
            write_atomically(self.path / TOKEN_NAME, self._token.encode(), mode=0o600)
            self._clear_parked()
            return self.latest()
        except OSError as error:
            self.fault = f"{self.path}: {error.strerror or error}"
            return None
        finally:
            if self.fault:
                log.warning("checkpoint_dir is not used: %s", self.fault)

    def _clear_parked(self) -> None:
        """Requests end with their head, and what was parked of them is nobody's."""
        for path in (*self.path.glob("*.park"), *self.path.glob("*.draft-*")):
            with contextlib.suppress(OSError):
                path.unlink()

    # ------------------------------------------------------------------ the nodes' view

    def ask(self, agent: str) -> ProbeDirectory | None:
        """What to send to an agent that has joined; once."""
        if self.fault or agent in self._asked:
            return None
        self._asked.add(agent)
        return ProbeDirectory(path=str(self.path), token=self._token)

    def heard(self, answer: DirectoryProbed) -> None:
        if answer.path != str(self.path):
            return
        if answer.reason:
            self._good.discard(answer.incarnation)
            log.warning("checkpoint_dir is not used by %s: %s", answer.incarnation, answer.reason)
        else:
            self._good.add(answer.incarnation)

    def good_for(self, agents: Iterable[str]) -> bool:
        """Whether all these agents could use it."""
        return not self.fault and set(agents) <= self._good

    def forget_all_but(self, agents: Iterable[str]) -> None:
        """The others are gone."""
        present = set(agents)
        self._asked &= present
        self._good &= present

    # ------------------------------------------------------------------ light checkpoints

    def save(self, checkpoint: LightCheckpoint) -> None:
        """Write it, whole or not at all, and drop the oldest. Blocks; raises OSError."""
        faults.reach(Point.CHECKPOINT)
        data = msgspec.json.format(msgspec.json.encode(checkpoint))
        write_atomically(self.path / f"shift-{checkpoint.epoch}.json", data, mode=0o600)
        for _, path in self._checkpoints()[:-_KEPT]:
            path.unlink(missing_ok=True)

    def latest(self) -> LightCheckpoint | None:
        """The last one that can be read. Raises OSError."""
        for _, path in reversed(self._checkpoints()):
            try:
                return msgspec.json.decode(path.read_bytes(), type=LightCheckpoint)
            except msgspec.MsgspecError as error:
                log.warning("%s is damaged: %s", path, error)
        return None

    def _checkpoints(self) -> list[tuple[int, Path]]:
        found = ((_CHECKPOINT.fullmatch(path.name), path) for path in self.path.iterdir())
        return sorted((int(match[1]), path) for match, path in found if match is not None)
