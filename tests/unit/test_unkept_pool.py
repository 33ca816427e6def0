"""A pool that nobody keeps: what has ended is started again on a word, and only then."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from virtual_time import inline

from flexslurm.config.schema import parse_section
from flexslurm.config.service import Service
from flexslurm.config.site import Site
from flexslurm.control.events import Cordon, Event
from flexslurm.control.keeper_load import ServiceLoad
from flexslurm.control.members import Members
from flexslurm.errors import CapacityError, FlexslurmError, ServiceError, SlurmUnavailable
from flexslurm.head.unkept import UnkeptPool
from flexslurm.slurm.job_names import UNSENT
from flexslurm.slurm.jobs import JobInfo, unknown
from flexslurm.slurm.script import PilotSpec
from flexslurm.slurm.states import JobState
from flexslurm.wire.service_dir import Pilot, Pilots, ServiceDir

LOAD = ServiceLoad(0, 0, 16, 0.0)


@pytest.fixture(autouse=True)
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncio.to_thread", inline)


class World:
    """Two pilots of an allocation, one look and one call at a time."""

    def __init__(self, home: Path) -> None:
        service = "name: chat\nmodel: {path: /m}\npool: [{gpu_type: a, gpus: 1, count: 2}]\n"
        self.directory = ServiceDir(home / "svc")
        self.directory.create()
        pilots = tuple(Pilot(f"a-{n}", f"local-{n}", None, "a", 1, 1) for n in (1, 2))
        self.directory.write_pilots(Pilots("allocation", pilots, "local-9", "7"))
        self.now, self.told = 0.0, list[Event]()
        self.jobs = {n: JobInfo(n, JobState.RUNNING, name="") for n in ("local-1", "local-2")}
        self.written: list[str] = []
        self.calls: list[str] = []
        self.fails: list[FlexslurmError] = []
        self.members = Members()
        self.pool = UnkeptPool(
            parse_section(Service, service, "f"),
            parse_section(Site, "name: s\ngpu_types: {a: {}}\n", "f"),
            self.directory, "allocation", self,  # type: ignore[arg-type]
            tell=self.told.append, record=lambda record: None, now=lambda: self.now,
        )  # fmt: skip
        self.turn()

    # ------------------------------------------------------------------ as a submitter

    def states(self, ids: Sequence[str]) -> dict[str, JobInfo]:
        return {i: self.jobs.get(i, unknown(i, "no such job")) for i in ids}

    def submit(self, spec: PilotSpec) -> str:
        self.calls.append("submit")
        self.written = [pilot.job_id for pilot in self.pool.pilots]
        job = f"local-{len(self.jobs) + 10}"
        if self.fails and not self.fails[0].transient:
            raise self.fails.pop(0)
        self.jobs[job] = JobInfo(job, JobState.RUNNING, name=spec.name)
        if self.fails:  # it is there, and nobody hears of it
            raise self.fails.pop(0)
        return job

    def find(self, name: str) -> list[str]:
        self.calls.append("find")
        return [i for i, info in self.jobs.items() if info.name == name]

    # ------------------------------------------------------------------

    def turn(self, times: int = 1) -> None:
        """As the poller: a look, then a call if there is one."""
        for _ in range(times):
            self.now += 5.0
            self.pool.looked(self.pool.look([p.job_id for p in self.pool.pilots if p.job_id]))
            self.pool.tick(self.members, lambda: LOAD, ())
            call = self.pool.next_call()
            if call is not None:
                asyncio.run(self.pool.run_call(call))

    def end(self, job: str, state: JobState = JobState.COMPLETED) -> None:
        self.jobs[job] = replace(self.jobs[job], state=state)

    def ids(self) -> list[str]:
        return [pilot.job_id for pilot in self.pool.pilots]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_what_has_ended_is_started_again_on_a_word_alone(world: World) -> None:
    world.end("local-2")
    world.turn(3)
    assert not world.calls and world.ids() == ["local-1", "local-2"]
    [line] = world.pool.lines()
    assert line == "a-2 has ended: flexslurm cordon --undo a-2 starts it again"
    assert world.pool.bring_back("a-2") == "a-2 had ended: it is started again"
    assert world.told == [Cordon("a-2", cordon=False, gone=True)]
    assert world.pool.lines() == ("a-2 is being started again",)
    world.turn(3)
    assert world.calls == ["submit"]
    assert world.written == ["local-1", UNSENT], "written down before"
    assert world.ids() == ["local-1", "local-12"] and world.pool.lines() == ()


def test_one_that_is_just_ending_is_started_again_then(world: World) -> None:
    assert world.pool.bring_back("a-1") == "", "it is here: its cordon is lifted"
    world.turn()
    assert not world.calls
    world.end("local-1")
    world.turn()
    assert world.calls == ["submit"] and world.ids()[0] == "local-12"


def test_one_that_stays_is_not_started_again_when_it_ends_later(world: World) -> None:
    world.pool.bring_back("a-1")
    world.turn(20)
    world.end("local-1")
    world.turn(3)
    assert not world.calls


def test_a_drain_takes_the_wish_back(world: World) -> None:
    world.pool.bring_back("a-1")
    world.members.draining.add("a-1")
    world.turn()
    world.end("local-1")
    world.turn(2)
    assert not world.calls


def test_an_end_is_not_forgotten_with_the_job(world: World) -> None:
    world.end("local-1", JobState.FAILED)
    world.turn()
    del world.jobs["local-1"]
    world.turn()
    assert world.pool.bring_back("a-1")


def test_why_it_cannot_be_is_said_and_the_list_is_as_before(world: World) -> None:
    world.end("local-2")
    world.turn()
    world.fails = [CapacityError("the allocation has no free node for chat.a-2")]
    world.pool.bring_back("a-2")
    world.turn(3)
    assert world.calls == ["submit"] and world.ids() == ["local-1", "local-2"]
    [line] = world.pool.lines()
    assert line == ("a-2 cannot be started again: the allocation has no free node for chat.a-2")
    assert world.pool.bring_back("a-2")
    world.turn()
    assert world.ids() == ["local-1", "local-12"] and world.pool.lines() == ()


@pytest.mark.parametrize("writes", [0, 1])
def test_a_full_disk_is_no_end_of_the_head(
    world: World, writes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is raised into the poller; what was started unwritten is found by its name."""
    world.end("local-2")
    world.turn()
    left, write = [writes], world.directory.write_pilots

    def full(pilots: Pilots) -> None:
        if not left[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        left[0] -= 1
        write(pilots)

    monkeypatch.setattr(world.directory, "write_pilots", full)
    world.pool.bring_back("a-2")
    world.turn(3)
    assert world.calls == ["submit"] * writes
    [line] = world.pool.lines()
    assert line.startswith("a-2 cannot be started again: ") and "No space left" in line
    left[0] = 9
    assert world.pool.bring_back("a-2")
    world.turn(2)
    assert world.calls == [["submit"], ["submit", "find"]][writes]
    assert world.ids() == ["local-1", "local-12"] and world.pool.lines() == ()


def test_a_drain_may_come_between_the_choice_of_a_call_and_the_call(world: World) -> None:
    world.end("local-2")
    world.turn()
    world.pool.bring_back("a-2")
    call = world.pool.next_call()
    assert call is not None
    world.members.draining.add("a-2")
    world.pool.tick(world.members, lambda: LOAD, ())
    asyncio.run(world.pool.run_call(call))
    assert not world.calls and world.ids() == ["local-1", "local-2"]


def test_an_answer_that_got_lost_leaves_no_second_job(world: World) -> None:
    world.end("local-2")
    world.turn()
    world.fails = [SlurmUnavailable("Socket timed out")]
    world.pool.bring_back("a-2")
    world.turn(4)
    assert world.calls == ["submit", "find"] and world.ids() == ["local-1", "local-12"]


def test_a_slurm_that_does_not_answer_is_not_asked_without_end(world: World) -> None:
    world.end("local-2")
    world.turn()
    world.pool.bring_back("a-2")
    world.fails = [SlurmUnavailable("Socket timed out") for _ in range(9)]

    def find(name: str) -> list[str]:
        world.calls.append("find")
        return []

    world.find = find  # type: ignore[method-assign]
    world.turn(20)
    assert world.calls == ["submit", "find", "submit", "find", "submit"]
    assert world.pool.lines() == ("a-2 cannot be started again: Socket timed out",)


def test_nothing_is_started_while_the_launcher_writes_or_the_head_ends(world: World) -> None:
    world.end("local-2")
    world.turn()
    world.pool.bring_back("a-2")
    found = world.directory.pilots()
    assert found is not None
    world.directory.write_pilots(Pilots("allocation", found.pilots, UNSENT, "7"))
    world.turn(2)
    assert not world.calls
    world.directory.write_pilots(found)
    world.pool.hold()
    world.turn(2)
    assert not world.calls


def test_what_it_does_not_have_and_what_it_cannot_do(world: World) -> None:
    assert world.pool.bring_back("a-7") == ""
    with pytest.raises(ServiceError, match="nobody keeps this pool") as caught:
        world.pool.release("n1", world.members)
    assert "flexslurm drain" in str(caught.value.hint)


def test_a_list_that_cannot_be_read_now_does_not_end_the_head(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.end("local-2")
    world.turn()
    world.pool.bring_back("a-2")

    def damaged() -> Pilots:
        raise ServiceError("pilots.json is damaged")

    with monkeypatch.context() as patch:
        patch.setattr(world.directory, "pilots", damaged)
        assert world.pool.next_call() is None
    world.turn()
    assert world.calls == ["submit"]
