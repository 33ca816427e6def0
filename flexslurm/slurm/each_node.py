"""Running one short command on every node of the allocation this runs in; starts nothing else."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from flexslurm.errors import EnvironmentFault
from flexslurm.slurm.client import SlurmClient
from flexslurm.slurm.command import Completed, run


def nodes_of_allocation(environ: Mapping[str, str] = os.environ) -> int:
    """How many nodes this job has, over all components of a heterogeneous one.

    Raises EnvironmentFault outside of a job.
    """
    groups = _groups(environ)
    names = [f"SLURM_JOB_NUM_NODES_HET_GROUP_{group}" for group in groups]
    counts = [environ.get(name, "") for name in names] or [
        environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES", "")
    ]
    if not environ.get("SLURM_JOB_ID") or not all(count.isdecimal() for count in counts):
        raise EnvironmentFault(
            "this is not inside a Slurm job",
            hint="salloc --nodes=2 --gres=gpu:1 flexslurm doctor --job",
        )
    return sum(int(count) for count in counts)


def on_each_node(
    client: SlurmClient,
    argv: Sequence[str],
    timeout_s: float,
    environ: Mapping[str, str] = os.environ,
) -> Completed:
    """One task a node, beside what runs there; the output of all, in any order."""
    groups = _groups(environ)
    where = (
        [f"--het-group={','.join(map(str, groups))}"]
        if groups
        else [f"--nodes={nodes_of_allocation(environ)}"]
    )
    step = client.argv(
        "srun", f"--jobid={environ['SLURM_JOB_ID']}", "--overlap", "--ntasks-per-node=1",
        "--kill-on-bad-exit=0", "--mpi=none", "--input=none", *where, *argv,
    )  # fmt: skip
    return run(step, env=client.env, timeout_s=timeout_s)


def _groups(environ: Mapping[str, str]) -> range:
    size = environ.get("SLURM_HET_SIZE", "")
    return range(int(size)) if size.isdecimal() else range(0)
