"""A launch is whole or leaves nothing, whoever interrupts it; a stop ends what it can find."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from flexslurm.cli import launch as launching
from flexslurm.cli import stopping, submitting
from flexslurm.cli.launch import LaunchPlan
from flexslurm.cli.service_places import service_directory
from flexslurm.config.schema import parse_section
from flexslurm.config.service import Service
from flexslurm.config.site import Site
from flexslurm.errors import (
    EnvironmentFault,
    FlexslurmError,
    ServiceExists,
    ServiceUnreachable,
    SlurmUnavailable,
)
from flexslurm.head.pilot_specs import AT_ONCE
from flexslurm.slurm.jobs import JobInfo, unknown
from flexslurm.slurm.local import LocalSubmitter
from flexslurm.slurm.script import HeadSpec, PilotSpec
from flexslurm.slurm.states import JobState
from flexslurm.wire.service_dir import HeadAddress, Pilot, Pilots, ServiceDir

ADDRESS = HeadAddress("h-1", "tcp://127.0.0.1:1", "http://127.0.0.1:2", "node", 1)


class FakeJobs:
    """Jobs in memory; `at_submit` is called with each new id before its submitter hears of it."""

    def __init__(self) -> None:
        self.alive: dict[str, JobState] = {}
        self.names: dict[str, str] = {}
        self.made: list[str] = []
        self.at_submit: Callable[[str], None] = lambda _: None

    def submit(self, spec: PilotSpec | HeadSpec) -> str:
        job = str(len(self.made) + 1)
        self.made.append(job)
        self.names[job] = spec.name
        self.alive[job] = JobState.RUNNING
        self.at_submit(job)
        return job

    def states(self, job_ids: Sequence[str]) -> dict[str, JobInfo]:
        return {
            job: JobInfo(id=job, state=self.alive[job]) if job in self.alive else unknown(job, "")
            for job in job_ids
        }

    def find(self, name: str) -> list[str]:
        return [job for job in self.alive if self.names[job] == name]

    def survey(self, job_ids: Sequence[str]) -> tuple[dict[str, JobInfo], tuple[JobInfo, ...]]:
        alive = tuple(
            JobInfo(job, state, name=self.names[job]) for job, state in self.alive.items()
        )
        return self.states(job_ids), alive

    def cancel(self, job_ids: Sequence[str]) -> None:
        for job in job_ids:
            self.alive.pop(job, None)

    def preview(self, spec: PilotSpec | HeadSpec) -> str:
        return spec.name


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> FakeJobs:
    fake = FakeJobs()
    monkeypatch.setattr(submitting, "make_submitter", lambda _: fake)
    monkeypatch.setattr(submitting, "head_submitter", lambda _: fake)
    monkeypatch.setattr(submitting, "job_owner", lambda *_: fake)
    return fake


@pytest.fixture
def plan(tmp_path: Path) -> LaunchPlan:
    return plan_of(tmp_path, 3)


def plan_of(tmp_path: Path, count: int, keeping: str = "{}") -> LaunchPlan:
    service = parse_section(
        Service,
        "name: chat\nmodel: {path: /m}\n"
        f"pool: [{{gpu_type: a100, gpus: 1, partition: p, count: {count}}}]\n"
        f"keeping: {keeping}\n",
        "f",
    )
    site = parse_section(Site, "name: s\ngpu_types: {a100: {}}\npartitions: {p: {}}\n", "f")
    directory = ServiceDir(tmp_path / "a b'c")
    pilots = launching._pilots(service, site, directory, "slurm")
    head = HeadSpec(name="chat.head", command=("true",), log_dir=directory.logs, env={})
    gear: Any = None
    return LaunchPlan(service, site, directory, "slurm", False, gear, (), pilots, head)


@pytest.fixture
def terminal() -> Iterator[None]:
    """Signals do what they do at a terminal, also where pytest runs in the background."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in numbers[1:]:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def silent(_: str) -> None:
    """Nobody listens."""


