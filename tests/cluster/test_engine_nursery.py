"""The fork server: fast starts, honest ends, and nothing that outlives who it works for."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from flexslurm.engine.nursery import Nursery, WorkerSpec
from flexslurm.errors import EnvironmentFault
from flexslurm.messages import Refused, Retired, WorkerExit, WorkerHello, WorkerWelcome
from tests.cluster.engine_head import EngineHead
from tests.cluster.engine_world import Node, World, replica_of

GRACE_S = 60.0
"""Where a worker is to end by itself: longer than that takes on a busy machine."""


@pytest.fixture
def own_node(tmp_path: Path) -> Iterator[Node]:
    """For a test that ends the fork server."""
    node = Node(tmp_path / "logs")
    yield node
    node.close()


@pytest.fixture
def head(tmp_path: Path) -> Iterator[EngineHead]:
    head = EngineHead(tmp_path)
    yield head
    head.close()


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> float:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout_s, what
        time.sleep(0.02)
    return time.monotonic() - began


def test_a_worker_starts_at_once_and_says_hello(node: Node, head: EngineHead) -> None:
    node.spawn(head, 0)
    seconds = []
    for gpu in (1, 2, 3):
        started = node.spawn(head, gpu)
        sender, hello = head.wait(WorkerHello, lambda _, message, g=gpu: message.gpu == g)  # type: ignore[misc]
        used = psutil.Process(started.pid).cpu_times()
        seconds.append(used.user + used.system)
        assert sender == started.worker == hello.worker
        assert (hello.pid, hello.agent, hello.device) == (started.pid, "agent-1", "cpu")
    assert min(seconds) < 1.5  # of computing: the import alone takes several times that
    for started in list(node.nursery.running.values()):
        node.stop(started.worker, GRACE_S)
        ended = node.wait_ended(started.worker)
        assert (ended.exit_code, ended.gpu, ended.pid) == (0, started.gpu, started.pid)
        assert ended.reason == "was stopped"
        assert started.log.stat().st_mode & 0o077 == 0
    assert node.nursery.running == {}


def test_ends_are_told_as_they_are(node: Node, head: EngineHead) -> None:
    killed, exited = node.spawn(head, 0), node.spawn(head, 1)
    for started in (killed, exited):
        head.wait(WorkerHello, lambda sender, _, s=started: sender == s.worker)  # type: ignore[misc]
    os.kill(killed.pid, signal.SIGKILL)
    ended = node.wait_ended(killed.worker)
    assert (ended.exit_code, ended.reason) == (-9, "was killed by SIGKILL")
    head.send(exited.worker, WorkerExit(reason="a test"))
    assert node.wait_ended(exited.worker).exit_code == 0


def test_signals_that_slurm_sends_to_all_do_not_end_a_worker(node: Node, head: EngineHead) -> None:
    started = node.spawn(head, 0)
    head.wait(WorkerHello)
    assert node.nursery.server_pid is not None
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        os.kill(started.pid, number)
        os.kill(node.nursery.server_pid, number)
    before = head.beats.get(started.worker, 0.0)
    wait_until(lambda: head.beats.get(started.worker, 0.0) > before, 200.0, "no beat after signals")
    node.stop(started.worker, GRACE_S)
    assert node.wait_ended(started.worker).exit_code == 0


def test_a_worker_that_hangs_is_killed_after_the_grace(node: Node, head: EngineHead) -> None:
    started = node.spawn(head, 0)
    head.wait(WorkerHello)
    os.kill(started.pid, signal.SIGSTOP)
    began = time.monotonic()
    node.stop(started.worker, 0.4)
    ended = node.wait_ended(started.worker)
    assert ended.exit_code == -9 and ended.reason == "was stopped"
    assert time.monotonic() - began >= 0.4


def test_a_worker_ends_when_its_head_is_silent(node: Node, head: EngineHead) -> None:
    started = node.spawn(head, 0)
    wait_until(lambda: started.worker in head.beats, 200.0, "no beat")
    head.welcome = msgspec.structs.replace(head.welcome, lost_s=1.5)
    for _ in range(2):  # the first of these is answered with the new time
        before = head.beats[started.worker]
        wait_until(lambda last=before: head.beats[started.worker] > last, 200.0, "no beat")  # type: ignore[misc]
    head.answering = False
    assert node.wait_ended(started.worker).exit_code == 3


def test_a_worker_belongs_to_one_head(node: Node, head: EngineHead) -> None:
    started, refused = node.spawn(head, 0), node.spawn(head, 1)
    for worker in (started.worker, refused.worker):
        wait_until(lambda w=worker: w in head.beats, 200.0, "no beat")  # type: ignore[misc]
    head.send(refused.worker, Refused(reason="not wanted"))
    assert node.wait_ended(refused.worker).exit_code == 4
    head.send(started.worker, WorkerWelcome(head="head-2", beat_s=0.2, lost_s=5.0))
    assert node.wait_ended(started.worker).exit_code == 3


def test_a_worker_without_keys_says_why(node: Node, head: EngineHead, tmp_path: Path) -> None:
    spec = WorkerSpec(0, head.endpoint, str(tmp_path / "none.json"), "agent-1", "127.0.0.1")
    try:
        started = node.run(node.nursery.spawn(spec))
    except EnvironmentFault as error:  # it may end before its start has been told
        assert "exit code 1" in error.message
        return
    assert node.wait_ended(started.worker).exit_code == 1
    text = started.log.read_text()
    assert "cannot read the service's keys" in text and "Traceback" not in text


@pytest.mark.slow
def test_a_lost_fork_server_takes_its_workers_along_and_comes_back(
    own_node: Node, head: EngineHead
) -> None:
    node = own_node
    first = [node.spawn(head, gpu) for gpu in range(2)]
    assert node.nursery.server_pid is not None
    os.kill(node.nursery.server_pid, signal.SIGKILL)
    for started in first:
        ended = node.wait_ended(started.worker)
        assert ended.exit_code is None and "fork server" in ended.reason
        wait_until(lambda pid=started.pid: not alive(pid), 200.0, "a worker outlives its server")  # type: ignore[misc]
    again = node.spawn(head, 0)
    head.wait(WorkerHello, lambda sender, _: sender == again.worker)
    node.stop(again.worker, GRACE_S)
    node.wait_ended(again.worker)


@pytest.fixture
def agent(head: EngineHead, tmp_path: Path, root: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.cluster.engine_agent", head.endpoint,
         str(head.keys_path), str(tmp_path / "logs")],
        cwd=root, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        yield process
        process.kill()


@pytest.mark.slow
def test_nothing_outlives_an_agent_that_is_killed(agent: subprocess.Popen[str]) -> None:
    assert agent.stdout is not None
    pids = [json.loads(agent.stdout.readline())["server"]]
    pids += json.loads(agent.stdout.readline())["workers"]
    assert all(alive(pid) for pid in pids)
    agent.kill()
    agent.wait(200)
    wait_until(lambda: not any(alive(pid) for pid in pids), 200.0, "orphans")


def test_a_fork_server_that_is_still_importing_notices_too(agent: subprocess.Popen[str]) -> None:
    assert agent.stdout is not None
    server = json.loads(agent.stdout.readline())["server"]
    agent.kill()
    agent.wait(200)
    wait_until(lambda: not alive(server), 200.0, "an orphaned fork server")


def test_a_fork_server_that_cannot_start_says_so_and_is_not_tried_for_ever(
    node: Node, tmp_path: Path
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no torch on this node')")
    nursery = Nursery(
        "cpu", tmp_path / "logs", node.ended.append, env={"PYTHONPATH": str(tmp_path)}
    )
    for _ in range(3):
        with pytest.raises(EnvironmentFault) as failed:
            node.run(nursery.start())
        assert "no torch on this node" in str(failed.value)
    with pytest.raises(EnvironmentFault, match="3 times in a row"):
        node.run(nursery.start())
    node.run(nursery.close())
    node.run(nursery.close())


def test_a_worker_with_an_epoch_ends_cleanly_and_its_groups_with_it(
    node: Node, tmp_path: Path, tiny_model: Path
) -> None:
    world = World(node, tmp_path)
    placed = world.install(1, tiny_model, replica_of([6], [2]))
    node.stop(placed.workers[0], GRACE_S)
    assert node.wait_ended(placed.workers[0]).exit_code == 0
    world.retire(placed, placed.workers[1:])
    assert world.head.count(Retired) == 1
    world.close()
