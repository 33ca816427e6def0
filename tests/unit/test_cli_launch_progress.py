"""What a launch says while it waits: changes at once, counts now and then, nothing twice."""

from __future__ import annotations

from flexslurm.cli.launch_progress import COUNTS_EVERY_S, Progress
from flexslurm.messages import FragmentStatus, ServiceState, StatusAnswer


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def status(pilot: str, detail: str = "", pool: tuple[str, ...] = ()) -> StatusAnswer:
    fragment = FragmentStatus(
        name="a100-1", job_id="1", node="n1", gpu_type="a100", state=pilot, detail=detail, gpus=()
    )
    return StatusAnswer(
        service="s", head="h", endpoint="", state=ServiceState.STARTING, reason="waiting", epoch=1,
        gear=None, fragments=(fragment,), running=0, waiting=0, kv_used=0.0, finished=0,
        tokens_total=0, shifts=(), uptime_s=0.0, pool=pool,
    )  # fmt: skip


def test_each_state_is_said_once_and_at_once() -> None:
    said: list[str] = []
    progress = Progress(said.append, Clock())
    for state in ("pending", "pending", "running", "ready", "ready", "serving"):
        progress.status(status(state))
    assert said == [
        "a100-1: pending", "service: starting: waiting", "a100-1: running", "a100-1: ready",
        "a100-1: serving",
    ]  # fmt: skip


def test_counts_are_said_now_and_then_and_the_last_one_in_the_end() -> None:
    said: list[str] = []
    clock = Clock()
    progress = Progress(said.append, clock)
    for tenth in range(121):  # twelve seconds
        clock.now = 100.0 + tenth / 10
        progress.status(status("ready", f"weights {min(tenth, 100)} %"))
    assert [line for line in said if "a100" in line] == [
        "a100-1: ready (weights 0 %)", "a100-1: ready (weights 50 %)",
        "a100-1: ready (weights 100 %)",
    ]  # fmt: skip


def test_what_is_not_known_yet_is_said_only_where_it_stays_so() -> None:
    said: list[str] = []
    clock = Clock()
    progress = Progress(said.append, clock)
    progress.tell("a100-1", "unknown", "Slurm has not been asked yet")
    progress.tell("a100-1", "running")
    progress.tell("a100-2", "unknown", "Slurm does not answer")
    clock.now += COUNTS_EVERY_S
    progress.tell("a100-2", "unknown", "Slurm does not answer")
    assert said == ["a100-1: running", "a100-2: unknown (Slurm does not answer)"]


def test_of_the_pool_only_what_will_not_come_is_said() -> None:
    said: list[str] = []
    Progress(said.append, Clock()).status(status("ready", pool=("2 of 2 run", "no more: limit")))
    assert [line for line in said if "pool" in line] == ["pool, entry 2: no more: limit"]
