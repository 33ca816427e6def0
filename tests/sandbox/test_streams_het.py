"""A whole service as one heterogeneous job: a node is lost, streams go on."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from submitter_suite import wait

from flexslurm.cli.ask import ask, ask_status
from flexslurm.cli.stopping import stop_service
from flexslurm.config.schema import load_section, parse_section
from flexslurm.config.site import Site
from flexslurm.errors import FlexslurmError
from flexslurm.messages import AskDone, CordonAsk, DrainAsk
from flexslurm.slurm.client import SlurmClient
from flexslurm.slurm.command import clean_env
from flexslurm.slurm.sandbox import Sandbox
from flexslurm.slurm.sandbox_config import SandboxConfig
from flexslurm.wire.service_dir import ServiceDir
from tests.sandbox.stream_kit import Load, World
from tests.service_harness import RunningService, tiny_service

pytestmark = [pytest.mark.shared_service, pytest.mark.slow, pytest.mark.timeout(240)]
MAIN = [sys.executable, "-c", "from flexslurm.cli.main import main; main()"]
SANDBOX = """\
nodes:
  s: {count: 2, gpu_type: a100, gpus: 1}
  t: {count: 2, gpu_type: l40s, gpus: 1}
gpu_types: {a100: {}, l40s: {}}
partitions:
  first: {nodes: [s], default: true}
  second: {nodes: [t]}
kill_wait: 4s
slurmd_timeout: 10s
"""
Report = Callable[[str, object], None]


BOTH = (("first", "a100"), ("second", "l40s"))
"""Components of two nodes: with fewer in any, Slurm ends the whole job when any node is lost."""


def submit(
    box: Sandbox, slurm: SlurmClient, home: Path, model: Path, root: Path,
    pool: Sequence[tuple[str, str]],
) -> str:  # fmt: skip
    """The job of the rendered script, the head on its first node; the pool by partition."""
    site = yaml.safe_load(box.site_file.read_text())
    for gpu_type in site["gpu_types"].values():
        gpu_type["memory"] = "4MiB"
    site["env"] = {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    asked = tiny_service(model, [(t, 1, 2) for _, t in pool], memory_fraction=1.0)
    for entry, (partition, _) in zip(asked["pool"], pool, strict=True):
        entry["partition"] = partition
    for name, data in (("site.yaml", site), ("service.yaml", asked)):
        (home / name).write_text(yaml.safe_dump(data))
    done = subprocess.run(
        [*MAIN, "script", str(home / "service.yaml"), "--site", str(home / "site.yaml"),
         "--service-dir", str(home / "service"), "--to", str(home / "job.sh")],
        env=clean_env(str(box.conf)), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return slurm.submit(home / "job.sh", cwd=home).base


@contextmanager
def job(
    home: Path, tiny_model: Path, root: Path, pool: Sequence[tuple[str, str]]
) -> Iterator[World]:
    """A sandbox and a service as one job in it."""
    box = Sandbox(home / "box", parse_section(SandboxConfig, SANDBOX, "sandbox.yaml"))
    box.up()
    try:
        site = load_section(Site, box.site_file)
        slurm = SlurmClient(site.slurm)
        job = submit(box, slurm, home, tiny_model, root, pool)
        directory = ServiceDir(home / "service")

        def serves() -> bool:
            assert not slurm.jobs([job])[job].state.over, (home / "job.sh").read_text()
            try:
                told = ask_status(directory)
            except FlexslurmError:
                return False
            return told.state == "serving" and len(told.fragments) == 2 * len(pool)

        wait(serves, 90, "the service in the job serves")
        service = RunningService(directory, None)  # type: ignore[arg-type]
        load = Load(lambda: service.endpoint, tiny_model)
        yield World(box, site, service, load, slurm, home)
        stop_service(directory, 0.0, 30.0, lambda line: None)
    finally:
        box.down()


def in_use(here: World) -> dict[str, str]:
    """Fragments that serve or could, and their nodes."""
    here.service.until(lambda status: status.state == "serving")
    found = here.service.status().fragments
    return {f.name: f.node for f in found if f.state in ("serving", "ready") and f.node}


def component(here: World, partition: str) -> str:
    """The job id of a component, which runs."""
    rows = here.slurm.call("squeue", "-h", "-O", "JobID:20,Partition:20,State:20").out.splitlines()
    found = [row.split() for row in rows if f" {partition} " in row]
    assert [row[2] for row in found] == ["RUNNING"], rows
    return found[0][0]


def one_is_drained(here: World) -> str:
    fragment = next(name for name, node in in_use(here).items() if node == "s2")
    here.load.start()
    try:
        here.load.in_the_middle()
        ask(here.service.directory, DrainAsk(fragment=fragment), 10.0)
        told = here.service.until(lambda status: here.state_of(status, fragment) == "drained")
        here.load.one_more_each()
    finally:
        here.load.finish()
    assert next(f.node for f in told.fragments if f.name == fragment) == "s2"
    return fragment


def take_back(here: World, fragment: str) -> AskDone:
    answer = ask(here.service.directory, CordonAsk(fragment=fragment, cordon=False), 10.0)
    assert isinstance(answer, AskDone)
    return answer


def it_is_had_back(here: World, fragment: str) -> None:
    """Its step's process has ended: it is started again on its node, in the same job."""
    here.service.until(
        lambda status: any(line.startswith(f"{fragment} has ended") for line in status.pool)
    )
    before = here.service.job_of(fragment)
    here.load.start()
    try:
        here.load.in_the_middle()
        assert take_back(here, fragment).message == f"{fragment} had ended: it is started again"
        here.ready(fragment, timeout_s=120)
        here.load.one_more_each()
    finally:
        here.load.finish()
    assert in_use(here)[fragment] == "s2" and here.service.job_of(fragment) != before


