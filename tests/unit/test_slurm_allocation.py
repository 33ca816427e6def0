"""What a job's environment and scontrol say about its nodes, as text."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from submitter_suite import wait

from flexslurm.config.schema import parse_section
from flexslurm.config.site import Site
from flexslurm.errors import CapacityError, EnvironmentFault, SlurmError
from flexslurm.slurm import processes
from flexslurm.slurm.allocation import (
    STEP_NAME,
    AllocatedNode,
    AllocationSubmitter,
    Component,
    allocated_nodes,
    components,
    step_command,
)
from flexslurm.slurm.script import PilotSpec
from flexslurm.slurm.states import JobState
from flexslurm.slurm.step_order import Order

SITE = "name: x\ngpu_types: {big: {slurm_type: a100}, l40s: {}}"


@pytest.fixture
def site() -> Site:
    return parse_section(Site, SITE, "site.yaml")


def test_components_of_a_heterogeneous_job() -> None:
    environ = {
        "SLURM_JOB_ID": "400", "SLURM_HET_SIZE": "2", "SLURM_JOB_NODELIST": "gpu001",
        "SLURM_JOB_ID_HET_GROUP_0": "400", "SLURM_JOB_ID_HET_GROUP_1": "407",
        "SLURM_JOB_NODELIST_HET_GROUP_0": "gpu001",
        "SLURM_JOB_NODELIST_HET_GROUP_1": "gpu[002-003]",
        "SLURM_JOB_CPUS_PER_NODE_HET_GROUP_0": "4", "SLURM_JOB_CPUS_PER_NODE_HET_GROUP_1": "2(x2)",
    }  # fmt: skip
    assert components(environ) == [
        Component(0, "400", ("gpu001",), (4,)),
        Component(1, "407", ("gpu002", "gpu003"), (2, 2)),
    ]


def test_a_plain_job_is_one_component() -> None:
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"}
    assert components(environ) == [Component(None, "7", ("n1", "n2"), (1, 1))]


def test_outside_of_a_job() -> None:
    with pytest.raises(EnvironmentFault, match="not inside a Slurm job"):
        components({})


def test_gpus_by_node(site: Site) -> None:
    details = (
        "JobId=7 JobName=x JOB_GRES=gpu:a100:6 "
        "Nodes=n[1-2] CPU_IDs=0-3 Mem=0 GRES=gpu:a100:2(IDX:0,3) "
        "Nodes=n3 CPU_IDs=0 Mem=100 GRES=gpu:l40s:1(IDX:0),mps:a100:0 "
        "Nodes=n4 CPU_IDs=0 Mem=0 GRES= MinCPUsNode=1"
    )
    component = Component(1, "7", ("n3", "n1", "n2", "n4"), (1, 2, 3, 4))
    assert allocated_nodes(component, details, site) == [
        AllocatedNode("n3", 1, "l40s", 1, 1),
        AllocatedNode("n1", 1, "big", 2, 2),
        AllocatedNode("n2", 1, "big", 2, 3),
    ]


def test_a_type_that_the_site_does_not_name(site: Site) -> None:
    details = "Nodes=n1 CPU_IDs=0 Mem=0 GRES=gpu:h100:2(IDX:0-1)"
    with pytest.raises(SlurmError, match="'h100'") as caught:
        allocated_nodes(Component(None, "7", ("n1",), (1,)), details, site)
    assert caught.value.hint is not None and "gpu:a100, gpu:l40s" in caught.value.hint


def test_one_step_over_all_components(site: Site) -> None:
    nodes = [
        AllocatedNode("n1", 1, "big", 2, 8), AllocatedNode("n2", 1, "big", 2, 6),
        AllocatedNode("n3", 2, "l40s", 1, 4),
    ]  # fmt: skip
    argv = step_command(nodes, site, "7", Path("/svc/step"))
    assert argv.count("srun") == 1 and argv[:3] == ("srun", "--jobid=7", "--job-name=step")
    assert {"--overlap", "--no-kill", "--kill-on-bad-exit=0", "--wait=0"} <= set(argv)
    at = argv.index(":")
    first, second = argv[:at], argv[at + 1 :]
    assert {"--het-group=1", "--nodes=2", "--nodelist=n1,n2", "--cpus-per-task=6"} <= set(first)
    assert {"--het-group=2", "--nodes=1", "--nodelist=n3", "--cpus-per-task=4"} <= set(second)
    assert first[-3:] == second[-3:] == ("-m", "flexslurm.slurm.node_step", "/svc/step")
    alone = step_command([AllocatedNode("n1", None, "big", 2, 8)], site, "7", Path("/d"))
    assert not any(option.startswith("--het-group") for option in alone) and ":" not in alone


# --------------------------------------------------------------- the step's tasks, without Slurm


@pytest.fixture
def task(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The task of node n1, as srun starts it."""
    env = {**os.environ, "SLURMD_NODENAME": "n1", "SLURM_JOB_ID": "7", "CUDA_VISIBLE_DEVICES": "3"}
    argv = [sys.executable, "-m", "flexslurm.slurm.node_step", str(tmp_path / "step")]
    running = subprocess.Popen(argv, env=env)
    yield running
    running.kill()
    running.wait()


