"""Why a head ended before it served, in its own words; pure, reads no file."""

from __future__ import annotations

import re
from collections.abc import Sequence

from flexslurm.errors import (
    CapacityError,
    ConfigError,
    EnvironmentFault,
    FlexslurmError,
    ModelError,
    ServiceError,
    SlurmError,
)

_LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\S* head ([DIWEC]) (.*)")
_TAIL = 8
_KINDS = {
    kind.exit_code: kind
    for kind in (ConfigError, ModelError, CapacityError, SlurmError, EnvironmentFault)
}


def ended_early(log: Sequence[str], exit_code: int | None, where: str) -> FlexslurmError:
    """The error of a launch whose head has ended; `where` is how commands name the service.

    A head's exit codes are those of our commands, and its last line tells what was wrong. Where
    it did not get as far, the end of its log does.
    """
    whole = f"the whole log: flexslurm logs {where} head"
    words = _last_error(log)
    if words is None:
        tail = "\n".join(f"  {line}" for line in log[-_TAIL:]) or "  (no output)"
        return ServiceError(f"the head has ended before it served:\n{tail}", hint=whole)
    kind = _KINDS.get(exit_code or 0, ServiceError)
    hint = "\n  ".join([*(line.strip() for line in words[1:]), whole])
    return kind(f"the head has ended before it served: {words[0]}", hint=hint)


def _last_error(log: Sequence[str]) -> list[str] | None:
    """The last thing that the head has logged, where that is an error; and its further lines."""
    for back, line in enumerate(reversed(log)):
        found = _LINE.fullmatch(line)
        if found is not None:
            rest = log[len(log) - back :]
            bug = any(line.startswith("Traceback ") for line in rest)
            return [found[2], *rest] if found[1] in "EC" and not bug else None
    return None
