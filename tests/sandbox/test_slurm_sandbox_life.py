"""The sandbox's life: up, used, crashed in every way, and nothing left after down."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from submitter_suite import wait

from flexslurm.cli.sandbox_commands import sandbox as commands
from flexslurm.config.schema import parse_section
from flexslurm.errors import EnvironmentFault, ServiceError
from flexslurm.slurm import processes, sandbox_host
from flexslurm.slurm.processes import Process
from flexslurm.slurm.sandbox import Sandbox
from flexslurm.slurm.sandbox_config import SandboxConfig

SMALL = """\
nodes:
  g: {count: 2, gpu_type: a100, gpus: 2}
gpu_types: {a100: {}}
partitions:
  low: {nodes: [g], default: true, preempt_mode: REQUEUE}
kill_wait: 2s
"""
NAP = str(10**6 + os.getpid())
"""Seconds that nobody else on this machine sleeps."""
ORPHANS = """\
import os, subprocess, sys, time
for clear in (False, True):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            env = dict(os.environ, PATH="/usr/bin:/bin")
            if clear:
                env = {"PATH": "/usr/bin:/bin"}
            os.execvpe("sleep", ["sleep", sys.argv[1]], env)
        os._exit(0)
print("started", flush=True)
time.sleep(600)
"""


@pytest.fixture
def config() -> SandboxConfig:
    return parse_section(SandboxConfig, SMALL, "small.yaml")


@pytest.fixture
def boxes(tmp_path: Path, config: SandboxConfig) -> Iterator[Callable[[str], Sandbox]]:
    """Sandboxes by name, down at the end whatever happened."""
    made: list[Sandbox] = []

    def make(name: str) -> Sandbox:
        made.append(Sandbox(tmp_path / name, config))
        return made[-1]

    yield make
    for box in made:
        box.down()


@pytest.fixture
def box(boxes: Callable[[str], Sandbox]) -> Sandbox:
    return boxes("box")


def of(box: Sandbox, name: str) -> list[Process]:
    return [process for process in box.status().daemons if process.name == name]


def kill(found: list[Process]) -> None:
    assert found
    for process in found:
        processes.send(process, signal.SIGKILL)


def sleepers() -> list[Process]:
    everything = processes.everything()
    return [p for p in everything if p.name == "sleep" and NAP.encode() in _command(p.pid)]


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def assert_gone(box: Sandbox) -> None:
    assert box._members() == []
    assert not box.home.exists()
    assert not sandbox_host.short_run(box.home).exists()


def test_up_is_proven_and_happens_once(box: Sandbox) -> None:
    box.up()
    first = box.status()
    assert first.up and len(first.daemons) == 4 and "g1" in first.report and "low" in first.report
    box.up()
    assert {p.identity for p in box.status().daemons} == {p.identity for p in first.daemons}
    box.down()
    assert_gone(box)
    assert not box.status().up
    box.down()


@pytest.mark.parametrize("daemon", ["munged", "slurmctld", "slurmd"])
def test_up_repairs_and_down_clears_after_a_daemon_was_killed(daemon: str, box: Sandbox) -> None:
    box.up()
    kill(of(box, daemon)[:1])
    wait(lambda: not box.status().up, 5, "it is dead")
    box.up()
    assert of(box, daemon) and box.status().up
    kill(of(box, daemon))
    box.down()
    assert_gone(box)


def test_down_ends_jobs_their_orphans_and_what_lost_its_slurmstepd(
    box: Sandbox, tmp_path: Path
) -> None:
    box.up()
    (tmp_path / "orphans.py").write_text(ORPHANS)
    script = tmp_path / "job.sh"
    script.write_text(
        f"#!/bin/bash\nsrun {sys.executable} -IS {tmp_path}/orphans.py {NAP} & sleep 600\n"
    )
    out = tmp_path / "out"
    assert box.run(["sbatch", f"--output={out}", "--nodes=2", str(script)]) == 0
    wait(lambda: out.exists() and "started" in out.read_text(), 20, "the job runs")
    wait(lambda: len(sleepers()) == 4, 10, "its orphans run")
    steps = [p for p in box._members() if p.name == "slurmstepd"]
    kill(steps)
    box.down()
    assert_gone(box)
    # One that left its tree and threw its environment away belongs to nobody any more.
    left = [p for p in sleepers() if "SLURM_CONF" in processes.environ(p.pid)]
    assert left == []
    for process in sleepers():
        processes.send(process, signal.SIGKILL)


def test_a_shell_that_uses_it_is_not_ended_with_it(box: Sandbox) -> None:
    box.up()
    shell = subprocess.Popen(["sleep", "600"], env={**os.environ, **box.env()})
    try:
        box.down()
        assert_gone(box)
        assert shell.poll() is None
    finally:
        shell.kill()
        shell.wait()


def test_two_at_once(boxes: Callable[[str], Sandbox]) -> None:
    one, two = boxes("one"), boxes("two")
    one.up()
    two.up()
    one.down()
    assert_gone(one)
    assert two.status().up and two.run(["srun", "true"]) == 0


@pytest.mark.parametrize(
    "after_s",
    [0.15, 0.4, *(pytest.param(s, marks=pytest.mark.slow) for s in (0.02, 0.08, 0.25, 0.8))],
)
def test_a_crash_of_up_is_cleared(after_s: float, box: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(SMALL)
    code = (
        "import sys; from pathlib import Path; from flexslurm.slurm.sandbox import Sandbox; "
        "from flexslurm.slurm.sandbox_config import load_sandbox; "
        "box = Sandbox(sys.argv[1], load_sandbox(Path(sys.argv[2]))); "
        "print(flush=True); box.up()"
    )
    argv = [sys.executable, "-c", code, str(box.home), str(tmp_path / "small.yaml")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as crashed:
        assert crashed.stdout is not None
        crashed.stdout.readline()
        time.sleep(after_s)  # the moment of the crash
        crashed.kill()
    box.down()
    assert_gone(box)
    box.up()
    assert box.status().up


def test_a_directory_removed_by_hand_is_cleared_too(box: Sandbox) -> None:
    box.up()
    shutil.rmtree(box.home)
    box.down()
    assert_gone(box)


def test_long_paths(boxes: Callable[[str], Sandbox]) -> None:
    box = boxes("x" * 120)
    box.up()
    assert box.run(["srun", "--nodes=2", "true"]) == 0
    assert sandbox_host.short_run(box.home).is_dir()
    box.down()
    assert_gone(box)


def test_a_port_that_is_taken_in_between(box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    real, asked = sandbox_host.free_ports, list[int]()
    with socket.socket() as thief:
        thief.bind(("0.0.0.0", 0))
        thief.listen()

        def once_stolen(names: list[str]) -> dict[str, int]:
            ports = real(names)
            asked.append(len(asked))
            return (
                ports | {names[len(asked) % 2]: thief.getsockname()[1]} if len(asked) < 3 else ports
            )

        monkeypatch.setattr(sandbox_host, "free_ports", once_stolen)
        box.up()
    assert len(asked) == 3 and box.status().up


def test_a_directory_with_other_files_is_refused(box: Sandbox) -> None:
    box.home.mkdir()
    (box.home / "thesis.tex").write_text("x")
    with pytest.raises(EnvironmentFault, match="not a sandbox's"):
        box.up()
    box.down()
    assert [path.name for path in box.home.iterdir()] == ["thesis.tex"]


def test_a_configuration_slurm_refuses_is_told_and_leaves_nothing(
    tmp_path: Path, config: SandboxConfig
) -> None:
    bad = config.model_copy(update={"slurm_conf": ["PreemptParameters=send_user_signal"]})
    box = Sandbox(tmp_path / "bad", bad)
    with pytest.raises(EnvironmentFault) as caught:
        box.up()
    assert "PreemptParameters" in str(caught.value)
    assert_gone(box)


def test_commands(tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(SMALL)
    here = ["--dir", str(tmp_path / "cli")]
    runner = CliRunner()
    try:
        up = runner.invoke(
            commands,
            ["up", *here, "--config", str(tmp_path / "small.yaml")],
            catch_exceptions=False,
        )
        assert up.exit_code == 0 and "a100" in up.output and "SLURM_CONF=" in up.output
        status = runner.invoke(commands, ["status", *here], catch_exceptions=False)
        assert status.exit_code == 0 and "slurmctld" in status.output
        ran = runner.invoke(commands, ["run", *here, "sh", "-c", "exit 9"])
        assert ran.exit_code == 9
        missing = runner.invoke(commands, ["run", *here, "/no/such"])
        assert isinstance(missing.exception, EnvironmentFault)
    finally:
        down = runner.invoke(commands, ["down", *here, "--keep-logs"], catch_exceptions=False)
    assert down.exit_code == 0
    assert "slurmctld.log" in [path.name for path in (tmp_path / "cli" / "log").iterdir()]
    assert {path.name for path in (tmp_path / "cli").iterdir()} <= {"log", "sandbox.lock"}
    Sandbox(tmp_path / "cli").down()
    assert not (tmp_path / "cli").exists()
    status = runner.invoke(commands, ["status", *here])
    assert isinstance(status.exception, ServiceError)
    assert isinstance(runner.invoke(commands, ["run", *here, "true"]).exception, EnvironmentFault)