def ordered(
    where: Path,
    script: str,
    *,
    step: Path = Path("/none"),
    kill_wait_s: float = 60.0,
    **limits: float,
) -> tuple[Order, Callable[[], tuple[int, str]]]:
    """An order for a shell on n1, and what waits for its end."""
    order = Order(where / "step" / "n1", step, **limits)
    order.put(["sh", "-c", script], where / "logs" / "out", kill_wait_s)
    ends: list[tuple[int, str]] = []
    thread = threading.Thread(target=lambda: ends.append(order.follow()), daemon=True)
    thread.start()

    def end() -> tuple[int, str]:
        thread.join(200)
        assert ends, "the order has no end"
        return ends[0]

    return order, end


def log_has(where: Path, words: str) -> bool:
    log = where / "logs" / "out"
    return log.exists() and words in log.read_text()


@pytest.mark.usefixtures("task")
def test_an_ordered_process_knows_its_node_and_its_end_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GREETING", "hello")
    monkeypatch.setenv("SLURM_JOB_ID", "the head's")
    script = "echo $GREETING $SLURMD_NODENAME $SLURM_JOB_ID $CUDA_VISIBLE_DEVICES; exit 7"
    _, end = ordered(tmp_path, script)
    assert end() == (7, "")
    assert log_has(tmp_path, "hello n1 7 3\n")
    (file,) = (tmp_path / "step" / "n1").glob("*.order.json")
    assert file.stat().st_mode & 0o077 == 0


def test_signals_reach_what_was_ordered(tmp_path: Path, task: subprocess.Popen[bytes]) -> None:
    script = "trap 'echo warned' USR1; trap 'echo told; exit 4' TERM; echo up; "
    _, end = ordered(tmp_path, script + "while true; do sleep 0.05; done")
    wait(lambda: log_has(tmp_path, "up"), 60, "it runs")
    task.send_signal(signal.SIGUSR1)
    wait(lambda: log_has(tmp_path, "warned"), 60, "it was warned")
    task.send_signal(signal.SIGTERM)
    assert end() == (4, "") and log_has(tmp_path, "told")
    assert task.poll() is None  # the task itself stays for the next order
    _, again = ordered(tmp_path, "exit 3")
    assert again() == (3, "")


@pytest.mark.usefixtures("task")
def test_a_process_that_does_not_stop_is_killed_with_all_it_has_started(tmp_path: Path) -> None:
    away = "setsid sh -c 'echo $$ up; exec sleep 300' &"  # in a session of its own
    script = f"trap '' TERM; {away} while true; do sleep 0.05; done"
    order, end = ordered(tmp_path, script, kill_wait_s=1.0)
    wait(lambda: log_has(tmp_path, "up"), 60, "it runs")
    order.stop()
    assert end()[0] == -signal.SIGKILL
    child = int((tmp_path / "logs" / "out").read_text().split()[0])
    wait(lambda: processes.look(child) is None, 60, "its child is gone too")


def test_a_silent_node_is_lost(tmp_path: Path, task: subprocess.Popen[bytes]) -> None:
    _, end = ordered(tmp_path, "echo $$ up; exec sleep 300", lost_s=4.0)
    wait(lambda: log_has(tmp_path, "up"), 60, "it runs")
    task.kill()
    code, reason = end()
    assert code == 1 and "says nothing here" in reason
    os.kill(int((tmp_path / "logs" / "out").read_text().split()[0]), signal.SIGKILL)


