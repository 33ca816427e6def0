"""`sbatch/serve.sh` and what `flexslurm script` prints come from one source, byte for byte.

FLEXSLURM_WRITE_GOLDEN=1 writes the golden files, and the script in the checkout, anew.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from flexslurm.config.schema import load_section, parse_section
from flexslurm.config.service import Fragment
from flexslurm.config.site import Site
from flexslurm.errors import ConfigError
from flexslurm.slurm.serve import ServeCall, loss_in_words, read_components, serve_script

GOLDEN = Path(__file__).parent / "slurm"
CALL = ServeCall(
    "chat", ("/opt/my py/flexslurm",), Path("/home/me/chat.yaml"), Path("/etc/site.yaml"),
    Path("/shared/services/chat"),
)  # fmt: skip
FULL = """\
name: full
gpu_types:
  a100: {model: a100-80, slurm_type: nvidia_a100_80gb}
  slice: {memory: 19GiB, gres: "gpu:a100_2g.20gb"}
  share: {memory: 10GiB, gres: shard, gres_per_gpu: 4}
partitions:
  spare:
    gpu_types: [a100, slice, share]
    account: proj
    qos: low
    constraint: ib&nvme
    cpus_per_gpu: 6
    default_walltime: 4h
    max_walltime: 12h
    sbatch_args: ["--comment=preempt me", --exclusive]
  cancelled: {gpu_types: [a100], requeue: false, max_walltime: 2h}
  cpu: {preemptible: false, account: heads}
head: {partition: cpu, cpus: 4, memory: 8GiB, sbatch_args: [--nice=100]}
setup: [module load cuda]
env: {HF_HOME: /scratch/it's mine}
"""

POOL = [
    Fragment(partition="scavenge", gpu_type="a100", gpus=2),
    Fragment(partition="scavenge", gpu_type="l40s", gpus=1, count=2),
]


@pytest.fixture
def site(root: Path) -> Site:
    return load_section(Site, root / "site-configs" / "sandbox.yaml")


@pytest.fixture
def full() -> Site:
    return parse_section(Site, FULL, "site.yaml")


def check(text: str, path: Path) -> None:
    if os.environ.get("FLEXSLURM_WRITE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text


def test_the_script_in_the_checkout(root: Path, site: Site) -> None:
    check(serve_script(POOL, site), root / "sbatch" / "serve.sh")


def test_account_qos_constraint_and_more_of_each_component(full: Site) -> None:
    pool = read_components("spare/a100:4x2,spare/slice:1x3,spare/share:1,cancelled/a100:2,a100:1")
    check(serve_script(pool, full, CALL), GOLDEN / "serve-full.sh")


def test_the_head_on_a_node_of_its_own(full: Site) -> None:
    pool = read_components("spare/a100:4x2")
    check(serve_script(pool, full, CALL, head_node=True), GOLDEN / "serve-head-node.sh")


def test_entries_of_one_kind_are_one_component(full: Site) -> None:
    text = serve_script(read_components("spare/a100:4x2,spare/a100:4,spare/a100:2"), full)
    assert text.count("#SBATCH hetjob") == 1 and "--nodes=3" in text


@pytest.mark.parametrize(
    ("components", "head_node", "words"),
    [
        ("a100:4x3", False, "It outlives the loss of a node, of any but the first."),
        ("a100:4x3,slice:1x2", False, "It outlives the loss"),
        ("a100:4", False, "It ends with its node."),
        ("a100:4x3,slice:1", False, "It ends with any node"),
        ("a100:4x3", True, "It ends with any node"),
        ("a100:4,a100:4", False, "It outlives the loss"),
    ],
)
def test_what_the_loss_of_a_node_means_is_said(
    components: str, head_node: bool, words: str, full: Site
) -> None:
    pool = read_components(components)
    assert f"# {words}" in serve_script(pool, full, head_node=head_node)
    assert loss_in_words(pool, head_node=head_node).startswith(words)


@pytest.mark.parametrize(
    "text",
    [
        "a100",
        "a100:0",
        "a100:x2",
        "a100:4x0",
        "a/b/c:1",
        ":4",
        "a100:4,",
        "a100:99999",
        f"a100:{'9' * 5000}",
        "a100:²",
    ],
)
def test_components_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="--components: cannot read") as caught:
        read_components(text)
    assert "TYPE:GPUS" in (caught.value.hint or "")


def test_a_directory_that_sbatch_would_take_for_a_component(full: Site) -> None:
    call = replace(CALL, service_dir=Path("/shared/hetjobs/chat"))
    with pytest.raises(ConfigError, match="start of a component"):
        serve_script(read_components("spare/a100:1"), full, call)


def test_a_walltime_is_the_shortest_of_the_pool(site: Site) -> None:
    timed = [
        f.model_copy(update={"walltime": w}) for f, w in zip(POOL, (7200.0, 3600.0), strict=True)
    ]
    assert "#SBATCH --time=0-01:00:00\n" in serve_script(timed, site)


def test_one_entry_is_no_heterogeneous_job(site: Site) -> None:
    text = serve_script(POOL[:1], site)
    assert "#SBATCH hetjob" not in text and text.count("--gres=") == 1


def test_an_unknown_type(site: Site) -> None:
    with pytest.raises(ConfigError, match="no GPU type 'h100'"):
        serve_script([Fragment(gpu_type="h100", gpus=1)], site)
