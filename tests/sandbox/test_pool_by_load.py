"""A pool that grows while many streams run and shrinks when few do, on a real Slurm."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from submitter_suite import wait

from flexslurm.messages import StatusAnswer
from flexslurm.slurm.client import SlurmClient
from flexslurm.slurm.sandbox import Sandbox
from flexslurm.slurm.states import JobState
from tests.sandbox.stream_kit import TABLE, Load
from tests.service_harness import RunningService, running, serves, tiny_service

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]
MANY = 12
"""Streams for four seats, or eight."""
Report = Callable[[str, object], None]


@pytest.fixture
def service(tmp_path: Path, tiny_model: Path, slurm_sandbox: Sandbox) -> Iterator[RunningService]:
    """One pilot of one GPU, or two."""
    site = yaml.safe_load(slurm_sandbox.site_file.read_text())
    site["gpu_types"]["a100"]["memory"] = "4MiB"
    asked = tiny_service(tiny_model, [("a100", 1, 1)], memory_fraction=1.0, max_batch=4)
    asked["pool"][0] |= {"partition": "scavenge", "min_count": 1, "max_count": 2}
    asked["keeping"] = {"retry": "1s", "high_for": "2s", "low_for": "6s"}
    with running(tmp_path, asked, site, cluster="slurm") as service:
        yield service


class Jobs:
    """What Slurm has of the service's pilots."""

    def __init__(self, service: RunningService) -> None:
        self.slurm = SlurmClient(service.plan.site.slurm)
        self._folder = service.directory.jobs
        self.most = 0

    def look(self) -> dict[str, JobState]:
        """By fragment; counts how many there were at once."""
        _, ours = self.slurm.survey([], self._folder, {})
        found = {job.name.partition(".")[2]: job.state for job in ours}
        found.pop("head", None)
        self.most = max(self.most, len(found))
        return found


def test_the_load_brings_a_second_pilot_and_lets_it_go_again(
    service: RunningService, tiny_model: Path, record_property: Report
) -> None:
    service.until(serves("a100:1"))
    jobs = Jobs(service)
    assert jobs.look() == {"a100-1": JobState.RUNNING}
    busy = Load(lambda: service.endpoint, tiny_model, MANY)
    busy.start()
    try:
        came_s = _until(service, jobs, busy, serves("a100:1x2"), 90)
        assert _slots(service) == {"a100-1", "a100-2"}
        busy.one_more_each()
    finally:
        many = busy.finish()
    second = service.job_of("a100-2")
    quiet = Load(lambda: service.endpoint, tiny_model, 1)  # the service is not idle, but nearly
    quiet.start()
    try:
        went_s = _until(service, jobs, quiet, serves("a100:1"), 60)
        quiet.one_more_each()
        wait(lambda: jobs.slurm.jobs([second])[second].state.over, 30, "its job has ended")
        quiet.one_more_each()
    finally:
        few = quiet.finish()
    assert jobs.look() == {"a100-1": JobState.RUNNING} and jobs.most == 2
    # it was told to end, and was not killed: whoever wants its GPU has it at once
    assert jobs.slurm.jobs([second])[second].state is JobState.COMPLETED
    assert service.status().pool == ("1 of 1 a100 pilots run (1 to 2)",)
    shifts = service.status().shifts
    assert all(shift["outcome"] == "committed" for shift in shifts), shifts
    for what, seconds, streams in (("load, a pilot more", came_s, many), ("a lull", went_s, few)):
        told = "serves" if streams is many else "let go"
        record_property(TABLE, f"{what:<34} {seconds:6.2f} s   {told:<34} {streams:3d} streams")


def _until(
    service: RunningService,
    jobs: Jobs,
    load: Load,
    what: Callable[[StatusAnswer], bool],
    timeout_s: float,
) -> float:
    """Seconds until the service is so; meanwhile no stream breaks and no pilot is one too many."""
    began = time.monotonic()

    def there() -> bool:
        load.check()
        assert len(jobs.look()) <= 2
        return what(service.status())

    wait(there, timeout_s, "the service is as it should be by its load")
    return time.monotonic() - began


def _slots(service: RunningService) -> set[str]:
    """Pilots that have a part in the gear."""
    found = service.status().fragments
    return {one.name for one in found if any(gpu.slot for gpu in one.gpus)}
