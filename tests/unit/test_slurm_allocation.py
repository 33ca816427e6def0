"""What a job's environment and scontrol say about its nodes, as text."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexslurm.config.schema import parse_section
from flexslurm.config.site import Site
from flexslurm.errors import EnvironmentFault, SlurmError
from flexslurm.slurm.allocation import (
    AllocatedNode,
    Component,
    allocated_nodes,
    components,
    step_command,
)
from flexslurm.slurm.script import PilotSpec

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


def test_the_step_of_a_pilot(site: Site) -> None:
    spec = PilotSpec("p", None, "big", 2, 1, None, ("agent", "a b"), Path("/logs"), {})
    argv = step_command(AllocatedNode("n1", 1, "big", 2, 8), spec, site, "7")
    assert argv[:4] == ("srun", "--jobid=7", "--het-group=1", "--job-name=p")
    assert {"--overlap", "--no-kill", "--kill-on-bad-exit=0", "--nodelist=n1"} <= set(argv)
    assert argv[-2:] == ("agent", "a b")
    alone = step_command(AllocatedNode("n1", None, "big", 2, 8), spec, site, "7")
    assert not any(option.startswith("--het-group") for option in alone)
