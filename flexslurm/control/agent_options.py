"""What an agent is told at its start and what its step's environment says; starts nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flexslurm.config.site import Site
from flexslurm.errors import ServiceError
from flexslurm.slurm.script import LEAST_WARNING_S
from flexslurm.wire.service_dir import ServiceDir


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """What the pilot's script tells its agents."""

    fragment: str
    gpu_type: str
    gpus: int
    grace_s: float
    """Warning the partition gives before it takes a job; 0: none but the kill wait."""
    kill_wait_s: float
    incarnation: str
    node: str
    job_id: str | None = None
    restarts: int = 0
    head_wait_s: float = 3600.0
    """How long it waits for a head, at the start or after one is lost, before it ends."""

    def notice_s(self, signal_name: str) -> float:
        """Seconds that a signal promises at least.

        SIGTERM may be a cancel's, with no grace. SIGUSR1 is what our jobs ask for by --signal:
        before their time limit, or in place of SIGTERM when the grace time begins.
        """
        grace_s = self.grace_s if self.grace_s > 0 else None
        other_s = self.kill_wait_s if signal_name == "SIGTERM" else float(LEAST_WARNING_S)
        return other_s if grace_s is None else min(grace_s, other_s)


def slurm_identity(env: Mapping[str, str]) -> tuple[str, str | None, int]:
    """Node name, job id and number of restarts, from a step's environment."""
    node = env.get("SLURMD_NODENAME") or os.uname().nodename.split(".")[0]
    restarts = env.get("SLURM_RESTART_COUNT", "0")  # unset, not 0, on the first start
    return node, env.get("SLURM_JOB_ID"), int(restarts) if restarts.isdecimal() else 0


def read_site(directory: ServiceDir) -> Site:
    """The site file the service was launched with. Raises ServiceError, ConfigError."""
    from flexslurm.config.schema import load_section

    if not directory.site.exists():
        raise ServiceError(
            f"there is no service in {directory.path}",
            hint="flexslurm launch makes it; every node must see it under the same path",
        )
    return load_section(Site, Path(directory.site))
