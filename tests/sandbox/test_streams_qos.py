"""Preemption by QOS, as Slurm does it with an accounting database: requeued, and cancelled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flexslurm.config.schema import parse_section
from flexslurm.slurm import sandbox_host
from flexslurm.slurm.client import SlurmClient
from flexslurm.slurm.sandbox_config import SandboxConfig
from tests.sandbox.stream_kit import World, world

SANDBOX = """\
nodes:
  s: {gpu_type: a100, gpus: 1}
  p: {gpu_type: a100, gpus: 1}
  q: {gpu_type: a100, gpus: 1}
  c: {}
gpu_types: {a100: {}}
partitions:
  keep: {nodes: [s], default: true}
  back: {nodes: [p], qos: scavenger}
  gone: {nodes: [q], qos: leftover}
  cpu: {nodes: [c]}
qos:
  scavenger: {grace: 10s}
  leftover: {grace: 5s, preempt_mode: CANCEL}
  urgent: {preempts: [scavenger, leftover], priority: 1000}
head_partition: cpu
kill_wait: 4s
"""
KEPT, BACK, GONE = "a100-1", "a100-2", "a100-3"
MISSING = sandbox_host.missing_packages(parse_section(SandboxConfig, SANDBOX, "sandbox.yaml"))
pytestmark = [
    pytest.mark.shared_service,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(MISSING), reason=f"needs Debian's packages {' '.join(MISSING)}"),
]
Report = Callable[[str, object], None]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[World]:
    home = tmp_path_factory.mktemp("qos")
    pool = [(name, "a100") for name in ("keep", "back", "gone")]
    with world(home, tiny_model, SANDBOX, pool, memory="4MiB") as made:
        yield made


def test_a_qos_preempts_and_the_job_is_requeued(here: World, record_property: Report) -> None:
    here.ready(KEPT, BACK)
    job, node = here.service.job_of(BACK), here.node_of(BACK)
    here.act(
        "preemption by QOS, 10 s, REQUEUE", BACK,
        lambda: here.submit_urgent("back", node, "--qos=urgent"), record_property,
    )  # fmt: skip
    here.end_urgent()
    here.ready(KEPT, BACK)
    assert here.service.job_of(BACK) == job


def test_a_qos_preempts_and_the_job_is_cancelled(here: World, record_property: Report) -> None:
    here.ready(KEPT, GONE)
    node = here.node_of(GONE)
    here.act(
        "preemption by QOS, 5 s, CANCEL", GONE,
        lambda: here.submit_urgent("gone", node, "--qos=urgent"), record_property,
    )  # fmt: skip
    here.end_urgent()


def test_the_site_file_says_what_the_qos_gives(here: World) -> None:
    back, gone = here.site.partitions["back"], here.site.partitions["gone"]
    assert (back.preemptible, back.grace, back.requeue, back.qos) == (True, 10, True, "scavenger")
    assert (gone.preemptible, gone.grace, gone.requeue, gone.qos) == (True, 5, False, "leftover")
    assert not here.site.partitions["keep"].preemptible
    config = SlurmClient(here.site.slurm).config()
    assert config["PreemptType"] == "preempt/qos"
