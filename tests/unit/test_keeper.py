"""The pool is kept as asked for: what ended comes back, what Slurm refuses is not asked for on."""

from __future__ import annotations

import itertools

import pytest

from flexslurm.control.keeper_load import resize
from flexslurm.control.keeper_values import (
    PilotShape,
    PilotStage,
    PoolEntry,
    Submit,
)
from flexslurm.slurm.states import JobState
from flexslurm.wire.service_dir import Pilot
from tests.keeper_world import World, entry


def test_the_pool_is_filled_one_call_at_a_time() -> None:
    world = World(entry())
    world.step()
    assert world.names() == ["a100-1"]
    world.step(times=5)
    assert world.names() == ["a100-1", "a100-2"]


@pytest.mark.parametrize(
    "state",
    [JobState.CANCELLED, JobState.NODE_FAIL, JobState.TIMEOUT, JobState.PREEMPTED, JobState.FAILED],
)
def test_what_ended_after_a_while_comes_back_at_once_under_its_name(state: JobState) -> None:
    world = World(entry())
    world.step(times=3)
    world.join()
    world.step(100)
    world.queue.end(world.job("a100-1"), state, 1)
    world.step()
    world.step()
    assert world.names() == ["a100-1", "a100-2"]
    assert any(f"job 1 has ended: {state}" in line for line in world.said)


def test_a_requeued_pilot_is_waited_for() -> None:
    world = World(entry())
    world.step(times=3)
    world.join()
    world.begin = False
    world.queue.requeue(world.job("a100-1"))
    world.step(times=50)
    assert len(world.queue.submissions) == 2
    world.begin = True
    world.step()
    assert world.keeper.kept["a100-1"].stage is PilotStage.RUNNING


def test_a_pilot_that_dies_at_once_is_given_up_and_tried_again_much_later() -> None:
    world = World(entry(1, 1, 1), failures=3, give_up_s=3600)
    for _ in range(700):
        world.step()
        for job in world.queue.alive():
            world.queue.end(job.info.id, JobState.FAILED, 1)
    assert len(world.queue.submissions) == 3
    assert world.queue.submissions[-1] - world.queue.submissions[0] <= 60
    stopped = [line for line in world.said if "no more a100 pilots are submitted" in line]
    assert len(stopped) == 1 and "3 pilots in a row died at once" in stopped[0]
    world.step(times=60)
    assert len(world.queue.submissions) == 4


def test_a_pilot_that_is_preempted_at_once_is_tried_more_and_more_rarely() -> None:
    world = World(entry(1, 1, 1))
    for _ in range(720):  # an hour
        world.step()
        for job in world.queue.alive():
            world.queue.end(job.info.id, JobState.PREEMPTED)
    gaps = [b - a for a, b in itertools.pairwise(world.queue.submissions)]
    assert len(world.queue.submissions) <= 12
    assert gaps == sorted(gaps) and gaps[-1] <= 910
    assert not any("no more" in line for line in world.said)


def test_a_refusal_that_lasts_stops_it_and_is_said_with_what_to_do() -> None:
    world = World(entry())
    world.refuse = "sbatch: error: Invalid account or account/partition combination specified"
    world.step(times=200)
    assert not world.queue.submissions
    assert any(
        "the account is not valid" in line and "partitions.*.account" in line for line in world.said
    )
    assert sum("no more a100 pilots" in line for line in world.said) == 1


def test_a_refusal_that_passes_is_tried_again() -> None:
    world = World(entry())
    world.refuse = "sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying."
    world.step(times=20)
    world.refuse = ""
    world.step(times=100)
    assert world.names() == ["a100-1", "a100-2"]


def test_a_refused_shape_gives_way_to_the_next() -> None:
    shapes = (PilotShape(8), PilotShape(2))
    world = World(PoolEntry("a100", "scavenge", shapes, 1, 1, 1))
    world.refuse = "Requested node configuration is not available"
    world.step()
    world.refuse = ""
    world.step(times=2)
    assert [job.pilot.gpus for job in world.queue.alive()] == [2]


def test_a_shape_that_waits_too_long_gives_way_to_the_next() -> None:
    shapes = (PilotShape(8), PilotShape(2))
    world = World(PoolEntry("a100", "scavenge", shapes, 1, 1, 1), waiting_s=600)
    world.begin = False
    world.step(times=119)
    assert [job.pilot.gpus for job in world.queue.alive()] == [8]
    world.step(times=6)
    assert [job.pilot.gpus for job in world.queue.alive()] == [2]
    world.begin = True
    world.step(times=400)
    assert [job.pilot.gpus for job in world.queue.alive()] == [2]


def test_a_held_job_is_said_once_and_left_alone() -> None:
    world = World(entry(1, 1, 1))
    world.begin = False
    world.step()
    world.queue.set("1", JobState.PENDING, held=True, reason="held by an administrator: it needs "
                    "scontrol release")  # fmt: skip
    world.step(times=50)
    assert sum("scontrol release" in line for line in world.said) == 1
    assert world.names() == ["a100-1"]


def test_an_allocation_without_its_script_is_said_cancelled_and_replaced() -> None:
    world = World(entry(1, 1, 1))
    world.step(times=2)
    world.step(100)
    world.queue.set("1", JobState.RUNNING, nodes=("n2",), batch_host="n1")
    world.step(times=12)
    assert any("lost its batch host" in line for line in world.said)
    assert [job.info.id for job in world.queue.alive()] == ["2"]


def test_a_job_that_slurm_forgot_is_replaced_but_not_at_once() -> None:
    world = World(entry(1, 1, 1), unknown_s=60)
    world.step(times=2)
    world.queue.jobs.clear()
    world.step(times=11)
    assert world.names() == []
    world.step(times=12)
    assert world.names() == ["a100-1"]


