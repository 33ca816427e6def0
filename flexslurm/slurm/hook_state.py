"""Which hooks a cluster has: what Slurm's configuration names, and whether that is ours; pure but
for reading the files that it names. Changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flexslurm.slurm.hook_files import Hook

_KEYS = {
    "job_submit": "JobSubmitPlugins",
    "cli_filter": "CliFilterPlugins",
    "spank": "PlugStackConfig",
    "prolog": "Prolog",
    "epilog": "Epilog",
    "prolog_slurmctld": "PrologSlurmctld",
    "epilog_slurmctld": "EpilogSlurmctld",
}
_MARK = "flexslurm"
_MOST_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Trigger:
    """A trigger of strigger."""

    id: str
    program: str


@dataclass(frozen=True, slots=True)
class Named:
    """A file that Slurm has been told of, in whose text we are."""

    path: str
    problem: str = ""
    """Why it could not be looked into."""


def parse_triggers(text: str) -> list[Trigger]:
    """Rows of `strigger --get`: the id comes first, the program last; others are left out."""
    found = []
    for line in text.splitlines():
        cells = line.split()
        if len(cells) >= 3 and cells[0].isdecimal() and cells[-1].startswith("/"):
            found.append(Trigger(cells[0], cells[-1]))
    return found


def named_files(hook: Hook, config: Mapping[str, str], triggers: Sequence[Trigger]) -> list[Named]:
    """What Slurm is told of this hook, as its configuration has it now; empty: nothing."""
    if hook.name == "strigger":
        names = {installed for _, installed in hook.files}
        paths = [t.program for t in triggers if Path(t.program).name in names]
        return [named for path in paths if (named := _ours(path)) is not None]
    key = _KEYS[hook.name]
    told = [value for name, value in config.items() if re.fullmatch(rf"{key}(\[\d+\])?", name)]
    paths = [word.strip() for value in told for word in value.split(",") if word.strip()]
    if hook.name in ("job_submit", "cli_filter"):  # their Lua stands beside slurm.conf
        words = {"lua", f"{hook.name}/lua"}
        beside = Path(config.get("SLURM_CONF", "/etc/slurm/slurm.conf")).parent
        paths = [str(beside / f"{hook.name}.lua")] if words & set(paths) else []
    found = (_ours(path) for path in paths if path.startswith("/"))
    return [named for named in found if named is not None]


def _ours(path: str) -> Named | None:
    """None: a file that has nothing of ours; patterns such as prolog.d/* are looked through."""
    if "*" in path:
        place = Path(path)
        inside = (_ours(str(each)) for each in sorted(place.parent.glob(place.name))[:100])
        return next((named for named in inside if named is not None), None)
    try:
        with Path(path).open("rb") as file:
            text = file.read(_MOST_BYTES)
    except FileNotFoundError:
        if _MARK in path:
            return Named(path, "it is not there")
        return None
    except OSError as error:
        return Named(path, error.strerror or str(error)) if _MARK in path else None
    return Named(path) if _MARK.encode() in text else None


def undo_lines(hook: Hook, directory: Path) -> list[str]:
    """What takes a hook out again, in order: Slurm first, since it drains nodes for lost files."""
    if hook.name == "strigger":
        return ["as SlurmUser: flexslurm hooks uninstall strigger --to DIR --register"]
    if hook.name == "spank":
        return [
            "take the line with flexslurm.so out of plugstack.conf",
            "then remove flexslurm.so from the directory of Slurm's plugins",
        ]
    key = _KEYS[hook.name]
    value = {"job_submit": "lua", "cli_filter": "cli_filter/lua"}.get(
        hook.name, f"{directory}/{hook.files[0][1]}"
    )
    return [f"take {value} out of {key} in slurm.conf", "scontrol reconfigure"]
