"""What a launch should say of the cluster before anything is submitted; never refuses one."""

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


def surprises(site: Site) -> list[str]:
    """Where the site file promises more than Slurm does; nothing where Slurm does not answer.

    Two calls of scontrol, each within `slurm.command_timeout`. Whether Slurm is there at all is
    for the submission to find out.
    """
    client = SlurmClient(site.slurm)
    try:
        return disagreements(site, client.partitions(), client.config())
    except FlexslurmError:
        return []
