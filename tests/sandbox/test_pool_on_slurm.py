"""The pool on a real Slurm: what was cancelled comes back, walltimes and nodes pass unnoticed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from flexslurm.cli.ask import ask
from flexslurm.messages import ReleaseAsk, StatusAnswer
from flexslurm.slurm.client import SlurmClient
from flexslurm.slurm.sandbox import Sandbox
from flexslurm.slurm.states import JobState
from tests.service_harness import (
    RunningService,
    check,
    finish,
    in_the_middle,
    oracle,
    running,
    some_asks,
    tiny_service,
)

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]
KEEPING: dict[str, Any] = {"retry": "1s", "quick_death": "5s"}


def launched(
    home: Path, model: Path, box: Sandbox, pool: list[dict[str, Any]], **keeping: Any
) -> Any:
    site = yaml.safe_load(box.site_file.read_text())
    site["gpu_types"]["a100"]["memory"] = "2MB"
    site["gpu_types"]["l40s"]["memory"] = "2MB"
    asked = tiny_service(model, [], memory_fraction=1.0)
    asked["pool"] = [{"partition": "scavenge", **entry} for entry in pool]
    asked["keeping"] = KEEPING | keeping
    return running(home, asked, site, cluster="slurm")


class Watch:
    """The most jobs of the service that Slurm has had at once."""

    def __init__(self, slurm: SlurmClient, service: RunningService) -> None:
        self._slurm, self._folder = slurm, service.directory.jobs
        self.most = 0

    def look(self) -> None:
        _, ours = self._slurm.survey([], self._folder, {})
        pilots = [job for job in ours if not job.name.endswith(".head")]
        active = [job for job in pilots if job.state is not JobState.COMPLETING]
        self.most = max(self.most, len(active))


def jobs_of(service: RunningService) -> dict[str, str]:
    pilots = service.directory.pilots()
    assert pilots is not None
    return {pilot.fragment: pilot.job_id for pilot in pilots.pilots}


@pytest.fixture(scope="module")
def kept(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, slurm_sandbox: Sandbox
) -> Iterator[RunningService]:
    """A pilot of two nodes, and one of one node."""
    home = tmp_path_factory.mktemp("kept")
    pool = [{"gpu_type": "a100", "gpus": 2, "nodes": 2}, {"gpu_type": "l40s", "gpus": 2}]
    with launched(home, tiny_model, slurm_sandbox, pool) as service:
        yield service


def serves(signature: str) -> Any:
    def what(status: StatusAnswer) -> bool:
        gear = status.gear
        return status.state == "serving" and gear is not None and str(gear.signature) == signature

    return what


@pytest.mark.shared_service
def test_a_cancelled_pilot_comes_back_and_a_node_is_given_back_under_streams(
    kept: RunningService, tiny_model: Path
) -> None:
    """In this order: the pool does not grow a node again that was given back."""
    a_cancelled_pilot_comes_back(kept, tiny_model)
    a_node_is_given_back(kept, tiny_model)


def a_cancelled_pilot_comes_back(kept: RunningService, tiny_model: Path) -> None:
    kept.until(serves("a100:2x2,l40s:2"), 90)
    slurm = SlurmClient(kept.plan.site.slurm)
    asks = some_asks(6, 60)
    threads = kept.start(asks)
    in_the_middle(asks)
    before = jobs_of(kept)
    watch, cancelled_at = Watch(slurm, kept), time.monotonic()
    slurm.cancel([before["l40s-1"]])
    while jobs_of(kept).get("l40s-1") in ("", None, before["l40s-1"]):
        watch.look()
        assert time.monotonic() - cancelled_at < 60, kept.status().pool
        time.sleep(0.2)
    print(f"submitted again {time.monotonic() - cancelled_at:.1f} s after the cancel")
    kept.until(serves("a100:2x2,l40s:2"), 60)
    watch.look()
    print(f"serves on all again after {time.monotonic() - cancelled_at:.1f} s")
    finish(threads, 90)
    check(asks, oracle(tiny_model, asks))
    assert watch.most == 2
    assert kept.status().pool == ("1 of 1 a100 pilots run", "1 of 1 l40s pilots run")


def a_node_is_given_back(kept: RunningService, tiny_model: Path) -> None:
    kept.until(serves("a100:2x2,l40s:2"), 90)
    slurm = SlurmClient(kept.plan.site.slurm)
    job = jobs_of(kept)["a100-1"]
    nodes = slurm.jobs([job])[job].nodes
    asks = some_asks(6, 80, seed=3)
    threads = kept.start(asks)
    in_the_middle(asks)
    asked_at = time.monotonic()
    ask(kept.directory, ReleaseAsk(node=nodes[1]), 10.0)
    while slurm.jobs([job])[job].nodes != nodes[:1]:
        assert time.monotonic() - asked_at < 60, slurm.jobs([job])[job]
        time.sleep(0.3)
    print(f"Slurm has the node after {time.monotonic() - asked_at:.1f} s")
    finish(threads, 90)
    check(asks, oracle(tiny_model, asks))
    info = slurm.jobs([job])[job]
    assert info.state is JobState.RUNNING and info.restarts == 0
    status = kept.until(serves("a100:2,l40s:2"), 30)
    assert {f.node for f in status.fragments if f.name == "a100-1"} == {nodes[0]}


def test_a_walltime_passes_unnoticed(
    tmp_path: Path, tiny_model: Path, slurm_sandbox: Sandbox
) -> None:
    """The successor is there, and serves, before the old pilot goes."""
    # beside the other service: GPUs of both nodes are free
    pool = [{"gpu_type": "a100", "gpus": 2, "walltime": "2min", "handover": "105s"}]
    with launched(tmp_path, tiny_model, slurm_sandbox, pool) as service:
        slurm = SlurmClient(service.plan.site.slurm)
        watch, old = Watch(slurm, service), jobs_of(service)["a100-1"]
        expected = oracle(tiny_model, some_asks(3, 300, seed=5))
        info, left_s = slurm.jobs([old])[old], None
        assert info.end_in_s is not None
        walltime_at = time.monotonic() + info.end_in_s
        while left_s is None:  # streams one after the other, one of them across the shift
            assert time.monotonic() < walltime_at, (service.status().pool, jobs_of(service))
            asks = some_asks(3, 300, seed=5)
            threads = service.start(asks)
            while any(thread.is_alive() for thread in threads):
                new = {f.name for f in service.status().fragments if f.state == "serving"}
                if left_s is None and new == {"a100-2"}:
                    left_s = walltime_at - time.monotonic()
                watch.look()
                time.sleep(0.3)
            finish(threads, 10)
            check(asks, expected)
        print(f"the successor served alone {left_s:.1f} s before the old one's walltime")
        assert left_s > 0
        while not slurm.jobs([old])[old].state.over:
            assert time.monotonic() < walltime_at, slurm.jobs([old])[old]
            time.sleep(0.3)
        assert watch.most <= 2  # the one that goes and its successor
        assert slurm.jobs([old])[old].state is JobState.COMPLETED  # it was not killed
