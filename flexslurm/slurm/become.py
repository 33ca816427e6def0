"""The function that a submitted job runs on its node: it becomes the given command."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence


def become(argv: Sequence[str], env: Mapping[str, str]) -> None:
    """Replace this process by `argv`; signal handlers set before are gone with it."""
    os.environ.update(env)
    os.execvpe(argv[0], list(argv), os.environ)  # noqa: S606 - no shell is what is wanted
