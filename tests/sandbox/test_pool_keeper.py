"""The pool keeper's own calls on a real Slurm, without a model: refusals, holds, crashes, holes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flexslurm.config.schema import parse_section
from flexslurm.config.service import Service
from flexslurm.config.site import Site
from flexslurm.control.keeper_values import Submit
from flexslurm.head.pool import Pool
from flexslurm.slurm.client import SlurmClient
from flexslurm.slurm.pilot import SlurmSubmitter
from flexslurm.slurm.states import JobState
from flexslurm.wire.service_dir import Pilots, ServiceDir
from tests.command_lines import command_lines

pytestmark = pytest.mark.timeout(600)


class Bench:
    """A pool whose pilots' agents wait for a head that never comes."""

    def __init__(self, home: Path, site: Site, entry: str, **keeping: Any) -> None:
        text = f"name: kept\nmodel: {{path: /m}}\npool: [{{partition: scavenge, {entry}}}]\n"
        overrides = {f"keeping.{key}": value for key, value in keeping.items()}
        self.service = parse_section(Service, text, "f", overrides)
        self.site, self.directory = site, ServiceDir(home / "svc")
        self.directory.create()
        self.directory.site.write_text(site.model_dump_json())
        self.directory.write_pilots(Pilots("slurm"))
        self.submitter = SlurmSubmitter(site, self.directory.path)
        self.records: list[dict[str, Any]] = []
        self.pool = self.fresh()

    def fresh(self) -> Pool:
        pilots = self.directory.pilots()
        assert pilots is not None
        return Pool(
            self.service, self.site, self.directory, pilots, self.submitter,
            tell=lambda event: None, record=self.records.append,
        )  # fmt: skip

    def look(self) -> None:
        self.pool.looked(self.pool.look([p.job_id for p in self.pool.pilots if p.job_id]))

    def until(self, done: Callable[[], bool], seconds: float = 100.0) -> None:
        deadline = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < deadline, (self.pool.lines(), self.records)
            self.look()
            call = self.pool.next_call()
            if call is not None:
                asyncio.run(self.pool.run_call(call))
            time.sleep(0.2)

    def jobs(self) -> dict[str, JobState]:
        return {job.name: job.state for job in self.submitter.survey([])[1]}

    def said(self, what: str) -> list[str]:
        return [str(record.get("why", "")) for record in self.records if record["what"] == what]


def test_a_refusal_is_said_in_words_and_stops_it(
    tmp_path: Path, sandbox_site: Site, slurm: SlurmClient
) -> None:
    bench = Bench(tmp_path, sandbox_site, "gpu_type: a100, gpus: 9")
    bench.until(lambda: bool(bench.said("stopped")))
    words = bench.said("refused")[0]
    assert "no node has what is asked for" in words and "configuration" in words
    assert "no more are submitted for now" in bench.pool.lines()[0]
    assert bench.jobs() == {}


def test_another_shape_takes_the_place_of_one_that_is_refused(
    tmp_path: Path, sandbox_site: Site, slurm: SlurmClient
) -> None:
    bench = Bench(tmp_path, sandbox_site, "gpu_type: a100, gpus: 9, shapes: [{gpus: 2}]")
    bench.until(lambda: JobState.RUNNING in bench.jobs().values())
    assert [pilot.gpus for pilot in bench.pool.pilots] == [2]


def test_a_held_job_is_said_and_left_alone(
    tmp_path: Path, sandbox_site: Site, slurm: SlurmClient
) -> None:
    scavenge = sandbox_site.partitions["scavenge"].model_copy(update={"sbatch_args": ["--hold"]})
    site = sandbox_site.model_copy(update={"partitions": {"scavenge": scavenge}})
    bench = Bench(tmp_path, site, "gpu_type: l40s, gpus: 1")
    bench.until(lambda: bool([r for r in bench.records if r["what"] == "held"]))
    job = bench.pool.pilots[0].job_id
    slurm.call("scontrol", "release", job)
    bench.until(lambda: JobState.RUNNING in bench.jobs().values())
    assert [pilot.job_id for pilot in bench.pool.pilots] == [job]


