"""Lines of the journal about requests and the head's own life; of the gears it says nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flexslurm.control.restore import Memory
from flexslurm.head.observer import SequenceSummary
from flexslurm.messages import SequenceRequest
from flexslurm.wire.journal import Journal, unwritable


class RequestNotes:
    """What becomes of each request: in the kernel's hands at once, on disk with a decision."""

    def __init__(self, journal: Journal, memory: Memory, fail: Callable[[Exception], None]) -> None:
        """`fail` is told where the journal can no longer be written."""
        self._journal, self._memory, self._fail = journal, memory, fail

    def open(self) -> None:
        """Go on from the journal. Raises ServiceError, EnvironmentFault.

        Requests of a head that died have ended: their connections died with it.
        """
        try:
            self._journal.open()
        except OSError as error:
            raise unwritable(self._journal.path, error) from error
        for seq in list(self._memory.open_requests):
            self.note({"event": "ended", "seq": seq, "finish": "abort", "why": "head restarted"})

    def accepted(self, request: SequenceRequest) -> None:
        self.note({"event": "accepted", "seq": request.seq_id, "prompt": len(request.prompt)})

    def ended(self, ended: SequenceSummary) -> None:
        tokens = ended.output_tokens
        self.note({"event": "ended", "seq": ended.seq_id, "finish": ended.reason, "tokens": tokens})

    def note(self, record: dict[str, Any]) -> None:
        try:
            self._journal.append(record, sync=False)
        except OSError as error:
            self._fail(unwritable(self._journal.path, error))