def test_a_step_that_never_starts_or_has_ended(tmp_path: Path) -> None:
    _, end = ordered(tmp_path, "true", ready_s=0.5)
    assert "has not started here" in end()[1]
    record = tmp_path / "status.json"
    record.write_text('{"state": "FAILED"}')
    _, over = ordered(tmp_path, "true", step=record)
    assert over() == (1, "the step has ended: see the log of 'step'")


def test_the_step_ends_when_it_is_told_to(tmp_path: Path, task: subprocess.Popen[bytes]) -> None:
    _, end = ordered(tmp_path, "sleep 0.5")
    wait(lambda: list((tmp_path / "step" / "n1").glob("*.status.json")), 60, "it runs")
    (tmp_path / "step" / "end").touch()
    assert end() == (0, "")
    assert task.wait(200) == 0


@pytest.mark.usefixtures("task")
def test_orders_that_are_none(tmp_path: Path) -> None:
    place = tmp_path / "step" / "n1"
    wait(lambda: (place / "beat.json").exists(), 60, "the task is there")
    for name, text in (("a", "{}"), ("b", "no json"), ("c", '{"command": [], "log": 3}')):
        (place / f"{name}.order.json").write_text(text)
    _, end = ordered(tmp_path, "exit 5")
    assert end() == (5, "")
    for name in "abc":
        assert json.loads((place / f"{name}.status.json").read_text())["exit_code"] == 127
    order = Order(place, Path("/none"))
    order.put(["/nonexistent/program"], tmp_path / "logs" / "x", 1.0)
    assert order.follow()[0] == 127


# ---------------------------------------------------- the submitter, with a stand-in for Slurm

SRUN = """\
#!{python}
import os, subprocess, sys
open("{where}/calls", "a").write(" ".join(sys.argv) + "\\n")
parts, tasks = [[]], []
for word in sys.argv[1:]:
    parts.append([]) if word == ":" else parts[-1].append(word)
for part in parts:
    command = part[part.index(sys.executable):]
    (names,) = [w.partition("=")[2] for w in part if w.startswith("--nodelist=")]
    for name in names.split(","):
        env = {{**os.environ, "SLURMD_NODENAME": name, "SLURM_JOB_ID": "7"}}
        tasks.append(subprocess.Popen(command, env=env))
for task in tasks:
    task.wait()
"""
HELD = {"7": "Nodes=n1 CPU_IDs=0-3 Mem=0 GRES=gpu:a100:2(IDX:0-1)",
        "8": "Nodes=n[2-3] CPU_IDs=0 Mem=0 GRES=gpu:l40s:1(IDX:0)"}  # fmt: skip
ENVIRON = {
    "SLURM_JOB_ID": "7", "SLURM_HET_SIZE": "2", "SLURM_JOB_ID_HET_GROUP_0": "7",
    "SLURM_JOB_ID_HET_GROUP_1": "8", "SLURM_JOB_NODELIST_HET_GROUP_0": "n1",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "n[2-3]", "SLURM_JOB_CPUS_PER_NODE_HET_GROUP_0": "4",
    "SLURM_JOB_CPUS_PER_NODE_HET_GROUP_1": "2(x2)",
}  # fmt: skip


@pytest.fixture
def submitter(
    tmp_path: Path, site: Site, monkeypatch: pytest.MonkeyPatch
) -> Iterator[AllocationSubmitter]:
    """Inside a job of two components, where srun starts its tasks on this machine."""
    commands = tmp_path / "bin"
    commands.mkdir()
    cases = "".join(f'*" {job}") echo "{words}" ;;\n' for job, words in HELD.items())
    scripts = {
        "srun": SRUN.format(python=sys.executable, where=tmp_path),
        "scontrol": f'#!/bin/sh\ncase "$*" in\n{cases}esac\n',
        "squeue": "#!/bin/sh\n",
    }
    for name, text in scripts.items():
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    environ = {**ENVIRON, "PATH": os.environ["PATH"]}
    quick = site.slurm.model_copy(update={"kill_wait": 1.0})
    made = AllocationSubmitter(
        site.model_copy(update={"slurm": quick}), tmp_path / "svc", environ=environ
    )
    yield made
    left = made._steps.places().values()
    made.cancel(list(left))
    made._steps.cancel(made.find(STEP_NAME))
    wait(lambda: not made.find(STEP_NAME), 60, "the step has ended")


