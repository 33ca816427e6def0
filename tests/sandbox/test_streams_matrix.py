"""Whatever Slurm does to a pilot, its node or itself: no stream is lost, no token changes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from submitter_suite import wait

from tests.sandbox.stream_kit import World, world

pytestmark = [pytest.mark.shared_service, pytest.mark.slow, pytest.mark.timeout(600)]
SANDBOX = """\
nodes:
  s: {gpu_type: a100, gpus: 1}
  p: {gpu_type: a100, gpus: 1}
  q: {gpu_type: a100, gpus: 1}
  r: {gpu_type: a100, gpus: 1}
  c: {}
gpu_types: {a100: {}}
partitions:
  keep: {nodes: [s], default: true}
  now: {nodes: [p], preempt_mode: REQUEUE, grace: 0s}
  long: {nodes: [q], preempt_mode: REQUEUE, grace: 20s}
  ending: {nodes: [r], preempt_mode: CANCEL, grace: 20s}
  high: {nodes: [p, q, r], priority_tier: 10}
  cpu: {nodes: [c]}
head_partition: cpu
kill_wait: 4s
slurmd_timeout: 10s
"""
KEPT, NOW, LONG, ENDING = "a100-1", "a100-2", "a100-3", "a100-4"
Report = Callable[[str, object], None]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[World]:
    """Four pilots of one GPU; two of them hold the model."""
    home = tmp_path_factory.mktemp("matrix")
    pool = [(name, "a100") for name in ("keep", "now", "long", "ending")]
    with world(home, tiny_model, SANDBOX, pool) as made:
        yield made


@pytest.fixture(autouse=True)
def _no_urgent_jobs(here: World) -> Iterator[None]:
    yield
    here.end_urgent()


def test_preemption_without_grace(here: World, record_property: Report) -> None:
    here.ready(KEPT, NOW)
    node = here.node_of(NOW)
    here.act(
        "preemption, grace 0, REQUEUE", NOW,
        lambda: here.submit_urgent("high", node), record_property,
    )  # fmt: skip


def test_preemption_with_20_s(here: World, record_property: Report) -> None:
    """When the other job has gone the pilot is back: the same job, a new member."""
    here.ready(KEPT, LONG)
    job, node = here.service.job_of(LONG), here.node_of(LONG)
    heard = here.act(
        "preemption, grace 20 s, REQUEUE", LONG,
        lambda: here.submit_urgent("high", node), record_property,
    )  # fmt: skip
    assert heard["event"] == "leaving"
    here.end_urgent()
    here.ready(KEPT, LONG)
    assert here.service.job_of(LONG) == job and here.slurm.jobs([job])[job].restarts >= 1


def test_preemption_that_cancels(here: World, record_property: Report) -> None:
    here.ready(KEPT, ENDING)
    node = here.node_of(ENDING)
    here.act(
        "preemption, grace 20 s, CANCEL", ENDING,
        lambda: here.submit_urgent("high", node), record_property,
    )  # fmt: skip


def test_preemption_with_the_job_s_own_signal(here: World, record_property: Report) -> None:
    """send_user_signal: the agents hear SIGUSR1 in place of SIGTERM."""
    here.ready(KEPT, LONG)
    node = here.node_of(LONG)
    line = "SlurmctldParameters=preempt_send_user_signal\n"
    plain = here.box.conf.read_text()
    here.box.conf.write_text(plain + line)
    here.slurm.call("scontrol", "reconfigure")
    try:
        here.act(
            "preemption, send_user_signal", LONG,
            lambda: here.submit_urgent("high", node), record_property,
        )  # fmt: skip
        logs = (here.service.directory.logs / LONG).glob("*.log")
        assert any("SIGUSR1: must leave within 20 s" in path.read_text() for path in logs)
    finally:
        here.box.conf.write_text(plain)
        here.slurm.call("scontrol", "reconfigure")


def test_scontrol_requeue(here: World, record_property: Report) -> None:
    here.ready(KEPT, NOW)
    job = here.service.job_of(NOW)
    here.act("scontrol requeue", NOW, lambda: here.slurm.requeue(job), record_property)


def test_scancel_with_a_signal(here: World, record_property: Report) -> None:
    """The job would go on: who sends this wants it to leave, and it does."""
    here.ready(KEPT, NOW)
    job = here.service.job_of(NOW)
    here.act(
        "scancel -s TERM", NOW,
        lambda: here.slurm.call("scancel", "-s", "TERM", job), record_property,
    )  # fmt: skip


def test_a_node_goes_down(here: World, record_property: Report) -> None:
    """slurmd, the steps and all their processes are gone at once; later the node is back."""
    here.ready(KEPT, LONG)
    node = here.node_of(LONG)
    try:
        here.act("node down", LONG, lambda: here.box.kill(node), record_property)
        wait(lambda: _state(here, node).startswith("DOWN"), 40, "Slurm has seen it")
    finally:
        here.box.start(node)
    here.ready(KEPT, LONG)


def test_only_the_daemon_of_a_node_dies(here: World, record_property: Report) -> None:
    """Its steps go on, and so do the streams; nobody needs to hear of it."""
    here.ready(KEPT, NOW)
    node = here.node_of(NOW)
    here.load.start()
    try:
        here.load.in_the_middle()
        here.box.kill_daemon(node)
        here.load.one_more_each()
        here.box.start(node)
        here.load.one_more_each()
    finally:
        here.load.finish()


def test_a_node_is_drained(here: World, record_property: Report) -> None:
    """Slurm lets running jobs go on, and so do we; who asks is told."""
    here.ready(KEPT, NOW)
    node = here.node_of(NOW)
    update = ("scontrol", "update", f"nodename={node}")
    try:
        heard = here.act(
            "scontrol update node state=drain", NOW,
            lambda: here.slurm.call(*update, "state=drain", "reason=bad fan"), record_property,
            events=("node", "leaving", "lost"), within_s=15.0,
        )  # fmt: skip
        assert heard["event"] == "node" and "bad fan" in heard["source"]
        assert here.state_of(here.service.status(), NOW) in ("serving", "ready")
    finally:
        here.slurm.call(*update, "state=resume")


def test_the_time_limit_ends_a_pilot(here: World, record_property: Report) -> None:
    """Told 40 s before; what was there moves off."""
    here.ready(KEPT, LONG)
    job = here.service.job_of(LONG)
    here.act(
        "time limit in 40 s", LONG,
        lambda: here.slurm.call("scontrol", "update", f"jobid={job}", "EndTime=now+40"),
        record_property, within_s=39.0,
    )  # fmt: skip


@pytest.mark.parametrize("daemon", ["slurmctld", "munged"])
def test_a_daemon_of_slurm_is_gone_for_a_while(daemon: str, here: World) -> None:
    """Nothing is known of our jobs then, and nothing is taken for lost."""
    here.ready(KEPT, NOW, LONG)
    before = len(here.journal())
    here.load.start()
    try:
        here.load.in_the_middle()
        here.box.kill(daemon)
        here.load.one_more_each()
        time.sleep(3.0)  # some looks of the poller must fail, however fast the streams are
        here.box.start(daemon)
        wait(lambda: _answers(here), 20, "Slurm answers again")
        here.load.one_more_each()
    finally:
        here.load.finish()
    new = [r for r in here.journal()[before:] if r["event"] in ("leaving", "lost")]
    assert new == []
    here.ready(KEPT, NOW, LONG)


def _answers(here: World) -> bool:
    return here.slurm._try("scontrol", "ping").code == 0


def _state(here: World, node: str) -> str:
    """As scontrol says it: the base and its flags."""
    out = here.slurm.call("scontrol", "show", "node", node).out
    return next(w for w in out.split() if w.startswith("State=")).removeprefix("State=")
