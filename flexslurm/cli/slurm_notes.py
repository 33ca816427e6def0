"""What a launch asks of Slurm, and says of it, before anything is submitted."""

from __future__ import annotations

from collections.abc import Sequence

from flexslurm.config.service import Fragment
from flexslurm.config.site import Site
from flexslurm.errors import FlexslurmError
from flexslurm.slurm.client import SlurmClient
from flexslurm.slurm.window import disagreements, site_window


def warnings_of(pool: Sequence[Fragment], site: Site) -> list[str]:
    """The warning that each partition of the pool gives, as the site file has it."""
    used = dict.fromkeys(entry.partition for entry in pool if entry.partition is not None)
    return [site_window(name, site).in_words() for name in used]


def require_slurm(site: Site) -> None:
    """Whether Slurm answers at all: without it nothing need be planned, written or cancelled.

    Raises SlurmError, SlurmUnavailable, or EnvironmentFault where its commands are missing.
    """
    SlurmClient(site.slurm).config()


def surprises(site: Site) -> list[str]:
    """Where the site file promises more than Slurm does; nothing where Slurm does not answer.

    Two calls of scontrol, each within `slurm.command_timeout`.
    """
    client = SlurmClient(site.slurm)
    try:
        return disagreements(site, client.partitions(), client.config())
    except FlexslurmError:
        return []
