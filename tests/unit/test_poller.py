"""The head's poller: whatever goes wrong in asking is no news of any job."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from flexslurm.control.events import Event, PilotEnds, PilotGone, PilotLeaving, PilotStays
from flexslurm.errors import EnvironmentFault, FlexslurmError, ServiceError, SlurmUnavailable
from flexslurm.head.poller import JobPoller
from flexslurm.slurm.jobs import JobInfo, unknown
from flexslurm.slurm.states import JobState
from flexslurm.wire.service_dir import Pilot

PILOTS = [Pilot("a-1", "7", None, "a100", 2, 1), Pilot("a-2", "8", None, "a100", 2, 1)]


class Told:
    """A submitter that answers, or raises, what it was given, and then holds still."""

    def __init__(self, answers: Sequence[dict[str, JobInfo] | FlexslurmError]) -> None:
        self.answers = list(answers)
        self.asked: list[list[str]] = []
        self.done = asyncio.Event()

    def states(self, job_ids: Sequence[str]) -> dict[str, JobInfo]:
        self.asked.append(list(job_ids))
        answer = self.answers.pop(0) if self.answers else {}
        if isinstance(answer, FlexslurmError):
            raise answer
        return answer


def poll(
    answers: Sequence[dict[str, JobInfo] | FlexslurmError], pilots: list[Pilot] = PILOTS
) -> tuple[list[Event], Told]:
    """Let a poller look until all answers are used, and once more."""
    events: list[Event] = []

    async def run() -> Told:
        told = Told(answers)
        poller = JobPoller(told, lambda: pilots, events.append, 0.001)  # type: ignore[arg-type]
        task = asyncio.create_task(poller.run())
        async with asyncio.timeout(200):
            while len(told.asked) <= len(answers) and not task.done():
                await asyncio.sleep(0.001)
        assert not task.done(), task.exception()
        task.cancel()
        return told

    return events, asyncio.run(run())


@pytest.mark.parametrize(
    "error",
    [
        SlurmUnavailable("squeue did not answer"),
        EnvironmentFault("cannot start 'squeue': Resource temporarily unavailable"),
        ServiceError("pilots.json is damaged"),
    ],
)
def test_no_failure_of_asking_ends_it_or_is_news(error: FlexslurmError) -> None:
    events, _ = poll([error, error, error, {"7": JobInfo("7", JobState.FAILED, "node died")}])
    assert events == [PilotGone("a-1", "Slurm: FAILED node died")]


def test_it_waits_longer_and_longer_while_there_is_no_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[float] = []
    sleep = asyncio.sleep

    async def note(seconds: float) -> None:
        if seconds >= 1.0:
            waits.append(seconds)
        await sleep(0)

    async def run() -> None:
        told = Told([SlurmUnavailable("no")] * 6 + [{}])
        poller = JobPoller(told, list, lambda event: None, 1.0)  # type: ignore[arg-type]
        monkeypatch.setattr("flexslurm.head.poller.asyncio.sleep", note)
        task = asyncio.create_task(poller.run())
        async with asyncio.timeout(200):
            while len(waits) < 8:
                await sleep(0.001)
        task.cancel()

    asyncio.run(run())
    assert all(1 <= w <= 2 for w in waits[:1]) and all(4 <= w <= 8 for w in waits[2:6])
    assert waits[6:8] == [1.0, 1.0]


def test_a_hook_shortens_the_wait_and_many_do_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexslurm.head.poller._LEAST_GAP_S", 0.01)

    async def run() -> int:
        told = Told([{}] * 50)
        poller = JobPoller(told, list, lambda event: None, 3600.0)  # type: ignore[arg-type]
        task = asyncio.create_task(poller.run())
        async with asyncio.timeout(200):
            while len(told.answers) > 49:
                await asyncio.sleep(0.001)
            for _ in range(20):
                poller.look_now()
            while len(told.answers) > 48:
                await asyncio.sleep(0.001)
        await asyncio.sleep(0.1)
        task.cancel()
        return 50 - len(told.answers)

    assert asyncio.run(run()) == 2


def test_a_preemption_is_told_once_for_each_start_of_a_job() -> None:
    def running(restarts: int, preempt_in_s: float | None) -> dict[str, JobInfo]:
        return {"7": JobInfo("7", JobState.RUNNING, preempt_in_s=preempt_in_s, restarts=restarts)}

    looks = [running(0, 30.0), running(0, 20.0), running(1, None), running(1, -2.0)]
    events, _ = poll(looks)
    assert events == [
        PilotLeaving("a-1", "PreemptTime", 30.0),
        PilotLeaving("a-1", "PreemptTime", 0.0),
    ]


def test_unknown_is_no_end_and_what_is_not_submitted_is_not_asked_for() -> None:
    pilots = [*PILOTS, Pilot("a-3", "", None, "a100", 2, 1)]
    events, told = poll([{"7": unknown("7")}], pilots)
    assert events == []
    assert told.asked[0] == ["7", "8"]


def test_jobs_that_are_no_longer_ours_are_forgotten() -> None:
    poller = JobPoller(Told([]), list, lambda event: None, 1.0)  # type: ignore[arg-type]
    for number in range(100):
        job = str(number)
        pilot = Pilot("a-1", job, None, "a100", 2, 1)
        info = JobInfo(job, JobState.RUNNING, preempt_in_s=1.0, held=True)
        poller.take([pilot], {job: info})
    assert list(poller.views) == ["99"]
    assert poller._warned == {"99": 0} and poller._held == {"99"} and poller._over == set()


def runs(preempt_in_s: float | None, restarts: int = 0) -> dict[str, JobInfo]:
    return {"7": JobInfo("7", JobState.RUNNING, preempt_in_s=preempt_in_s, restarts=restarts)}


def test_a_preemption_that_two_looks_know_nothing_of_was_called_off() -> None:
    one = PILOTS[:1]
    events, _ = poll([runs(20.0), runs(15.0), runs(None), runs(None), runs(None)], one)
    assert [type(event) for event in events] == [PilotLeaving, PilotStays]
    events, _ = poll([runs(20.0), runs(None), runs(10.0), runs(None)], one)
    assert [type(event) for event in events] == [PilotLeaving], "one look may have missed it"
    events, _ = poll([runs(20.0), runs(None), runs(None), runs(30.0)], one)
    assert [type(event) for event in events] == [PilotLeaving, PilotStays, PilotLeaving]


def test_a_job_that_was_requeued_or_is_unknown_was_not_spared() -> None:
    one = PILOTS[:1]
    gone = {"7": JobInfo("7", JobState.PENDING)}
    for after in ([gone, gone], [{"7": unknown("7")}] * 3, [runs(None, restarts=1)] * 3):
        events, _ = poll([runs(20.0), *after], one)
        assert [type(event) for event in events] == [PilotLeaving], after


def test_a_job_that_is_being_ended_leaves_the_kill_wait() -> None:
    events: list[Event] = []
    poller = JobPoller(
        Told([]),
        list,
        events.append,
        1.0,
        kill_wait_s=lambda partition: 7.0,  # type: ignore[arg-type]
    )
    for state in (JobState.RUNNING, JobState.COMPLETING, JobState.COMPLETING, JobState.PENDING):
        poller.take(PILOTS, {"7": JobInfo("7", state)})
    assert events == [PilotLeaving("a-1", "COMPLETING", 7.0, present=True)]


def test_the_end_of_a_walltime_is_told_when_it_is_news() -> None:
    events: list[Event] = []
    now = [100.0]
    poller = JobPoller(
        Told([]),
        list,
        events.append,
        1.0,
        now=lambda: now[0],  # type: ignore[arg-type]
    )
    for at, left in ((100.0, 600.0), (130.0, 570.5), (140.0, 3600.0), (150.0, None)):
        now[0] = at
        poller.take(PILOTS, {"7": JobInfo("7", JobState.RUNNING, end_in_s=left)})
    assert events == [PilotEnds("a-1", 600.0), PilotEnds("a-1", 3600.0)]
