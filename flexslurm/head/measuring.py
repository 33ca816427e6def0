"""What the head sees at each tick, as samples and figures for others; decides nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexslurm.control.events import Measured
from flexslurm.control.installed import ReplicaKey
from flexslurm.control.spread import Spread
from flexslurm.control.state import Control
from flexslurm.control.trends import Targets, Window
from flexslurm.engine.driver import Driver
from flexslurm.head.judging import Judge
from flexslurm.head.ledger import Figures
from flexslurm.head.meter import Meter
from flexslurm.head.observer import Observer


class Measuring:
    """`meter` is what the ledger tells of sequences; `inner` hears it too."""

    def __init__(self, inner: Observer, interval_s: float) -> None:
        self.meter = Meter(inner, interval_s)
        self.judge = Judge()

    def look(
        self, now: float, control: Control, figures: Figures, drivers: Mapping[ReplicaKey, Driver]
    ) -> Measured | None:
        """Look at everything once; gives what the controller is to hear when an interval ends."""
        self.judge.look(now, control, figures)
        loads = {str(key): driver.load() for key, driver in drivers.items()}
        sample = self.meter.look(now, figures.tokens, figures.replicas.waiting, loads)
        return None if sample is None else Measured(sample)


def measured(now: float, control: Control) -> dict[str, Any]:
    """For programs: windows, the latest first; corrections, shares in time, expected losses."""
    watch = control.watch
    windows = [_window(window, watch.targets) for window in watch.windows(now) or ()]
    factors = {name: round(factor, 4) for name, factor in watch.corrections.items()}
    attained = {name: round(share, 4) for name, share in watch.attained.items()}
    return {
        "windows": windows,
        "corrections": factors,
        "attained": attained,
        "losses": watch.lives.hourly(),
    }


def _window(window: Window, targets: Targets) -> dict[str, Any]:
    offered = window.offered_tokens_per_s
    share = targets.share(window) if targets else None
    return {
        "seconds": round(window.seconds, 3),
        "tokens_per_s": round(window.tokens_per_s, 3),
        "p95_tokens_per_s": round(window.p95_tokens_per_s, 3),
        "replicas": {key: round(rate, 3) for key, rate in window.replicas.items()},
        "offered_tokens_per_s": None if offered is None else round(offered, 3),
        "running": round(window.running, 2),
        "waiting": round(window.waiting, 2),
        "p95_waiting": window.p95_waiting,
        "busy": round(window.busy, 4),
        "saturated": window.saturated,
        "within_targets": None if share is None else round(share, 4),
        **_latencies("ttft", window.ttft),
        **_latencies("tpot", window.tpot),
    }


def _latencies(name: str, spread: Spread) -> dict[str, float | None]:
    mean, p95 = spread.mean_s, spread.p95_s
    return {
        f"{name}_s": None if mean is None else round(mean, 5),
        f"p95_{name}_s": None if p95 is None else round(p95, 5),
    }