def pilot(where: Path, name: str, gpu_type: str, gpus: int, script: str) -> PilotSpec:
    command = ("sh", "-c", script)
    return PilotSpec(name, None, gpu_type, gpus, 1, None, command, where / "logs" / name, {})


def test_pilots_are_processes_of_one_step(submitter: AllocationSubmitter, tmp_path: Path) -> None:
    assert [(f.gpu_type, f.gpus, f.count) for f in submitter.pool()] == [
        ("big", 2, 1), ("l40s", 1, 2)
    ]  # fmt: skip
    stay = "echo up on $SLURMD_NODENAME; trap 'exit 0' TERM; while true; do sleep 0.05; done"
    kinds = {"p-1": ("big", 2), "p-2": ("l40s", 1), "p-3": ("l40s", 1)}
    jobs = {
        name: submitter.submit(pilot(tmp_path, name, *kind, stay)) for name, kind in kinds.items()
    }
    logs = {name: tmp_path / "logs" / name for name in jobs}

    def up() -> int:
        return sum("up on" in f.read_text() for log in logs.values() for f in log.glob("*.n?.log"))

    wait(lambda: up() == 3, 60, "all three run")
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == 1 and calls[0].count("--het-group=") == 2
    with pytest.raises(CapacityError, match="no free node"):
        submitter.submit(pilot(tmp_path, "p-4", "big", 2, stay))
    # one ends by itself, and its node is free again, in the same step
    submitter.cancel([jobs["p-1"]])
    wait(lambda: submitter._steps.states([jobs["p-1"]])[jobs["p-1"]].state.over, 60, "it has ended")
    places = {job: info.nodes for job, info in submitter.states(list(jobs.values())).items()}
    assert places[jobs["p-1"]] == ("n1",), "where it ran"
    assert {places[jobs["p-2"]], places[jobs["p-3"]]} == {("n2",), ("n3",)}
    again = submitter.submit(pilot(tmp_path, "p-1", "big", 2, "exit 9"))
    assert submitter.wait(again, every_s=0.05).exit_code == 9
    assert len((tmp_path / "calls").read_text().splitlines()) == 1
    # with the last of them the step ends, and the next pilot has a step of its own
    submitter.cancel([jobs["p-2"], jobs["p-3"]])
    wait(lambda: not submitter.find(STEP_NAME), 60, "the step has ended")
    wait(lambda: not submitter._steps.places(), 60, "and its nodes are free")
    last = submitter.submit(pilot(tmp_path, "p-5", "l40s", 1, "exit 0"))
    assert submitter.wait(last, every_s=0.05).exit_code == 0
    assert len((tmp_path / "calls").read_text().splitlines()) == 2


def test_a_step_that_dies_takes_its_pilots_with_it(
    submitter: AllocationSubmitter, tmp_path: Path
) -> None:
    job = submitter.submit(pilot(tmp_path, "p-1", "big", 2, "echo $$ up; exec sleep 300"))
    log = tmp_path / "logs" / "p-1" / f"p-1.{submitter.job_id}.n1.log"
    wait(lambda: log.exists() and "up" in log.read_text(), 60, "it runs")
    (step,) = submitter.find(STEP_NAME)
    submitter._steps.cancel([step])
    info = submitter.wait(job, every_s=0.05)
    assert info.state is JobState.FAILED and info.exit_code == 1


def test_a_preview_starts_nothing(submitter: AllocationSubmitter, tmp_path: Path) -> None:
    shown = submitter.preview(pilot(tmp_path, "p-1", "big", 2, "true"))
    assert shown.startswith("# in one step over all nodes: srun --jobid=7") and "on n1" in shown
    assert shown.endswith("sh -c true\n")
    assert not (tmp_path / "calls").exists() and not (tmp_path / "svc" / "jobs").exists()
