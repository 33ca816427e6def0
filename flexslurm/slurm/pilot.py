"""Submitting pilots and the head to Slurm, through submitit; never decides what to submit.

submitit pickles the call, writes the job's files and runs the batch script; what it does not guard
is replaced: the script's text is ours (`script`), sbatch runs in a clean environment that keeps
SLURM_CONF, the job id is read from the last line of a parsable answer, states come from squeue,
and the submitted function replaces its process by the agent, so that signals reach the agent and
not submitit's handlers, which pass SIGTERM over.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from flexslurm.config.site import Site
from flexslurm.errors import EnvironmentFault
from flexslurm.slurm.client import SlurmClient
from flexslurm.slurm.jobs import JobInfo
from flexslurm.slurm.script import BatchScript, HeadSpec, PilotSpec, head_script, pilot_script

if TYPE_CHECKING:
    from flexslurm.slurm.submission import GuardedExecutor


class Submitter(Protocol):
    """Where pilots come from: Slurm, or local processes."""

    def submit(self, spec: PilotSpec | HeadSpec) -> str:
        """Submit one job; its id. Raises SlurmError where it is refused."""
        ...

    def states(self, job_ids: Sequence[str]) -> dict[str, JobInfo]:
        """An answer for every id, in one call; raises SlurmUnavailable where nothing is known."""
        ...

    def survey(self, job_ids: Sequence[str]) -> tuple[dict[str, JobInfo], tuple[JobInfo, ...]]:
        """As `states`, and all jobs of the service that are not over, whoever submitted them."""
        ...

    def find(self, name: str) -> list[str]:
        """Ids of the service's jobs of this name that are not over; raises SlurmUnavailable."""
        ...

    def cancel(self, job_ids: Sequence[str]) -> None:
        """End these jobs: SIGTERM, then SIGKILL after the kill wait. Does not wait for the end."""
        ...

    def resize(self, job_id: str, nodes: Sequence[str]) -> None:
        """Leave a running job these of its nodes only; raises SlurmError where it cannot be."""
        ...

    def preview(self, spec: PilotSpec | HeadSpec) -> str:
        """What `submit` would hand over, as text; submits nothing."""
        ...


class SlurmSubmitter:
    """Jobs of a real Slurm."""

    def __init__(
        self, site: Site, service_dir: Path, *, environ: Mapping[str, str] | None = None
    ) -> None:
        self.site = site
        self.client = SlurmClient(site.slurm, environ=environ)
        self._folder = service_dir.absolute() / "jobs"

    def submit(self, spec: PilotSpec | HeadSpec) -> str:
        spec.log_dir.mkdir(parents=True, exist_ok=True)  # Slurm would fail the job without a word
        self._folder.mkdir(parents=True, exist_ok=True)
        return self._executor(spec).submit_command()

    def states(self, job_ids: Sequence[str]) -> dict[str, JobInfo]:
        return self.client.jobs(job_ids, self._grace())

    def survey(self, job_ids: Sequence[str]) -> tuple[dict[str, JobInfo], tuple[JobInfo, ...]]:
        return self.client.survey(job_ids, self._folder, self._grace())

    def _grace(self) -> dict[str, float]:
        return {name: partition.grace for name, partition in self.site.partitions.items()}

    def find(self, name: str) -> list[str]:
        return self.client.named(name, self._folder)

    def cancel(self, job_ids: Sequence[str]) -> None:
        self.client.cancel(job_ids)

    def resize(self, job_id: str, nodes: Sequence[str]) -> None:
        self.client.resize(job_id, nodes, self._folder)

    def preview(self, spec: PilotSpec | HeadSpec) -> str:
        script = self.script(spec, self._node_command())
        command = self.client.argv("sbatch", "--parsable", *script.arguments, "SCRIPT")
        lines = [f"# {shlex.join(command)}", script.text, f"# becomes: {shlex.join(spec.command)}"]
        return "\n".join(lines) + "\n"

    def script(self, spec: PilotSpec | HeadSpec, command: Sequence[str]) -> BatchScript:
        # Hooks know our jobs, and find the service, by its comment, or by this line of the script
        # where the site has a comment of its own.
        home = str(self._folder.parent)
        env = {**spec.env, "FLEXSLURM_SERVICE_DIR": home}
        spec = replace(spec, env=env, comment=f"flexslurm:{home}")
        if isinstance(spec, HeadSpec):
            return head_script(spec, self.site, command)
        return pilot_script(spec, self.site, command)

    def _node_command(self) -> list[str]:
        return [sys.executable, "-P", "-u", "-m", "submitit.core._submit", str(self._folder)]

    def _executor(self, spec: PilotSpec | HeadSpec) -> GuardedExecutor:
        from flexslurm.slurm.submission import GuardedExecutor

        if not self.client.available():
            raise EnvironmentFault(
                f"the command '{self.client.command('sbatch')}' is not on this machine",
                hint="run on a login node, or with --cluster local",
            )
        return GuardedExecutor(
            self._folder, self.client, self.script(spec, self._node_command()), spec
        )
