"""What a head remembers of its journal, and a restarted one goes on from; never writes it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from flexslurm.control.state import Control

_DECISIONS = 200
"""The last ones stay readable in a journal that was shortened."""
_STAYS = 50
"""As do so many of those that changed nothing: one comes with each window."""


class Memory:
    """Takes the journal's records in order; implements `wire.journal.Keep`."""

    def __init__(self) -> None:
        self.epoch = 0
        """The highest there was."""
        self.cordoned: set[str] = set()
        self.draining: set[str] = set()
        self.lives: dict[str, tuple[float, float]] = {}
        """Seconds watched and losses of pilots, by kind."""
        self.open_requests: dict[str, Mapping[str, Any]] = {}
        """Accepted and not ended, by sequence."""
        self._decisions: deque[dict[str, Any]] = deque(maxlen=_DECISIONS)
        self._stays: deque[dict[str, Any]] = deque(maxlen=_STAYS)

    def take(self, record: dict[str, Any]) -> None:
        match record.get("event"):
            case "accepted":
                self.open_requests[str(record["seq"])] = record
            case "ended":
                self.open_requests.pop(str(record["seq"]), None)
            case "remembered":
                self.epoch = max(self.epoch, int(record["epoch"]))
                self.cordoned = set(record["cordoned"])
                self.draining = set(record.get("draining", ()))
            case "lives":
                kinds = record["kinds"]
                self.lives = {k: (float(watched), float(n)) for k, (watched, n) in kinds.items()}
            case "decided":
                self._stays.append(record)
            case _:
                self._decisions.append(record)
                self._decided(record)

    def _decided(self, record: Mapping[str, Any]) -> None:
        match record.get("event"):
            case "epoch":
                self.epoch = max(self.epoch, int(record["epoch"]))
            case "cordon":
                fragment = str(record["fragment"])
                (self.cordoned.add if record["cordon"] else self.cordoned.discard)(fragment)
                drain = record["cordon"] and record.get("drain", False)
                (self.draining.add if drain else self.draining.discard)(fragment)
            case "stopped" if record.get("pilots_end"):  # the next ones are others of these names
                self.cordoned.clear()
                self.draining.clear()

    def restore(self, control: Control) -> None:
        """A head that begins goes on from here."""
        control.epoch = self.epoch
        control.members.cordoned |= self.cordoned
        control.members.draining |= self.draining
        control.watch.lives.remember(self.lives)

    def records(self) -> Iterable[dict[str, Any]]:
        """Few records that give this memory again."""
        if self.epoch or self.cordoned:
            yield {
                "event": "remembered", "epoch": self.epoch, "cordoned": sorted(self.cordoned),
                "draining": sorted(self.draining),
            }  # fmt: skip
        if self.lives:
            yield {"event": "lives", "kinds": {k: list(v) for k, v in self.lives.items()}}
        yield from self._stays
        yield from self._decisions
        for record in self.open_requests.values():
            yield dict(record)
