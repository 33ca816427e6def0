"""The gear table of a launch: the one of the launch before, or made now, with its progress said."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from flexslurm.cli.quiet_stdout import only_ours_on_stdout
from flexslurm.wire.service_dir import ServiceDir

if TYPE_CHECKING:
    from flexslurm.head.planning import ServicePlanner
    from flexslurm.planner.table import GearTable

Say = Callable[[str], None]

_QUIET_S = 1.0
_EVERY_S = 2.0


def service_table(
    planner: ServicePlanner, directory: ServiceDir, say: Say
) -> tuple[GearTable, bytes | None]:
    """The table and, where it is to be written, its bytes."""
    from flexslurm.planner.table import GearTable

    table, why_not = planner.fitting_table(directory.gears)
    if table is not None:
        return table, None
    if directory.gears.exists():
        say(f"{why_not}: it is made again")
    with only_ours_on_stdout():
        data = planner.make_table(progress_lines(say))
    return GearTable(data, str(directory.gears)), data


def progress_lines(
    say: Say, now: Callable[[], float] = time.monotonic
) -> Callable[[int, int], None]:
    """Says how far a table is after a second, and every other second from then on."""
    due = now() + _QUIET_S

    def show(done: int, total: int) -> None:
        nonlocal due
        if now() >= due:
            due = now() + _EVERY_S
            say(f"planned {done:,} of {total:,} allocations")

    return show