@pytest.mark.slow
def test_a_cancelled_pilot_comes_back_and_never_more_than_the_maximum(
    tmp_path: Path, sandbox_site: Site, slurm: SlurmClient
) -> None:
    """The head dies in the middle of the second submission, too."""
    entry = "gpu_type: a100, gpus: 4, count: 2"
    bench = Bench(tmp_path, sandbox_site, entry, retry=1, quick_death=0)

    def all_run() -> bool:
        jobs = bench.jobs()
        assert len(jobs) == len(bench.submitter.survey([])[1]) <= 2, jobs
        return list(jobs.values()) == [JobState.RUNNING] * 2

    bench.until(all_run)
    first = bench.pool.pilots[0]
    slurm.cancel([first.job_id])
    deadline = time.monotonic() + 40
    while first.fragment in {pilot.fragment for pilot in bench.pool.pilots}:
        assert time.monotonic() < deadline, bench.records
        bench.look()
        time.sleep(0.2)
    call = bench.pool.next_call()
    assert isinstance(call, Submit)
    bench.pool._write()
    bench.submitter.submit(_spec(bench, call))  # and here the head dies
    bench.pool = bench.fresh()
    bench.until(all_run)
    jobs = {pilot.fragment: pilot.job_id for pilot in bench.pool.pilots}
    assert jobs.keys() == {"a100-1", "a100-2"} and jobs["a100-1"] != first.job_id


def _spec(bench: Bench, call: Submit) -> Any:
    from flexslurm.head.pilot_specs import pilot_spec

    return pilot_spec(call.pilot, bench.service, bench.site, bench.directory, "slurm")


@pytest.mark.slow
def test_a_node_is_taken_from_a_running_job(
    tmp_path: Path, sandbox_site: Site, slurm: SlurmClient
) -> None:
    bench = Bench(tmp_path, sandbox_site, "gpu_type: a100, gpus: 1, nodes: 2")
    bench.until(lambda: JobState.RUNNING in bench.jobs().values())
    bench.look()
    job = bench.pool.pilots[0].job_id
    bench.pool.keeper.part("a100-1", "a100n2")
    bench.until(lambda: slurm.jobs([job])[job].nodes == ("a100n1",))
    info = slurm.jobs([job])[job]
    assert info.state is JobState.RUNNING and info.restarts == 0
    assert bench.pool.pilots[0].nodes == 1
    assert not list(bench.directory.jobs.glob("slurm_job_*_resize.*"))
    _end_left_agent(bench)


def _end_left_agent(bench: Bench) -> None:
    """No head has told it to end before its node was taken, and Slurm lets it be."""
    for pid, line in command_lines():
        if str(bench.directory.path) in line:
            with contextlib.suppress(OSError):
                node = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                if b"SLURMD_NODENAME=a100n2" in node:
                    os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_a_hole_is_filled_by_a_job_that_ends_before_a_reservation_begins(
    tmp_path: Path, sandbox_site: Site, slurm: SlurmClient
) -> None:
    slurm.call(
        "scontrol", "create", "reservation", "ReservationName=later", "StartTime=now+20minutes",
        "Duration=10", "Nodes=l40n1", "Users=root",
    )  # fmt: skip
    try:
        entry = "gpu_type: l40s, gpus: 2, count: 2, min_count: 0, max_count: 2"
        bench = Bench(
            tmp_path, sandbox_site, entry, backfill=True, backfill_least=60, backfill_most=7200,
            retry=1,
        )  # fmt: skip
        bench.until(lambda: list(bench.jobs().values()) == [JobState.RUNNING] * 2)
        infos = slurm.jobs([pilot.job_id for pilot in bench.pool.pilots])
        ends = {info.nodes[0]: info.end_in_s for info in infos.values()}
        assert ends.keys() == {"l40n1", "l40n2"}
        assert ends["l40n1"] is not None and 600 < ends["l40n1"] <= 1140
        # the longest that fits is asked for; Slurm may give three quarters of it
        assert ends["l40n2"] is not None and 5300 < ends["l40n2"] <= 7200
        assert all(pilot.fills_hole for pilot in bench.pool.pilots)
    finally:
        slurm.call("scontrol", "delete", "ReservationName=later")
