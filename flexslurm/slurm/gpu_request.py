"""What Slurm is asked for when a GPU type of the site file is wanted; pure, asks nothing.

Whole cards are `gpu:TYPE`, MIG slices `gpu:a100_1g.10gb` (a type like any other), shares of a card
`shard`, and GPUs that Slurm knows without a type `gpu`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from flexslurm.config.site import Site
from flexslurm.errors import ConfigError
from flexslurm.slurm.gres import Gres

_WORD = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")


@dataclass(frozen=True, slots=True)
class GpuRequest:
    """One generic resource of Slurm, and how many of it are one GPU of ours."""

    name: str
    type: str | None
    per_gpu: int = 1

    def __str__(self) -> str:
        return self.name if self.type is None else f"{self.name}:{self.type}"

    def gpus_in(self, entries: Iterable[Gres]) -> int:
        """GPUs of this type among what a node has, or what a job holds."""
        held = sum(e.count for e in entries if (e.name, e.type) == (self.name, self.type))
        return held // self.per_gpu


def gpu_request(gpu_type: str, site: Site) -> GpuRequest:
    """How a type of the site file is asked for. Raises ConfigError for what Slurm cannot read."""
    entry = site.gpu_types.get(gpu_type)
    if entry is None:
        known = ", ".join(site.gpu_types)
        raise ConfigError(f"the site has no GPU type '{gpu_type}'", hint=f"defined: {known}")
    if entry.gres is None:
        name, key = entry.slurm_type or gpu_type, f"gpu_types.{gpu_type}.slurm_type"
        if not _WORD.match(name):
            raise ConfigError(f"'{name}' cannot be a GRES type", key=key)
        return GpuRequest("gpu", name, entry.gres_per_gpu)
    name, colon, kind = entry.gres.partition(":")
    if not _WORD.match(name) or (colon and not _WORD.match(kind)):
        raise ConfigError(
            f"'{entry.gres}' cannot be asked for with --gres",
            key=f"gpu_types.{gpu_type}.gres",
            hint="write what stands before the count, as gpu:a100_1g.10gb, gpu or shard",
        )
    return GpuRequest(name, kind or None, entry.gres_per_gpu)


def gres_option(gpu_type: str, gpus: int, site: Site) -> str:
    """The option of sbatch for some GPUs of a type on each node. Raises ConfigError."""
    request = gpu_request(gpu_type, site)
    return f"--gres={request}:{gpus * request.per_gpu}"
