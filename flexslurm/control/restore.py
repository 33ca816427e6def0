"""What a restarted head takes from the journal; never writes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def restore_epoch(records: Sequence[Mapping[str, Any]]) -> tuple[int, frozenset[str]]:
    """The highest epoch of a journal and the fragments that were cordoned, for a restarted head."""
    epoch = max((int(r["epoch"]) for r in records if r.get("event") == "epoch"), default=0)
    cordoned: set[str] = set()
    for record in records:
        if record.get("event") == "cordon":
            fragment = str(record["fragment"])
            (cordoned.add if record["cordon"] else cordoned.discard)(fragment)
    return epoch, frozenset(cordoned)
