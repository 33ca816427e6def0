"""What the head tells of itself: status, metrics of shifts, the gateway's view; changes nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flexslurm.control.events import Measured
from flexslurm.control.installed import ReplicaKey
from flexslurm.control.state import Control
from flexslurm.engine.driver import Driver
from flexslurm.gateway.node_metrics import Readings
from flexslurm.gateway.port import StepTotals
from flexslurm.head.api_server import ApiServer
from flexslurm.head.installs import Installs
from flexslurm.head.ledger import Ledger
from flexslurm.head.measuring import Measuring
from flexslurm.head.status import JobView, status_answer
from flexslurm.messages import Message, ServiceState
from flexslurm.wire.service_dir import Pilot


class Reporter:
    """Looks at the parts of one head, and keeps count of what it has told."""

    def __init__(
        self,
        service: str,
        control: Control,
        ledger: Ledger,
        api: ApiServer,
        measuring: Measuring,
    ) -> None:
        self._service, self._control, self._ledger, self._api = service, control, ledger, api
        self._measuring = measuring
        self._installs = Installs()
        self._started_at = time.monotonic()
        self._counted_epoch = 0

    def begin(self, nodes: Callable[[], Readings], steps: Callable[[], StepTotals]) -> None:
        """Let the metrics page read what is counted; shifts of earlier heads are not."""
        self._counted_epoch = self._control.epoch
        judge = self._measuring.judge
        self._api.metrics.watch_figures(lambda: judge.judge(time.monotonic()).figures())
        self._api.metrics.watch_nodes(nodes)
        self._api.metrics.watch_steps(steps)

    def take(self, message: Message) -> None:
        """Note what a worker says of its installs."""
        self._installs.take(message)

    def weights_s(self, epoch: int) -> float:
        """How long an epoch's weights were on their way, on the slowest worker."""
        return self._installs.figures(epoch).move_s

    def tick(self, drivers: Mapping[ReplicaKey, Driver], *, stopping: bool) -> Measured | None:
        """Look at everything; what the controller is to hear when an interval has ended.

        `drivers`: those that are open, by their replicas.
        """
        now, control, figures = time.monotonic(), self._control, self._ledger.figures()
        measured = self._measuring.look(now, control, figures, drivers)
        self._ledger.announce(
            ServiceState.STOPPING if stopping else control.state,
            control.epoch,
            control.current.gpus if control.current is not None else 0,
            control.failed or control.reason,
        )
        return measured

    def count_shifts(self) -> None:
        history = self._control.history
        if not history or history[-1].epoch <= self._counted_epoch:
            return  # as after nearly every event
        for report in history:
            if report.epoch > self._counted_epoch:
                self._counted_epoch = report.epoch
                outcome, _, _ = report.outcome.partition(":")
                self._api.metrics.shift(outcome, report.took_s)

    def status(
        self, pilots: Iterable[Pilot], jobs: Mapping[str, JobView], *, stopping: bool
    ) -> Message:
        now = time.monotonic()
        return status_answer(
            service=self._service,
            endpoint=self._api.url,
            control=self._control,
            figures=self._ledger.figures(),
            pilots=pilots,
            jobs=jobs,
            stopping=stopping,
            now=now,
            started_at=self._started_at,
            installs=self._installs,
            judge=self._measuring.judge,
        )

    def extra_status(self) -> dict[str, Any]:
        """What the API adds to its own status page."""
        return {"service": self._service, "head": self._control.settings.head}
