"""Writes light checkpoints beside the head's loop; what cannot be written is said and left out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from flexslurm.control.installed import InstalledGear, ReplicaKey
from flexslurm.engine.load import RunningKv
from flexslurm.head.light_checkpoint import LightCheckpoint, take_checkpoint, weights_version
from flexslurm.head.storage import Storage
from flexslurm.messages import DirectoryProbed, Message, ProbeDirectory

log = logging.getLogger(__name__)

_CLOSE_S = 5.0


class CheckpointWriter:
    """At most one checkpoint is being written; of those that come meanwhile, the last is next."""

    def __init__(self, storage: Storage | None, head: str, model: str) -> None:
        self.storage = storage
        self._head, self._model = head, model
        self._weights = ""
        self._next: LightCheckpoint | None = None
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> dict[str, Any] | None:
        """Probe the directory; a record of what the last head noted there, for the journal."""
        if self.storage is None:
            return None
        found = self.storage.begin()
        if not self.storage.fault:
            self._weights = self._version()
        if found is None:
            return None
        current = all(
            stage.weights == self._weights for one in found.replicas for stage in one.stages
        )
        return {
            "event": "found", "epoch": found.epoch, "head": found.head, "layout": found.layout,
            "sequences": len(found.tables), "same_weights": current,
        }  # fmt: skip

    def _version(self) -> str:
        try:
            return weights_version(Path(self._model))
        except OSError as error:
            log.warning("the weights of %s have no version: %s", self._model, error)
            return "unknown"

    def take(self, message: Message) -> bool:
        """Handle a message that concerns the directory; whether it did."""
        if not isinstance(message, DirectoryProbed):
            return False
        if self.storage is not None:
            self.storage.heard(message)
        return True

    def ask(self, agent: str, present: Iterable[str]) -> ProbeDirectory | None:
        """What to send to an agent that has joined; `present`: all that are here."""
        if self.storage is None:
            return None
        self.storage.forget_all_but(present)
        return self.storage.ask(agent)

    def note(
        self, epoch: int, gear: InstalledGear, running: Mapping[ReplicaKey, list[RunningKv]]
    ) -> None:
        """Write down what is in place now, without waiting for it."""
        if self.storage is None or self.storage.fault:
            return
        self._next = take_checkpoint(self._head, epoch, self._model, self._weights, gear, running)
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._write())

    async def _write(self) -> None:
        assert self.storage is not None
        while self._next is not None:
            checkpoint, self._next = self._next, None
            try:
                await asyncio.to_thread(self.storage.save, checkpoint)
            except OSError as error:
                log.warning("no light checkpoint of epoch %d: %s", checkpoint.epoch, error)

    async def close(self) -> None:
        """Let what is being written be written, for a while."""
        if self._task is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._task, _CLOSE_S)
