"""How a status shows pilots without an agent: what came of them, and where they ran."""

from __future__ import annotations

from collections.abc import Sequence

from flexslurm.head.installs import Installs
from flexslurm.head.poller import JobPoller
from flexslurm.head.status import JobView, status_answer
from flexslurm.messages import FragmentStatus
from flexslurm.slurm.jobs import JobInfo
from flexslurm.slurm.states import JobState
from flexslurm.wire.service_dir import Pilot
from tests.head_world import HeadWorld


def seen(*looks: JobInfo) -> dict[str, JobView]:
    """What a poller keeps of these looks at job 7."""
    poller = JobPoller(None, list, lambda event: None, 1.0)  # type: ignore[arg-type]
    for info in looks:
        poller.take([Pilot("a-1", "7", None, "a", 2, 1)], {"7": info})
    return poller.views


def shown(views: dict[str, JobView], draining: Sequence[str] = ()) -> FragmentStatus:
    world = HeadWorld(seed=1, memory_bytes=1 << 20)
    world.control.members.draining |= set(draining)
    answer = status_answer(
        service="s", endpoint="", control=world.control, figures=world.ledger.figures(),
        pilots=[Pilot("a-1", "7", None, "a", 2, 1)], jobs=views, stopping=False, now=0.0,
        started_at=0.0, installs=Installs(),
    )  # fmt: skip
    (fragment,) = answer.fragments
    return fragment


RUNS = JobInfo("7", JobState.RUNNING, nodes=("n4",))


def test_what_has_ended_by_an_operator_s_drain_is_no_loss() -> None:
    views = seen(RUNS, JobInfo("7", JobState.COMPLETED))
    assert (shown(views).state, shown(views).node) == ("lost", "n4")
    drained = shown(views, ["a-1"])
    assert (drained.name, drained.state, drained.node) == ("a-1", "drained", "n4")


def test_what_still_runs_or_waits_says_so() -> None:
    assert (shown(seen(RUNS), ["a-1"]).state, shown(seen(RUNS)).node) == ("running", "n4")
    requeued = shown(seen(RUNS, JobInfo("7", JobState.PENDING, "BeginTime")))
    assert (requeued.state, requeued.node) == ("pending", None)
    unasked = shown({})
    assert (unasked.state, unasked.node) == ("unknown", None)