def test_a_node_that_is_not_the_head_s_is_lost(
    tmp_path: Path, tiny_model: Path, root: Path, record_property: Report
) -> None:
    """Of the second component; Slurm takes it out, and the job goes on.

    Before, an operator drains a pilot of the first, which is shown as that, and has it back. What
    was on the node that is lost cannot be had back: the job has no node for it.
    """
    with job(tmp_path, tiny_model, root, BOTH) as here:
        it_is_had_back(here, one_is_drained(here))
        fragment, node = next(f for f in in_use(here).items() if f[1].startswith("t"))
        here.act("het job: a node lost", fragment, lambda: here.box.kill(node), record_property)
        second = component(here, "second")
        wait(
            lambda: node not in here.slurm.jobs([second])[second].nodes,
            40, "Slurm has taken it out",
        )  # fmt: skip
        assert component(here, "second") == second and component(here, "first")
        assert fragment not in in_use(here)
        take_back(here, fragment)
        here.service.until(
            lambda status: any(
                line.startswith(f"{fragment} cannot be started again: the allocation has no free")
                for line in status.pool
            )
        )


def test_a_job_of_one_component_is_shrunk(
    tmp_path: Path, tiny_model: Path, root: Path, record_property: Report
) -> None:
    """Slurm shrinks no heterogeneous job. What runs on the node that goes is killed at once."""
    with job(tmp_path, tiny_model, root, BOTH[:1]) as here:
        fragment = next(name for name, node in in_use(here).items() if node == "s2")
        only = component(here, "first")
        shrink = ("scontrol", "update", f"jobid={only}", "nodelist=s1")
        here.act(
            "job shrunk by scontrol", fragment,
            lambda: here.slurm.call(*shrink, cwd=here.scratch), record_property,
        )  # fmt: skip
        assert here.slurm.jobs([only])[only].nodes == ("s1",)
        assert component(here, "first") == only and fragment not in in_use(here)