def test_all_is_submitted_and_written_down(plan: LaunchPlan, jobs: FakeJobs) -> None:
    made = submitting.execute(plan, silent)
    assert (plan.directory.pilots(), made.head_job) == (made, "4")
    assert [pilot.job_id for pilot in made.pilots] == ["1", "2", "3"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("at", ["1", "2", "3", "4"])
def test_a_signal_during_any_submission_leaves_no_job(
    plan: LaunchPlan, jobs: FakeJobs, terminal: None, number: signal.Signals, at: str
) -> None:
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    jobs.at_submit = lambda job: os.kill(os.getpid(), number) if job == at else None
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        submitting.execute(plan, silent)
    assert jobs.alive == {}
    assert plan.directory.pilots() == Pilots("slurm")
    after = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    assert after == handlers
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {number} == set()


@pytest.mark.parametrize("at", ["1", "3", "4"])
def test_a_submission_without_an_answer_leaves_no_job(
    plan: LaunchPlan, jobs: FakeJobs, at: str
) -> None:
    def unheard(job: str) -> None:
        if job == at:
            raise SlurmUnavailable("sbatch did not answer")

    jobs.at_submit = unheard
    with pytest.raises(SlurmUnavailable):
        submitting.execute(plan, silent)
    assert jobs.made[-1] == at
    assert jobs.alive == {}


def test_a_refused_head_leaves_no_job(plan: LaunchPlan, jobs: FakeJobs) -> None:
    def refuse(job: str) -> None:
        if job == "4":
            jobs.alive.pop(job)
            raise EnvironmentFault("no")

    jobs.at_submit = refuse
    with pytest.raises(EnvironmentFault):
        submitting.execute(plan, silent)
    assert jobs.alive == {}


def test_a_directory_that_was_made_for_nothing_is_gone(
    plan: LaunchPlan, jobs: FakeJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(submitting, "_write_files", full)
    with pytest.raises(OSError, match="No space"):
        submitting.execute(plan, silent)
    assert not plan.directory.path.exists()
    assert jobs.made == []


def test_two_launches_exclude_each_other(plan: LaunchPlan, jobs: FakeJobs) -> None:
    with plan.directory.changing(), pytest.raises(ServiceExists, match="launched or stopped"):
        submitting.execute(plan, silent)
    assert jobs.made == []
    assert plan.directory.path.exists()


def test_a_head_that_is_just_starting_is_not_doubled(plan: LaunchPlan, jobs: FakeJobs) -> None:
    submitting.execute(plan, silent)
    with pytest.raises(ServiceExists, match="head, job 4, is running") as refused:
        submitting.execute(plan, silent)
    assert f"--service-dir '{plan.directory.path.parent}" in (refused.value.hint or "")
    assert len(jobs.made) == len(jobs.alive) == 4


def test_a_head_that_hangs_is_ended_and_its_pilots_are_taken_over(
    plan: LaunchPlan, jobs: FakeJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise ServiceUnreachable("no answer")

    monkeypatch.setattr("flexslurm.cli.ask.ask_status", unreachable)
    submitting.execute(plan, silent)
    plan.directory.publish_head(ADDRESS)
    made = submitting.execute(plan, silent)
    assert [pilot.job_id for pilot in made.pilots] == ["1", "2", "3"]
    assert made.head_job == "5"
    assert set(jobs.alive) == {"1", "2", "3", "5"}
    assert plan.directory.head() is None


class Asked:
    """A head that was killed: nobody answers. Says whom it was asked for, and for how long."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.for_s: list[float] = []
        self.then: Callable[[], object] = lambda: None
        monkeypatch.setattr("flexslurm.cli.ask.ask_status", self._ask)

    def _ask(self, directory: ServiceDir, timeout_s: float = 5.0) -> None:
        self.for_s.append(timeout_s)
        self.then()
        raise ServiceUnreachable("no answer")


def test_a_head_that_was_killed_is_waited_for_once(
    plan: LaunchPlan, jobs: FakeJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitting.execute(plan, silent)
    jobs.cancel(["4"])
    asked = Asked(monkeypatch)
    plan.directory.publish_head(ADDRESS)
    gone = submitting.refuse_if_running(plan.directory)
    assert gone == "h-1" and asked.for_s == [2.0]
    made = submitting.execute(plan, silent, gone)
    assert made.head_job == "5" and asked.for_s == [2.0]
    plan.directory.publish_head(msgspec.structs.replace(ADDRESS, incarnation="h-2"))
    jobs.cancel(["5"])
    submitting.execute(plan, silent, gone)
    assert asked.for_s == [2.0, 2.0], "another head has come meanwhile: that one is asked"


def test_a_killed_head_whose_job_slurm_still_ends_is_not_waited_for_in_vain(
    plan: LaunchPlan, jobs: FakeJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitting.execute(plan, silent)
    asked, said = Asked(monkeypatch), list[str]()
    plan.directory.publish_head(ADDRESS)
    asked.then = lambda: jobs.alive.update({"4": JobState.FAILED})  # as Slurm says a little later
    made = submitting.execute(plan, said.append, "h-1")
    assert asked.for_s == [2.0] and made.head_job == "5"
    assert not any("does not answer" in line for line in said)


def test_a_head_that_hangs_has_time_to_answer(
    plan: LaunchPlan, jobs: FakeJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitting.execute(plan, silent)
    asked, said = Asked(monkeypatch), list[str]()
    plan.directory.publish_head(ADDRESS)
    submitting.execute(plan, said.append, "h-1")
    assert sum(asked.for_s) == 10.0 and "the head, job 4, does not answer: it is ended" in said
    assert "4" not in jobs.alive


def test_a_failed_launch_cancels_its_own_jobs_only(plan: LaunchPlan, jobs: FakeJobs) -> None:
    first = submitting.execute(plan, silent)
    jobs.cancel(["1", "2", "3", "4"])
    second = submitting.execute(plan, silent)
    submitting.cancel_all(plan, first)
    assert plan.directory.pilots() == second
    assert set(jobs.alive) == {"5", "6", "7", "8"}
    submitting.cancel_all(plan, second)
    assert (jobs.alive, plan.directory.pilots()) == ({}, Pilots("slurm"))


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\0", b"[]", b'{"cluster": 5}'])
@pytest.mark.parametrize("name", ["pilots.json", "head.json", "keys.json"])
def test_a_damaged_directory_can_be_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: bytes
) -> None:
    monkeypatch.setattr(stopping, "_ANSWER_S", 0.2)
    directory = ServiceDir(tmp_path / "service")
    directory.create()
    site = "name: s\ngpu_types: {a: {}}\n"
    directory.site.write_text(site)
    directory.service.write_text(yaml.safe_dump({"name": "x"}))
    owner = LocalSubmitter(directory.path)
    job = owner.submit(HeadSpec(name="h", command=("sleep", "60"), log_dir=directory.logs, env={}))
    directory.write_pilots(Pilots("local", (Pilot("a-1", job, None, "a", 1, 1),), None))
    directory.publish_head(ADDRESS)
    (directory.path / name).write_bytes(text)
    said: list[str] = []
    try:
        stopping.stop_service(directory, 0.0, 15.0, said.append)
    finally:
        owner.cancel([job])
    assert owner.states([job])[job].state.over
    assert directory.head() is None
    assert directory.pilots() in (None, Pilots("local"))


@pytest.mark.parametrize("text", ["~no-such-user/x", "~no-such-user"])
def test_a_home_that_is_not_there_is_said(text: str) -> None:
    with pytest.raises(FlexslurmError, match="no such home"):
        service_directory(text + "/y")
    with pytest.raises(FlexslurmError, match="no such home"):
        service_directory("chat", {"FLEXSLURM_SERVICES": text})


def test_a_stop_ends_jobs_that_no_list_has(
    plan: LaunchPlan, jobs: FakeJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head that dies in a submission may leave a job that nobody wrote down."""
    monkeypatch.setattr(stopping, "_submitter", lambda *_: jobs)
    submitting.execute(plan, silent)
    jobs.submit(plan.pilots[0][1])
    stopping.stop_service(plan.directory, 0.0, 5.0, silent)
    assert jobs.alive == {}
    assert plan.directory.pilots() == Pilots("slurm")


def test_a_large_pool_is_no_burst(
    tmp_path: Path, jobs: FakeJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head submits the rest, one in two of the poller's calls."""
    pauses: list[float] = []
    monkeypatch.setattr("time.sleep", pauses.append)
    said: list[str] = []
    monkeypatch.setattr(launching, "make_submitter", lambda _: jobs)
    plan = plan_of(tmp_path, 100)
    assert "# 84 of 100 pilots are left to the head: one every 10 s\n" in launching.preview(plan)
    made = submitting.execute(plan, said.append)
    assert len(made.pilots) == AT_ONCE and len(jobs.alive) == AT_ONCE + 1
    assert jobs.names[made.head_job or ""] == "chat.head" and pauses == []
    assert "84 of 100 pilots are left to the head: one every 10 s" in said


def test_a_large_pool_that_no_head_keeps_is_submitted_slowly(
    tmp_path: Path, jobs: FakeJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[tuple[int, float]] = []
    monkeypatch.setattr("time.sleep", lambda seconds: pauses.append((len(jobs.made), seconds)))
    made = submitting.execute(plan_of(tmp_path, 19, "{enabled: false}"), silent)
    assert len(made.pilots) == 19
    assert pauses == [(AT_ONCE + n, 1.0) for n in range(3)]


def test_what_an_operator_drained_is_not_submitted_by_the_next_launch(
    plan: LaunchPlan, jobs: FakeJobs
) -> None:
    """Unless the file's numbers are others than before."""
    submitting.execute(plan, silent)
    jobs.cancel(["2", "4"])
    left = (Pilot("a100-1", "1", "p", "a100", 1, 1), Pilot("a100-3", "3", "p", "a100", 1, 1))
    plan.directory.write_pilots(Pilots("slurm", left, "4", None, (2,), {"a100-2": 0}))
    made = submitting.execute(plan, silent)
    assert made.pilots == left and (made.wanted, made.drained) == ((2,), {"a100-2": 0})
    jobs.cancel([made.head_job or ""])
    more = plan_of(plan.directory.path.parent, 4)
    made = submitting.execute(more, silent)
    assert len(made.pilots) == 4 and (made.wanted, made.drained) == ((), {})


def test_a_launch_takes_over_pilots_that_a_head_has_renamed(
    plan: LaunchPlan, jobs: FakeJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Successors of pilots whose walltime ended are pilots of the pool; no fourth is submitted."""
    submitting.execute(plan, silent)
    jobs.cancel(["2", "4"])
    moved = (Pilot("a100-1", "1", "p", "a100", 1, 1), Pilot("a100-7", "3", "p", "a100", 1, 1))
    plan.directory.write_pilots(Pilots("slurm", moved, "4", None, (3,)))
    made = submitting.execute(plan, silent)
    assert [(p.fragment, p.job_id) for p in made.pilots] == [
        ("a100-1", "1"), ("a100-7", "3"), ("a100-2", "5")
    ]  # fmt: skip
    assert set(jobs.alive) == {"1", "3", "5", "6"}
