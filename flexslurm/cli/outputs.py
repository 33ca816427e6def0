"""Files that commands write where they are told to; what stands in them is others' business."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import click

from flexslurm.errors import EnvironmentFault


def check_writable(file: Path) -> None:
    """Whether figures can be written there, before they are measured. Raises EnvironmentFault.

    Nothing is made: a command that fails leaves no file.
    """
    there, place = file.exists(), file.absolute().parent
    fit = not file.is_dir() if there else place.is_dir()
    if not fit or not os.access(file if there else place, os.W_OK):
        raise EnvironmentFault(
            f"cannot write the figures to {file}", hint="name a file in a directory of yours"
        )


def write_figures(file: Path, figures: Any) -> None:
    """As indented JSON. Raises OSError."""
    import msgspec

    file.write_bytes(msgspec.json.format(msgspec.json.encode(figures)) + b"\n")


def check_free(target: Path | None, force: bool) -> None:
    """Raises EnvironmentFault where a file would be replaced that nobody said to replace."""
    if target is not None and target.exists() and not force:
        raise EnvironmentFault(f"{target} is there already", hint="--force replaces it")


def put_text(text: str, target: Path | None, *, executable: bool = False) -> bool:
    """Write it there, or print it; whether a file was written. Raises EnvironmentFault."""
    if target is None:
        click.echo(text, nl=False)
        return False
    try:
        target.write_text(text, encoding="utf-8")
        if executable:
            target.chmod(0o755)
    except OSError as error:
        raise EnvironmentFault(
            f"cannot write {target}: {error.strerror}", hint="choose another place with --to"
        ) from None
    return True


def check_replaceable(path: Path, option: str = "--out") -> None:
    """Before the work that fills it: whether `replace_file` could. Raises EnvironmentFault."""
    place = Path(os.path.realpath(path)).parent  # of a link, what it points to is replaced
    reason = ""
    if path.is_dir():
        reason = os.strerror(errno.EISDIR)
    elif path.exists() and not path.is_file():
        reason = "it is not a regular file"
    elif not place.is_dir():
        reason = "there is no such directory"
    elif not os.access(place, os.W_OK):
        reason = os.strerror(errno.EACCES)
    if reason:
        raise EnvironmentFault(
            f"cannot write {path}: {reason}", hint=f"choose another place with {option}"
        )


def replace_file(path: Path, data: str | bytes, option: str = "--out") -> None:
    """All of it or nothing. Raises EnvironmentFault."""
    from flexslurm.wire.files import write_atomically

    try:
        write_atomically(path.absolute(), data.encode() if isinstance(data, str) else data)
    except OSError as error:
        raise EnvironmentFault(
            f"cannot write {path}: {error.strerror}", hint=f"choose another place with {option}"
        ) from error
