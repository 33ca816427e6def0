"""Rendering `sbatch/serve.sh`: one allocation, a component per entry of the pool; pure text."""

from __future__ import annotations

from collections.abc import Sequence

from flexslurm.config.service import Fragment
from flexslurm.config.site import Partition, Site
from flexslurm.slurm.script import slurm_type, warning_s
from flexslurm.slurm.times import format_duration

_HEAD = """\
#!/bin/bash
# A whole service in one allocation: the head in the batch step, an agent on every node.
#
#   sbatch sbatch/serve.sh SERVICE.yaml --site SITE.yaml [other options of flexslurm launch]
#
# The #SBATCH lines ask for {pool}: change them to the nodes you want.
# Each component of the job is one kind of node. Slurm starts all of them together and preempts all
# of them together: for a service that outlives the loss of a node, use flexslurm launch from a
# login node instead.
"""
_BODY = """\

# Without a shell in between, signals reach the launcher. The job ends with the service.
exec flexslurm launch "$@" --cluster allocation
"""


def serve_script(pool: Sequence[Fragment], site: Site) -> str:
    """The script for a pool. Raises ConfigError for a GPU type the site does not define."""
    text = ", ".join(f"{f.count * f.nodes} x {f.gpu_type}:{f.gpus}" for f in pool)
    components = [_component(fragment, site) for fragment in pool]
    walltime = min((f.walltime for f in pool if f.walltime is not None), default=None)
    first = [
        "#SBATCH --job-name=flexslurm",
        "#SBATCH --output=flexslurm.%j.log",
        "#SBATCH --open-mode=append",
        "#SBATCH --requeue",
        "#SBATCH --no-kill",
        f"#SBATCH --signal=B:USR1@{warning_s(walltime)}",
    ]
    if walltime is not None:
        first.append(f"#SBATCH --time={format_duration(walltime)}")
    body = "\n#SBATCH hetjob\n".join(components)
    return _HEAD.format(pool=text) + "\n".join(first) + "\n" + body + "\n" + _BODY


def _component(fragment: Fragment, site: Site) -> str:
    partition = site.partitions.get(fragment.partition or "", Partition())
    options = [] if fragment.partition is None else [f"--partition={fragment.partition}"]
    options += [
        f"--nodes={fragment.count * fragment.nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={fragment.gpus * partition.cpus_per_gpu}",
        f"--gres=gpu:{slurm_type(fragment.gpu_type, site)}:{fragment.gpus}",
    ]
    return "#SBATCH " + " ".join(options)
