"""What a launch puts beside the service's files for its head: measurements and leaf switches.

The head plans with copies: what is changed or removed later does not change a running service.
Never plans, and writes only where it is told to.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from flexslurm.config.bounded import read_text
from flexslurm.config.site import MeasuredSettings, Site
from flexslurm.errors import ConfigError, EnvironmentFault, SlurmError

if TYPE_CHECKING:
    from flexslurm.planner.model_spec import ModelSpec
    from flexslurm.wire.service_dir import ServiceDir

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class LaunchFacts:
    """Files for the service directory."""

    measured: Mapping[str, str] = field(default_factory=dict)
    """Texts, by their names below `ServiceDir.measured`."""
    leaves: Mapping[str, str] = field(default_factory=dict)
    """The leaf switch of each node."""

    def write(self, directory: ServiceDir) -> None:
        """In place of those of an earlier launch."""
        import msgspec

        from flexslurm.wire.files import write_atomically

        shutil.rmtree(directory.measured, ignore_errors=True)
        for name, text in self.measured.items():
            path = directory.measured / name
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, text.encode())
        write_atomically(directory.leaves, msgspec.json.encode(dict(self.leaves)))

    def used_by(self, site: Site, directory: ServiceDir) -> Site:
        """The site as the head reads it: with the copies in place of what was copied."""
        named = {name.split("/", 1)[0]: directory.measured for name in self.measured}
        measured = MeasuredSettings(
            profiles=str(directory.measured / "profiles") if "profiles" in named else None,
            links=str(directory.measured / "links.csv") if "links.csv" in named else None,
        )
        return site.model_copy(update={"measured": measured})


def gather_facts(site: Site, spec: ModelSpec, cluster: str, say: Say) -> LaunchFacts:
    """Read them. Raises ConfigError for a file that is missing or malformed, naming the line."""
    return LaunchFacts(measured_texts(site, spec, say), leaf_switches(site, cluster, say))


def measured_texts(site: Site, spec: ModelSpec, say: Say) -> dict[str, str]:
    """The links and this model's profiles, as they are."""
    from flexslurm.planner.files import own_profiles, profile_paths, read_csv
    from flexslurm.planner.topology import Topology

    texts: dict[str, str] = {}
    measured = site.measured
    topology = Topology.from_site(site, spec.dtype)
    found = own_profiles(profile_paths(measured), spec, topology)
    for file, profile in found:
        texts[f"profiles/{profile.gpu_type}-tp{profile.tp}.csv"] = read_csv(file)
    if measured.profiles is not None and not found:
        say(
            f"{measured.profiles} has no profile of {spec.name} in {spec.dtype}: times are computed"
        )
    if measured.links is not None:
        texts["links.csv"] = read_csv(Path(measured.links))
    return texts


def leaf_switches(site: Site, cluster: str, say: Say) -> dict[str, str]:
    """The leaf switch of each node: from the site's topology.conf, or as Slurm has it.

    Empty where no switches are known: placement then looks at bytes alone.
    """
    from flexslurm.planner.leaves import read_leaves
    from flexslurm.slurm.client import SlurmClient
    from flexslurm.slurm.nodelist import expand

    if site.slurm.topology is not None:
        path = Path(site.slurm.topology)
        try:
            text = read_text(path)
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise ConfigError(
                f"cannot read it: {reason}", file=str(path), key="slurm.topology"
            ) from error
        return read_leaves(text, expand, str(path))
    if cluster == "local":
        return {}
    try:
        return read_leaves(SlurmClient(site.slurm).topology(), expand, "scontrol show topology")
    except (ConfigError, EnvironmentFault, SlurmError) as error:  # gears serve without it
        say(f"leaf switches are not known: {error.message}")
        return {}
