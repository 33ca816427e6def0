"""A service that is left alone under load: the policy shifts by itself, or says why it does not."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from flexslurm.cli.ask import ask
from flexslurm.cli.show import render_status
from flexslurm.errors import ServiceUnreachable
from flexslurm.messages import CordonAsk, ShiftAsk, StatusAnswer
from tests.service_harness import (
    Ask,
    RunningService,
    check,
    finish,
    gear_of,
    oracle,
    running,
    serves,
    some_asks,
    tiny_service,
    tiny_site,
)

pytestmark = [pytest.mark.long, pytest.mark.timeout(240)]

WINDOW_S = 3.0
SLOW = "a100 tp1 [0,6)"
STREAMS, LONG, ROUNDS = 12, 200, 6


class Pressure:
    """Three times as many streams as the slow gear has places for, as long as is needed."""

    def __init__(self, service: RunningService) -> None:
        self._service = service
        self.asks: list[Ask] = []
        self._threads: list[threading.Thread] = []

    def until(self, what: Callable[[StatusAnswer], bool]) -> StatusAnswer:
        """Keep the load up until this is seen; more streams come as others end, within a bound."""
        deadline, last = time.monotonic() + 100, ""
        while time.monotonic() < deadline:
            open_still = sum(one.finish is None for one in self.asks)
            if open_still < STREAMS and len(self.asks) < ROUNDS * STREAMS:
                more = some_asks(STREAMS, LONG)
                self.asks += more
                self._threads += self._service.start(more)
            with contextlib.suppress(ServiceUnreachable):  # it has more to do than to answer
                status = self._service.status()
                if what(status):
                    return status
                last = status.reason
            time.sleep(0.05)
        raise AssertionError(f"not seen under load; last: {last}")

    def end(self, expected: list[list[int]]) -> None:
        finish(self._threads, 100)
        check(self.asks, expected * (len(self.asks) // STREAMS))


def saturated(status: StatusAnswer) -> int:
    return sum(bool(window["saturated"]) for window in status.measured.get("windows", ()))


def into_the_slow_gear(service: RunningService) -> None:
    """An operator wanted it, but the allocation has changed: the choice is the policy's."""
    here = {"serving", "ready"}
    service.until(lambda s: s.state == "serving" and {f.state for f in s.fragments} <= here)
    ask(service.directory, ShiftAsk(to=SLOW), 10.0)
    status = service.until(lambda s: gear_of(s) == SLOW and serves("a100:1x3")(s))
    unused = next(f.name for f in status.fragments if not any(gpu.slot for gpu in f.gpus))
    for cordon in (True, False):
        ask(service.directory, CordonAsk(fragment=unused, cordon=cordon), 10.0)
    service.until(lambda s: "asked for" not in s.reason and "times a100" in s.reason)


@pytest.mark.parametrize("ratio", [1.3, 50.0])
def test_load_makes_the_shift_where_it_gains_enough_and_tokens_stay_the_same(
    ratio: float, tmp_path: Path, tiny_model: Path
) -> None:
    settings = tiny_service(tiny_model, [("a100", 1, 3)], max_batch=4)
    settings["profiling"] = {"interval_sec": 0.1, "window_minutes": WINDOW_S / 60}
    settings["decisions"] = {"min_action_gap_sec": 1, "migration_benefit_ratio": ratio}
    site = tiny_site()
    site["gpu_types"]["a100"]["virtual"] = {"speed": 0.3}
    expected = oracle(tiny_model, some_asks(STREAMS, LONG))
    with running(tmp_path, settings, site) as service:
        into_the_slow_gear(service)
        idle = service.until(lambda s: len(s.measured.get("windows", ())) == 2)
        assert gear_of(idle) == SLOW and saturated(idle) == 0, "nobody asks for more than it does"
        shifts = len(idle.shifts)

        load = Pressure(service)
        if ratio > 10:
            status = load.until(lambda s: saturated(s) == 2 and "saturated" in s.reason)
            load.end(expected)
            assert gear_of(status) == SLOW and len(service.status().shifts) == shifts
            assert "below the benefit ratio of 50" in status.reason, status.reason
            assert status.decisions[-1]["verdict"] == "stay"
            assert f"why: {status.reason}" in render_status(status)
            return
        status = load.until(lambda s: gear_of(s) not in (SLOW, None) and s.state == "serving")
        load.end(expected)
        last = status.shifts[-1]
        assert len(status.shifts) == shifts + 1
        assert "is estimated at" in str(last["why"]) and "saturated" in str(last["why"]), last
        assert last["outcome"] == "committed" and last["sequences_recomputed"] == 0, last
        assert status.gear is not None and len(status.gear.replicas) > 1
        assert {"stay", "shift"} <= {decision["verdict"] for decision in status.decisions}
        assert f"shift: {last['why']}" in render_status(status)
        assert service.status().figures["requests_succeeded"] == 1.0