def test_a_forgotten_job_whose_agents_speak_is_there() -> None:
    world = World(entry(1, 1, 1))
    world.step(times=2)
    world.join()
    world.queue.jobs.clear()
    world.step(times=100)
    assert len(world.queue.submissions) == 1


def test_a_head_that_died_in_a_submission_finds_its_job_by_name() -> None:
    first = World(entry(1, 1, 1))
    call = first.keeper.next_call(first.queue.now)
    assert isinstance(call, Submit)
    written = first.keeper.pilots()
    assert [pilot.job_id for pilot in written] == [""]
    first.queue.submit(call.pilot)
    second = World(entry(1, 1, 1), pilots=written)
    second.queue = first.queue
    second.step(times=100)
    assert len(second.queue.submissions) == 1
    assert second.job("a100-1") == "1"


def test_a_submission_that_was_never_made_is_made_after_a_while() -> None:
    first = World(entry(1, 1, 1))
    first.keeper.next_call(first.queue.now)
    second = World(entry(1, 1, 1), pilots=first.keeper.pilots(), unsure_s=60)
    second.step(times=11)
    assert second.names() == []
    second.step(times=10)
    assert second.names() == ["a100-1"]


def test_a_job_too_many_is_cancelled() -> None:
    world = World(entry(1, 1, 1))
    world.step(times=2)
    world.queue.submit(Pilot("a100-1", "", "scavenge", "a100", 4, 1))
    world.step(times=4)
    assert [job.info.id for job in world.queue.alive()] == ["1"]
    assert any("one too many" in line for line in world.said)


def test_jobs_that_are_no_pilots_are_left_alone() -> None:
    world = World(entry(1, 1, 1))
    world.queue.submit(Pilot("head", "", None, "", 0, 1))
    world.queue.submit(Pilot("l40s-1", "", None, "l40s", 2, 1))
    world.step(times=20)
    assert world.names() == ["a100-1", "head", "l40s-1"]


def test_without_an_answer_slurm_is_left_in_peace() -> None:
    world = World(entry(3, 3, 3))
    tries = []
    for _ in range(720):
        world.queue.now += 5
        call = world.keeper.next_call(world.queue.now)
        if isinstance(call, Submit):
            tries.append(world.queue.now)
            world.keeper.unanswered(world.queue.now, call.pilot.fragment)
        if world.queue.now % 100 == 0:
            world.look()
    assert 2 <= len(tries) <= 10
    assert len(world.keeper.kept) <= 3


def test_few_submissions_without_an_answer_are_open_at_once() -> None:
    world = World(entry(5, 5, 5), retry_s=1, retry_most_s=1, unsure_s=600)
    for _ in range(100):
        world.queue.now += 5
        call = world.keeper.next_call(world.queue.now)
        if isinstance(call, Submit):
            world.keeper.unanswered(world.queue.now, call.pilot.fragment)
    assert len(world.keeper.kept) == 2


def test_one_that_is_being_let_go_still_counts() -> None:
    world = World(entry(1, 1, 1))
    world.step(times=2)
    world.join()
    world.keeper.drained_by_hand("a100-1")
    resize(world.keeper, 1, "busy")
    world.step(times=10)
    assert world.keeper.wanted == [1] and len(world.queue.submissions) == 1
    world.queue.end("1", JobState.COMPLETED, 0)
    world.step(times=2)
    assert len(world.queue.submissions) == 2


# ------------------------------------------------------------------------------- hand-over


def test_a_successor_comes_before_the_walltime_and_relieves_the_old_one() -> None:
    world = World(entry(1, 1, 1, handover_s=300.0))
    world.walltime_s = 3600
    world.step(times=2)
    world.join()
    while world.names() == ["a100-1"]:
        world.step(20)
    left = world.queue.told("1").end_in_s
    assert left is not None and 270 <= left <= 300
    assert world.names() == ["a100-1", "a100-2"]
    world.step()
    assert not world.drains  # it runs, and is not ready
    world.join()
    world.step(times=3)
    assert world.drains == ["a100-1"]
    assert len(world.queue.submissions) == 2
    world.queue.end("1", JobState.COMPLETED, 0)
    world.step(times=20)
    assert world.names() == ["a100-2"]
    assert any("a100-2 has taken its place" in line for line in world.said)


def test_a_successor_that_does_not_come_in_time_takes_the_place_when_it_comes() -> None:
    world = World(entry(1, 1, 1, handover_s=300.0))
    world.walltime_s = 3600
    world.step(times=2)
    world.join()
    world.begin = False
    while len(world.names()) < 2:
        world.step(20)
    world.queue.end("1", JobState.TIMEOUT)
    world.present.clear()
    world.step(times=30)
    assert world.names() == ["a100-2"]
    assert len(world.queue.submissions) == 2


def test_a_preempted_pilot_that_waits_gives_way_to_its_successor() -> None:
    world = World(entry(1, 1, 1, handover_s=300.0))
    world.walltime_s = 3600
    world.step(times=2)
    world.join()
    while len(world.names()) < 2:
        world.step(20)
    world.look()
    world.begin = False
    world.queue.requeue("1")
    world.present.clear()
    world.step()
    world.join()
    world.step(times=3)
    assert world.names() == ["a100-2"]


def test_the_lead_is_learnt_from_the_waits() -> None:
    world = World(entry(1, 1, 1))
    for _ in range(20):
        world.keeper.waits.queued(0, 40.0)
        world.keeper.waits.started(0, 20.0)
    assert world.keeper.waits.lead_s(0, 3600.0, None) == 90.0
    assert world.keeper.waits.lead_s(0, 100.0, None) == 50.0
    assert world.keeper.waits.lead_s(0, None, 7.0) == 7.0
