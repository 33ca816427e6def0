"""Feeds the figures that judge the shifts from what the head sees at each tick; decides nothing."""

from __future__ import annotations

from flexslurm.control.figures import Judgement, ServiceFigures, ThroughputKept
from flexslurm.control.state import Control
from flexslurm.head.ledger import Figures
from flexslurm.messages import FinishReason

_GOOD = (FinishReason.STOP, FinishReason.LENGTH)


class Judge:
    """`look` is called a few times a second; what happened in between counts as of then."""

    def __init__(self) -> None:
        self._figures = ServiceFigures()
        self._tokens = self._good = self._bad = 0
        self._open: int | None = None
        """The epoch of the shift that is under way."""
        self._seen = 0
        """The last epoch that was counted."""

    def look(self, now: float, control: Control, ledger: Figures) -> None:
        self._look_at_shifts(now, control)
        if control.current is not None:
            self._figures.serving(now)
        else:
            self._figures.paused(now)
        if ledger.tokens > self._tokens:
            self._figures.tokens(now, ledger.tokens - self._tokens)
            self._tokens = ledger.tokens
        self._figures.live(now, ledger.live)
        good = sum(ledger.finished.get(reason, 0) for reason in _GOOD)
        bad = ledger.finished.get(FinishReason.ERROR, 0)
        for _ in range(good - self._good):
            self._figures.request_ended(True)
        for _ in range(bad - self._bad):
            self._figures.request_ended(False)
        self._good, self._bad = good, bad

    def _look_at_shifts(self, now: float, control: Control) -> None:
        under_way = control.shift.epoch if control.shift is not None else None
        if self._open is not None and self._open != under_way:
            self._figures.shift_ended(now)
            self._seen, self._open = self._open, None
        for report in control.history:
            if report.epoch > self._seen:  # begun and ended since the last look
                self._figures.shift_began(now, report.epoch)
                self._figures.shift_ended(now)
                self._seen = report.epoch
        if under_way is not None and self._open is None:
            self._figures.shift_began(now, under_way)
            self._open = under_way

    def judge(self, now: float) -> Judgement:
        return self._figures.judge(now)

    def kept(self, epoch: int) -> ThroughputKept:
        return self._figures.kept(epoch)
