"""`sbatch/serve.sh` is what is rendered for the sandbox, and Slurm's own reader takes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexslurm.config.schema import load_section
from flexslurm.config.service import Fragment
from flexslurm.config.site import Site
from flexslurm.errors import ConfigError
from flexslurm.slurm.serve import serve_script

POOL = [
    Fragment(partition="scavenge", gpu_type="a100", gpus=2),
    Fragment(partition="scavenge", gpu_type="l40s", gpus=1, count=2),
]


@pytest.fixture
def site(root: Path) -> Site:
    return load_section(Site, root / "site-configs" / "sandbox.yaml")


def test_the_script_in_the_checkout(root: Path, site: Site) -> None:
    path = root / "sbatch" / "serve.sh"
    assert path.read_text(encoding="utf-8") == serve_script(POOL, site)


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
