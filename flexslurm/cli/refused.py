"""A submission that Slurm refused, told with what to do about it; never asks Slurm anything."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from flexslurm.errors import SlurmError
from flexslurm.slurm.reasons import refusal


def told(error: SlurmError, sbatch: str, site_file: Path) -> SlurmError:
    """The error of a launch with each line of Slurm's answer on a line of its own.

    `sbatch` is the site's name of the command; errors of other commands come back as they are.
    """
    command = Path(sbatch).name
    name = re.escape(command)
    if error.transient or not re.match(f"{name}: ", error.message):
        return error
    lines = re.split(rf"\s*\b(?:{name}|sbatch): (?:error: )?", error.message)
    said = dict.fromkeys(line.strip() for line in lines if line.strip())
    meant = refusal(error.message)
    known = meant.words.partition(" (")[0] if meant.lasting else "Slurm takes no job"
    hint = f"run: flexslurm site check {shlex.quote(str(site_file))}" if meant.lasting else ""
    return SlurmError(
        "\n".join([f"{known}:", *(f"  {command}: {line}" for line in said)]),
        hint="; ".join(part for part in (meant.todo, hint) if part) or None,
    )
