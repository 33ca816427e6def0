"""Whatever Slurm answers and whenever the head dies: never too many pilots, and back to enough."""

from __future__ import annotations

import pytest
from fake_slurm_queue import FakeQueue
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flexslurm.control.keeper import PoolKeeper
from flexslurm.control.keeper_load import resize
from flexslurm.control.keeper_values import (
    CancelJobs,
    Drain,
    KeeperSettings,
    Look,
    PilotShape,
    PilotStage,
    PoolEntry,
    Present,
    Submit,
)
from flexslurm.slurm.states import JobState

INTERVAL_S = 5.0
SETTINGS = KeeperSettings(retry_s=10, retry_most_s=80, failures=3, give_up_s=300, unsure_s=60)
REFUSALS = ("Requested node configuration is not available", "Slurm temporarily unable to accept")
ENDS = (
    (JobState.CANCELLED, None),
    (JobState.PREEMPTED, None),
    (JobState.NODE_FAIL, None),
    (JobState.TIMEOUT, None),
    (JobState.FAILED, 1),
    (JobState.FAILED, 75),
    (JobState.COMPLETED, 0),
    (JobState.OUT_OF_MEMORY, None),
)

# What becomes of a call, and what happens in the cluster meanwhile.
fates = st.sampled_from(
    ["done"] * 6 + ["lost", "unheard", "refused for good", "refused for now", "head dies before",
                    "head dies after", "no answer"]
)  # fmt: skip
happenings = st.sampled_from(
    ["start"] * 4 + ["join"] * 3 + ["end", "requeue", "hold", "orphan", "purge", "nothing",
                     "grow", "shrink", "drain", "bring back", "long time", "head restarts"]
)  # fmt: skip
steps = st.lists(st.tuples(fates, happenings, st.integers(0, 99)), max_size=60)
entries = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 2), st.booleans()),
    min_size=1, max_size=2,
)  # fmt: skip


