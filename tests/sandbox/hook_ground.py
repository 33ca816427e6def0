"""A cluster with all of our hooks, and what tests ask of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from flexslurm.slurm.client import SlurmClient
from tests.command_lines import command_lines

LIMITS = """\
name: limits
gpu_types: {a100: {model: a100-80}}
partitions:
  low: {gpu_types: [a100], gpus_per_node: 2, max_walltime: 2h, requeue: true}
  once: {gpu_types: [a100], requeue: false}
"""
SANDBOX = """\
nodes:
  g: {{gpu_type: a100, gpus: 4}}
gpu_types: {{a100: {{}}}}
partitions:
  low: {{nodes: [g], default: true}}
  once: {{nodes: [g]}}
job_submit_lua: {hooks}/job_submit.lua
cli_filter_lua: {hooks}/cli_filter.lua
plugstack: [{plugstack}]
slurm_conf:
- Prolog={hooks}/prolog.sh
- Epilog={hooks}/epilog.sh
- PrologSlurmctld={hooks}/prolog_slurmctld.sh
- EpilogSlurmctld={hooks}/epilog_slurmctld.sh
- JobRequeue=0
"""


def script(where: Path, body: str = "sleep 30\n") -> Path:
    path = where / "job.sh"
    path.write_text("#!/bin/bash\n" + body)
    return path


def told(hooks: Path) -> list[str]:
    path = hooks / "told"
    return path.read_text().splitlines() if path.exists() else []


def refusal(client: SlurmClient, path: Path, *options: str) -> str:
    done = client._try("sbatch", "--parsable", "--output=/dev/null", *options, str(path))
    assert done.code != 0, options
    return done.err


def run_s(client: SlurmClient, *options: str) -> float:
    """How long a job takes from its submission to its end."""
    began = time.monotonic()
    assert client.call("srun", "--partition=low", *options, "hostname").out
    return time.monotonic() - began


def delay_s(without_s: float, with_s: float) -> float:
    """How much longer it takes: in seconds, or in plain jobs where one of those takes longer."""
    return (with_s - without_s) / max(1.0, without_s)


def best_s(once_s: Callable[[], float], enough_s: float = 1.0) -> float:
    """The least of a few tries at a time that a busy machine makes longer, never shorter."""
    least_s = once_s()
    for _ in range(5):
        if least_s < enough_s:
            break
        least_s = min(least_s, once_s())
    return least_s


def tellers(hooks: Path) -> list[str]:
    return [line for _, line in command_lines() if f"{hooks}/teller" in line]
