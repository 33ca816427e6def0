"""The pool's shell: writes before it submits, finds what it wrote, and leaves Slurm in peace."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from virtual_time import inline

from flexslurm.control.events import Cordon, PartNode
from flexslurm.control.keeper_load import ServiceLoad
from flexslurm.control.members import Members
from flexslurm.errors import ServiceError, SlurmError
from flexslurm.gear import NoGear
from flexslurm.head.pool import open_pool
from flexslurm.head.unkept import UnkeptPool
from flexslurm.messages import PROTOCOL, AgentHello, GpuInfo
from flexslurm.slurm.jobs import JobInfo
from flexslurm.slurm.states import JobState
from flexslurm.wire.service_dir import Pilot, Pilots
from tests.unit.pool_bench import IDLE, Bench


@pytest.fixture(autouse=True)
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncio.to_thread", inline)


# ------------------------------------------------------------------------- a thousand pilots


def test_a_thousand_pilots_are_one_call_in_each_interval(tmp_path: Path) -> None:
    bench = Bench(tmp_path, 1000).filled()
    bench.run(600)
    calls = bench.submitter.calls
    assert {what for _, what in calls} == {"squeue"}
    assert 115 <= len(calls) <= 121
    assert min(bench.gaps()) >= 4.0  # the clock is read once a second


def test_when_a_thousand_are_cancelled_at_once_there_is_no_burst(tmp_path: Path) -> None:
    bench = Bench(tmp_path, 1000).filled()

    def cancel_all() -> None:
        for job in bench.submitter.queue.alive():
            bench.submitter.queue.end(job.info.id, JobState.CANCELLED)

    bench.run(1800, (300, cancel_all))
    calls = [(at, what) for at, what in bench.submitter.calls if at >= 300]
    assert min(bench.gaps()) >= 4.0
    assert len(calls) <= 1500 / 5 + 1
    submitted = [what for _, what in calls].count("sbatch")
    assert submitted >= 0.45 * len(calls)  # every other call brings a pilot back
    assert all((a, b) != ("sbatch", "sbatch") for (_, a), (_, b) in itertools.pairwise(calls))


def test_a_large_pool_is_filled_in_turn_all_entries_alike(tmp_path: Path) -> None:
    """One submission in every second interval, however many are missing: each is a call."""
    second = "}, {gpu_type: a100, gpus: 2, partition: p, count: 100"
    bench = Bench(tmp_path, 100, more=second)
    bench.run(1000)
    calls = bench.submitter.calls
    assert min(bench.gaps()) >= 4.0 and len(calls) <= 1000 / 5 + 1
    assert all((a, b) != ("sbatch", "sbatch") for (_, a), (_, b) in itertools.pairwise(calls))
    sizes = [job.pilot.gpus for job in bench.submitter.queue.jobs.values()]
    assert 95 <= len(sizes) <= 101
    assert all(abs(sizes[:n].count(1) - sizes[:n].count(2)) <= 1 for n in range(len(sizes)))


def test_a_slurm_that_does_not_answer_is_asked_ever_more_rarely(tmp_path: Path) -> None:
    bench = Bench(tmp_path, 1000).filled()

    def silent(now: bool) -> Callable[[], None]:
        return lambda: setattr(bench.submitter, "silent", now)

    bench.run(1500, (100, silent(True)), (1100, silent(False)))
    during = [at for at, _ in bench.submitter.calls if 100 < at < 1100]
    assert len(during) <= 1000 / 20 + 5  # 40 s at most, half of it for jitter
    after = [at for at, _ in bench.submitter.calls if at >= 1100]
    assert after[0] <= 1145 and len(after) >= 70  # at its pace again


# ----------------------------------------------------------------------------------- intents


def test_what_is_submitted_is_written_down_before(tmp_path: Path) -> None:
    bench = Bench(tmp_path, 1)
    seen: list[Pilots | None] = []
    bench.submitter.on_submit = lambda: seen.append(bench.directory.pilots())
    bench.run(30)
    assert seen[0] is not None
    assert [(p.fragment, p.job_id) for p in seen[0].pilots] == [("a100-1", "")]
    after = bench.directory.pilots()
    assert after is not None and [p.job_id for p in after.pilots] == ["1"]
    assert after.wanted == (1,)


def test_what_was_drained_is_written_down(tmp_path: Path) -> None:
    """The next head submits nothing in its place, and can have it back."""
    bench = Bench(tmp_path, 2).filled()
    bench.run(
        60,
        (10, lambda: bench.drain("a100-2")),
        (20, lambda: bench.submitter.queue.end("2", JobState.COMPLETED, 0)),
    )
    after = bench.directory.pilots()
    assert after is not None and (after.wanted, after.drained) == ((1,), {"a100-2": 0})
    bench.members = Members()
    pool = bench.run(120)
    assert "drained: a100-2 (" in pool.lines()[0]
    assert "sbatch" not in {what for _, what in bench.submitter.calls}
    assert pool.bring_back("a100-2") == "a100-2 had ended: another is submitted in its place"
    bench.now += 1.0
    pool.tick(Members(), lambda: IDLE, ())
    back = bench.directory.pilots()
    assert back is not None and (back.wanted, back.drained) == ((2,), {})


def test_a_drain_that_the_next_head_sees_to_its_end_is_counted_once(tmp_path: Path) -> None:
    bench = Bench(tmp_path, 2).filled()
    bench.run(30, (10, lambda: bench.drain("a100-2")))
    bench.run(60, (20, lambda: bench.submitter.queue.end("2", JobState.COMPLETED, 0)))
    after = bench.directory.pilots()
    assert after is not None and (after.wanted, after.drained) == ((1,), {"a100-2": 0})
    # a launch of a file with other numbers has forgotten the sizes, but not the order
    bench.filled()
    bench.run(30)
    again = bench.directory.pilots()
    assert again is not None and again.wanted == (1,)


def test_a_head_that_dies_in_a_submission_leaves_no_second_job(tmp_path: Path) -> None:
    bench = Bench(tmp_path, 2)

    def die() -> None:
        bench.submitter.queue.submit(Pilot("a100-1", "", "p", "a100", 1, 1))
        raise KeyboardInterrupt  # as if it were killed: nothing more is written

    bench.submitter.on_submit = die
    with pytest.raises((KeyboardInterrupt, AssertionError)):
        bench.run(30)
    bench.submitter.on_submit = lambda: None
    bench.run(300)
    names = sorted(job.pilot.fragment for job in bench.submitter.queue.alive())
    assert names == ["a100-1", "a100-2"]


def test_nothing_is_submitted_that_cannot_be_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path, 1)

    def full(_: Pilots) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bench.directory, "write_pilots", full)
    bench.run(100)
    assert "sbatch" not in {what for _, what in bench.submitter.calls}
    monkeypatch.undo()


def test_the_launcher_ends_its_writing_first(tmp_path: Path) -> None:
    bench = Bench(tmp_path, 1, Pilots("slurm", (), ""))

    def launched() -> None:
        bench.directory.write_pilots(Pilots("slurm", (), "77"))

    bench.run(60, (12, launched))
    first = next(at for at, what in bench.submitter.calls if what == "sbatch")
    assert first >= 12
    after = bench.directory.pilots()
    assert after is not None and after.head_job == "77" and len(after.pilots) == 1


def test_a_refusal_is_journalled_in_words(tmp_path: Path) -> None:
    bench = Bench(tmp_path, 1)

    def refuse() -> None:
        raise SlurmError("sbatch: error: Batch job submission failed: Invalid qos specification")

    bench.submitter.on_submit = refuse
    pool = bench.run(100)
    said = [record["why"] for record in bench.records if record["what"] == "refused"]
    assert len(said) == 1 and "partitions.*.qos" in said[0]
    assert "no more are submitted for now: the QOS is not valid" in pool.lines()[0]


def test_a_head_that_stops_waits_for_the_call_that_is_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # real threads
    bench = Bench(tmp_path, 1)
    pool = bench.pool()

    async def main() -> None:
        release = asyncio.Event()
        loop = asyncio.get_running_loop()

        def slow() -> None:
            loop.call_soon_threadsafe(release.set)
            import time

            time.sleep(0.3)

        bench.submitter.on_submit = slow
        call = pool.next_call()
        assert call is not None
        task = asyncio.create_task(pool.run_call(call))
        await release.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        pool.hold()
        await pool.close()
        assert pool.next_call() is None

    asyncio.run(main())
    after = bench.directory.pilots()
    assert after is not None and [p.job_id for p in after.pilots] == ["1"]


def test_an_allocation_and_a_pool_that_nobody_keeps(tmp_path: Path) -> None:
    bench = Bench(tmp_path, 1)
    off = bench.service.model_copy(
        update={"keeping": bench.service.keeping.model_copy(update={"enabled": False})}
    )
    for service, cluster in ((bench.service, "allocation"), (off, "slurm")):
        made = open_pool(
            service, bench.site, bench.directory, Pilots(cluster), bench.submitter,  # type: ignore[arg-type]
            tell=lambda event: None, record=bench.records.append, choose=NoGear,
        )  # fmt: skip
        assert isinstance(made, UnkeptPool)


# ------------------------------------------------------------------------- few requests


@pytest.mark.parametrize("running", [1, 0])
def test_few_requests_keep_what_holds_the_model_and_none_do_not(
    tmp_path: Path, running: int
) -> None:
    bench = Bench(tmp_path, 3, more=", min_count: 1").filled()
    pool = bench.pool()
    pool._holds = lambda signature: signature.gpus() >= 2
    pool.looked(pool.look([pilot.job_id for pilot in pool.pilots]))
    for number in (1, 2, 3):
        hello = AgentHello(
            protocol=PROTOCOL, incarnation=f"a{number}", fragment=f"a100-{number}", node="n",
            address="127.0.0.1", gpu_type="a100", gpus=(GpuInfo(0, 1 << 30),),
        )  # fmt: skip
        bench.members.join(hello, 0.0)
    sizes = set()
    while bench.now < 4000:
        bench.now += 1.0
        pool.tick(bench.members, lambda: ServiceLoad(running, 0, 16, 0.1), ())
        sizes.add(pool.keeper.wanted[0])
        if pool.keeper.wanted[0] == 2:  # the service has moved off the third
            bench.members.drop("a3")
    assert sizes == ({3, 2} if running else {3, 2, 1})


# ------------------------------------------------------------------------- nodes given back


class Agents:
    """Members with one agent on each node of a pilot."""

    def __init__(self, *nodes: str) -> None:
        self.members = Members()
        for node in nodes:
            hello = AgentHello(
                protocol=PROTOCOL, incarnation=f"a-{node}", fragment="a100-1", node=node,
                address="127.0.0.1", gpu_type="a100", gpus=(),
            )  # fmt: skip
            self.members.join(hello, 0.0)


def test_a_node_is_given_back_when_its_agent_has_ended(tmp_path: Path) -> None:
    bench = Bench(tmp_path, 1).filled()
    told: list[object] = []
    pool = bench.pool()
    pool._tell = told.append
    agents = Agents("n1", "n2")
    assert "its pilot goes on" in pool.release("n2", agents.members)
    assert told == [PartNode("n2")]
    agents.members.agents["a-n2"].parting = True
    pool.tick(agents.members, lambda: IDLE, ())
    assert not pool.keeper.kept["a100-1"].part_with
    agents.members.drop("a-n2")
    bench.now += 1
    pool.tick(agents.members, lambda: IDLE, ())
    assert pool.keeper.kept["a100-1"].part_with == {"n2"}
    assert "its pilot ends" in pool.release("n1", agents.members)
    assert told[-1] == Cordon("a100-1", cordon=True, drain=True)


def test_a_node_that_cannot_be_given_back_alone(tmp_path: Path) -> None:
    bench = Bench(tmp_path, 1).filled()
    pool, agents = bench.pool(), Agents("n1", "n2")
    with pytest.raises(ServiceError, match="no node 'n9'") as caught:
        pool.release("n9", agents.members)
    assert "n1, n2" in (caught.value.hint or "")
    pool.keeper.kept["a100-1"].info = JobInfo("1", JobState.RUNNING, batch_host="n1")
    with pytest.raises(ServiceError, match="runs on 'n1'"):
        pool.release("n1", agents.members)