class Walk:
    """A keeper that may be replaced at any moment by one that knows only what was written down."""

    def __init__(self, sizes: list[tuple[int, int, int, bool]]) -> None:
        self.queue = FakeQueue()
        self.entries = [
            PoolEntry(
                f"g{number}", "p", (PilotShape(4), PilotShape(2)), least, least + more,
                max(least + more + most, 1), None, 100.0 if handover else None,
            )
            for number, (least, more, most, handover) in enumerate(sizes)
        ]  # fmt: skip
        self.keeper = PoolKeeper(self.entries, SETTINGS, (), self.queue.now)
        self.note()
        self.here: set[str] = set()
        self.calls = 0
        self.pairs: dict[str, str] = {}
        """Successors and those whose place they take, by job."""

    def call(self, fate: str) -> None:
        keeper, queue = self.keeper, self.queue
        call = keeper.next_call(queue.now)
        self.note()
        if call is None:
            return
        self.calls += 1
        if isinstance(call, CancelJobs):
            if fate in ("done", "head dies after", "unheard"):
                for job in call.jobs:
                    if job in queue.jobs and not queue.told(job).state.over:
                        queue.end(job, JobState.CANCELLED)
            if fate == "done":
                keeper.cancelled(call.jobs)
            elif fate == "no answer":
                keeper.no_answer(queue.now)
        else:
            self.submit(call, fate)
        if fate.startswith("head dies"):
            self.restart()
        else:
            self.note()

    def submit(self, call: Submit, fate: str) -> None:
        keeper, queue, name = self.keeper, self.queue, call.pilot.fragment
        if fate in ("done", "head dies after", "unheard"):
            before = keeper.kept.get(call.pilot.replaces)
            job = queue.submit(call.pilot, 600.0)
            if before is not None:
                self.pairs[job] = before.pilot.job_id
            if fate == "done":
                keeper.submitted(queue.now, name, job)
        if fate in ("lost", "unheard", "no answer"):
            keeper.unanswered(queue.now, name)
        elif fate.startswith("refused"):
            keeper.refused(queue.now, name, REFUSALS[fate.endswith("now")])

    def note(self) -> None:
        """What is on disk."""
        keeper = self.keeper
        self.written, self.wanted = keeper.pilots(), tuple(keeper.wanted)
        self.drained = dict(keeper.away)

    def restart(self) -> None:
        now = self.queue.now
        self.keeper = PoolKeeper(
            self.entries, SETTINGS, self.written, now, self.wanted, self.drained
        )

    def happen(self, what: str, number: int) -> None:
        alive, queue, keeper = self.queue.alive(), self.queue, self.keeper
        job = alive[number % len(alive)] if alive else None
        match what:
            case "purge":
                queue.purge()
            case "long time":
                queue.now += 100.0
            case "head restarts":
                self.restart()
            case "grow" | "shrink":
                resize(keeper, 1 if what == "grow" else -1, "the test")
            case "drain" if keeper.kept:
                keeper.drained_by_hand(sorted(keeper.kept)[number % len(keeper.kept)])
            case "bring back" if keeper.away:
                assert keeper.bring_back(sorted(keeper.away)[number % len(keeper.away)])
        if job is None:
            return
        running = job.info.state is JobState.RUNNING
        match what:
            case "start" if not running:
                queue.start(job.info.id)
            case "join" if running:
                self.here.add(job.pilot.fragment)
            case "end":
                state, code = ENDS[number % len(ENDS)]
                queue.end(job.info.id, state, code)
            case "requeue" if running:
                queue.requeue(job.info.id)
            case "hold" if not running:
                queue.set(job.info.id, JobState.PENDING, held=True, reason="held")
            case "orphan" if running:
                queue.set(job.info.id, JobState.RUNNING, nodes=("n2",), batch_host="n1")

    def look(self) -> None:
        queue, keeper = self.queue, self.keeper
        for job in queue.alive():
            ran = queue.now - (job.started_at or queue.now)
            if job.walltime_s is not None and ran >= job.walltime_s:
                queue.end(job.info.id, JobState.TIMEOUT)
        running = {j.pilot.fragment for j in queue.alive() if j.info.state is JobState.RUNNING}
        self.here &= running
        infos, ours = queue.survey([p.job_id for p in keeper.pilots() if p.job_id])
        keeper.looked(queue.now, Look(infos, ours))
        keeper.present(queue.now, {name: Present(True, True) for name in self.here})
        for word in keeper.words():
            kept = keeper.kept.get(word.fragment) if isinstance(word, Drain) else None
            if kept is not None and queue.told(kept.pilot.job_id).state.active:
                queue.end(kept.pilot.job_id, JobState.COMPLETED, 0)
        self.note()

    def check(self) -> None:
        """Jobs there are, whoever knows of them: a pilot and its successor count as one."""
        for number, entry in enumerate(self.entries):
            mine = [job for job in self.queue.alive() if job.pilot.entry == number]
            names = {job.pilot.fragment for job in mine}
            assert len(names) == len(mine), "two jobs of one fragment"
            ids = {job.info.id for job in mine}
            assert sum(self.pairs.get(job.info.id) not in ids for job in mine) <= entry.most
            assert len(mine) <= 2 * entry.most
            assert self.keeper.count(number) <= entry.most
            assert self.keeper.wanted[number] <= entry.most
        assert not self.keeper.away.keys() & self.keeper.kept.keys(), "away, and here"


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(entries, steps)
def test_never_too_many_and_back_to_enough(
    sizes: list[tuple[int, int, int, bool]], walk: list[tuple[str, str, int]]
) -> None:
    world = Walk(sizes)
    for fate, what, number in walk:
        world.queue.now += INTERVAL_S
        world.call(fate)
        world.happen(what, number)
        world.check()
        if fate != "no answer":
            world.look()
            world.check()
    assert world.calls <= len(walk)
    before = len(world.queue.submissions)
    for job in world.queue.alive():  # whoever held them lets go
        world.queue.set(job.info.id, JobState.PENDING, held=False, nodes=(), batch_host=None)
    for _ in range(120):
        world.queue.now += INTERVAL_S
        world.call("done")
        for job in world.queue.alive():
            job.walltime_s = None
            if job.info.state is JobState.PENDING:
                world.queue.start(job.info.id)
            world.here.add(job.pilot.fragment)
        for kept in world.keeper.kept.values():  # the service has left what was drained
            job_id = kept.pilot.job_id
            if kept.drained and job_id and world.queue.told(job_id).state.active:
                world.queue.end(job_id, JobState.COMPLETED, 0)
        world.look()
        world.check()
    for number in range(len(world.entries)):
        alive = [j for j in world.queue.alive() if j.pilot.entry == number]
        assert len(alive) == world.keeper.wanted[number] == len(world.keeper.staying(number))
        assert all(kept.stage is PilotStage.RUNNING for kept in world.keeper.of_entry(number))
    assert len(world.queue.submissions) - before <= 2 * sum(e.most for e in world.entries)


@pytest.mark.parametrize("state", [JobState.FAILED, JobState.PREEMPTED, JobState.CANCELLED])
def test_no_storm_of_submissions_whatever_ends_them(state: JobState) -> None:
    """A hundred pilots that never live: each interval one call, and ever fewer of them."""
    entry = PoolEntry("g", "p", (PilotShape(4), PilotShape(2)), 100, 100, 100)
    queue = FakeQueue()
    keeper = PoolKeeper([entry], KeeperSettings(), (), queue.now)
    for _ in range(720):  # an hour
        queue.now += INTERVAL_S
        call = keeper.next_call(queue.now)
        if isinstance(call, Submit):
            keeper.submitted(queue.now, call.pilot.fragment, queue.submit(call.pilot))
        for job in queue.alive():
            queue.end(job.info.id, state, 1)
        infos, ours = queue.survey([p.job_id for p in keeper.pilots() if p.job_id])
        keeper.looked(queue.now, Look(infos, ours))
    assert len(queue.submissions) <= 15
