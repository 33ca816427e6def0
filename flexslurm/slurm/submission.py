"""submitit's Slurm executor with its weak places replaced; imported only to submit."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from submitit.core import utils
from submitit.slurm.slurm import SlurmExecutor, SlurmJob

from flexslurm.errors import EnvironmentFault
from flexslurm.slurm.become import become
from flexslurm.slurm.client import SlurmClient
from flexslurm.slurm.script import BatchScript, HeadSpec, PilotSpec


class GuardedExecutor(SlurmExecutor):  # type: ignore[misc]
    """Submits one rendered script, whose task becomes the specification's command."""

    def __init__(
        self, folder: Path, client: SlurmClient, script: BatchScript, spec: PilotSpec | HeadSpec
    ) -> None:
        super().__init__(folder)
        self._client = client
        self._script = script
        self._spec = spec

    @classmethod
    def affinity(cls) -> int:
        """Without a look for srun: our caller has looked for sbatch."""
        return 2

    def submit_command(self) -> str:
        """Submit; the job's id. Raises EnvironmentFault, SlurmError."""
        try:
            job = self.submit(become, self._spec.command, dict(self._spec.env))
        except OSError as error:
            raise EnvironmentFault(
                f"cannot write the job's files in {self.folder}: {error.strerror}",
                hint="free space there, or choose another directory with --service-dir",
            ) from error
        return str(job.job_id)

    def _num_tasks(self) -> int:
        return self._spec.nodes if isinstance(self._spec, PilotSpec) else 1

    def _internal_process_submissions(
        self, delayed_submissions: Sequence[utils.DelayedSubmission]
    ) -> list[SlurmJob[Any]]:
        """As submitit's, but a refused submission leaves no file behind."""
        return [self._submit_one(delayed) for delayed in delayed_submissions]

    def _submit_one(self, delayed: utils.DelayedSubmission) -> SlurmJob[Any]:
        stem = self.folder / uuid.uuid4().hex
        pickled, script = stem.with_suffix(".pkl"), stem.with_suffix(".sh")
        try:
            delayed.dump(pickled)
            script.write_text(self._script.text, encoding="utf-8")
            job_id = self._client.submit(script, *self._script.arguments, cwd=self.folder).base
        except BaseException:
            pickled.unlink(missing_ok=True)
            script.unlink(missing_ok=True)
            raise
        # A task that starts before this looks for its file for a minute.
        paths = utils.JobPaths(self.folder, job_id=job_id)
        pickled.replace(paths.submitted_pickle)
        script.replace(paths.submission_file)
        return SlurmJob(self.folder, job_id, tasks=list(range(self._num_tasks())))
