"""The hooks that an admin may install: which there are, their files, and the lines that go with
them; pure but for reading the packaged files, installs nothing.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from flexslurm.config.site import Partition, Site
from flexslurm.errors import ConfigError
from flexslurm.slurm.gpu_request import gpu_request

SUDOERS = "flexslurm.sudoers"


@dataclass(frozen=True, slots=True)
class Hook:
    """One hook: its packaged files, and how Slurm is told of it."""

    name: str
    words: str
    runs_on: str
    files: tuple[tuple[str, str], ...]
    """`(packaged file, installed name)`."""
    lines: tuple[str, ...]
    """What to do after the files are there; `{dir}` is where they are."""
    executable: bool = True
    beside: tuple[tuple[str, str], ...] = ()
    """Files that it shares with other hooks, as `files`."""

    @property
    def all_files(self) -> tuple[tuple[str, str], ...]:
        return self.files + self.beside


_AS_OWNER = (("as_owner.sh", "as_owner.sh"), ("flexslurm.sudoers", SUDOERS))
_SUDO = (
    f"a SlurmUser other than root: visudo -cf {{dir}}/{SUDOERS} && "
    f"install -o root -g root -m 0440 {{dir}}/{SUDOERS} /etc/sudoers.d/flexslurm"
)
_STRIGGERS = (("node-down", "--down"), ("node-drain", "--drained"), ("node-up", "--up"))

HOOKS: dict[str, Hook] = {
    hook.name: hook
    for hook in (
        Hook(
            "job_submit",
            "refuses what the site file rules out, asks for a requeue, marks the jobs",
            "slurmctld's host",
            (("job_submit.lua", "job_submit.lua"),),
            (
                "put job_submit.lua beside slurm.conf (a site with its own: see the file's head)",
                "slurm.conf: JobSubmitPlugins=lua",
                "scontrol reconfigure",
            ),
            executable=False,
        ),
        Hook(
            "cli_filter",
            "adds --signal, --requeue and --open-mode=append, says what is wrong at submission",
            "login nodes",
            (("cli_filter.lua", "cli_filter.lua"),),
            (
                "put cli_filter.lua beside slurm.conf (a site with its own: see the file's head)",
                "slurm.conf: CliFilterPlugins=cli_filter/lua",
            ),
            executable=False,
        ),
        Hook(
            "spank",
            "--flexslurm-service: the steps get the site file and the addresses of the service",
            "login and compute nodes",
            (("spank/flexslurm.c", "flexslurm.c"), ("spank/Makefile", "Makefile")),
            (
                "make -C {dir} install",
                "plugstack.conf: optional flexslurm.so services=DIR site=FILE",
            ),
            executable=False,
        ),
        Hook(
            "prolog",
            "tells the service that its job begins",
            "compute nodes",
            (("prolog.sh", "prolog.sh"),),
            ("slurm.conf: Prolog={dir}/prolog.sh", "scontrol reconfigure"),
        ),
        Hook(
            "epilog",
            "tells the service that its job has ended",
            "compute nodes",
            (("epilog.sh", "epilog.sh"),),
            ("slurm.conf: Epilog={dir}/epilog.sh", "scontrol reconfigure"),
        ),
        Hook(
            "prolog_slurmctld",
            "as prolog, told once by the controller's host",
            "slurmctld's host",
            (("prolog_slurmctld.sh", "prolog_slurmctld.sh"),),
            (
                "slurm.conf: PrologSlurmctld={dir}/prolog_slurmctld.sh",
                _SUDO,
                "scontrol reconfigure",
            ),
            beside=_AS_OWNER,
        ),
        Hook(
            "epilog_slurmctld",
            "as epilog, told once by the controller's host",
            "slurmctld's host",
            (("epilog_slurmctld.sh", "epilog_slurmctld.sh"),),
            (
                "slurm.conf: EpilogSlurmctld={dir}/epilog_slurmctld.sh",
                _SUDO,
                "scontrol reconfigure",
            ),
            beside=_AS_OWNER,
        ),
        Hook(
            "strigger",
            "tells the services which nodes went down, drained or came back",
            "slurmctld's host",
            tuple(("strigger.sh", f"{event}.sh") for event, _ in _STRIGGERS),
            (
                *(
                    f"as SlurmUser: strigger --set --node {option} --flags=PERM "
                    f"--program={{dir}}/{event}.sh"
                    for event, option in _STRIGGERS
                ),
                _SUDO,
            ),
            beside=_AS_OWNER,
        ),
    )
}  # fmt: skip


def hook_named(name: str) -> Hook:
    """Raises ConfigError for a hook that does not exist."""
    key = name.replace("-", "_")
    if key not in HOOKS:
        raise ConfigError(f"there is no hook '{name}'", hint=f"there are {', '.join(HOOKS)}")
    return HOOKS[key]


def trigger_arguments(directory: Path) -> list[list[str]]:
    """Arguments of strigger that register its programs, one list a trigger."""
    return [
        ["--set", "--node", option, "--flags=PERM", f"--program={directory}/{event}.sh"]
        for event, option in _STRIGGERS
    ]


def hook_text(
    packaged: str, site: Site | None, command: Sequence[str], directory: str = "/etc/slurm"
) -> str:
    """A file as it is to be installed: the limits of the site and the command's place filled in."""
    path = resources.files("flexslurm.slurm") / "hooks" / packaged
    text = path.read_text(encoding="utf-8")
    squeue = "squeue" if site is None else site.slurm.commands.get("squeue", "squeue")
    return (
        text.replace("--@LIMITS@", "" if site is None else _limits(site))
        .replace("@AS_OWNER@", _in_sudoers(f"{directory}/as_owner.sh"))
        .replace("@HERE@", directory if packaged.endswith(".lua") else shlex.quote(directory))
        .replace("@SERVICES@", shlex.quote(_services_below(site)))
        .replace("@FLEXSLURM@", shlex.join(command))
        .replace("@SQUEUE@", shlex.quote(squeue))
    )


def _services_below(site: Site | None) -> str:
    """Where users keep their services beside their homes; empty: anywhere."""
    place = (site.paths.shared_dir if site is not None else None) or ""
    return place if place.startswith("/") else ""


def _in_sudoers(path: str) -> str:
    """A path as sudoers has it: what is special there is escaped, patterns too."""
    return re.sub(r"([^A-Za-z0-9_./+@-])", r"\\\1", path)


def _limits(site: Site) -> str:
    return "\n".join(
        f"   [{_lua(name)}] = {{{_limits_of(partition, site)}}},"
        for name, partition in site.partitions.items()
    )


def _limits_of(partition: Partition, site: Site) -> str:
    asked = [gpu_request(name, site) for name in partition.gpu_types]
    # GPUs without a type, or shards, cannot be told from a wrong type by it
    plain = all(request.type for request in asked)
    types = ", ".join(_lua(request.type) for request in asked if request.type and plain)
    parts = [f"types = {{{types}}}", f"requeue = {str(partition.requeue).lower()}"]
    if partition.max_walltime is not None:
        parts.append(f"max_minutes = {max(1, int(partition.max_walltime // 60))}")
    if partition.gpus_per_node is not None:
        parts.append(f"gpus_per_node = {partition.gpus_per_node}")
    return ", ".join(parts)


def _lua(text: str) -> str:
    """A Lua string; the names of a checked site file need no escapes."""
    assert not set('"\\\n') & set(text), text
    return f'"{text}"'
