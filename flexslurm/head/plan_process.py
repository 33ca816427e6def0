"""`python -m flexslurm.head.plan_process`: plans for a head, beside it; never decides anything.

A plan may be seconds of arithmetic, for which the threads beside it would have to wait. Asked for
an allocation, it prints the gear as msgpack; else it writes the service's gear table.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from flexslurm.config.schema import load_section
from flexslurm.config.service import Service
from flexslurm.config.site import Site
from flexslurm.engine.prctl import die_with_parent
from flexslurm.errors import FlexslurmError
from flexslurm.gear import Gear, NoGear, Signature
from flexslurm.head.card_memory import memory_option, read_memory
from flexslurm.head.logs import set_up_logging
from flexslurm.wire.files import write_atomically
from flexslurm.wire.service_dir import ServiceDir

_NICE = 10


class Planned(msgspec.Struct, frozen=True):
    """The answer for one allocation: one of the two."""

    gear: Gear | None = None
    none: NoGear | None = None


def plan_command(
    directory: Path, signature: Signature | None, memory: Mapping[str, int] | None = None
) -> tuple[str, ...]:
    """The command line that plans an allocation; without one, the whole table.

    `memory`: bytes of a card by type, where cards have less than the site file says.
    """
    where = ("--service-dir", str(directory), "--parent", str(os.getpid()))
    what = () if signature is None else ("--signature", str(signature))
    more = memory_option(memory or {})
    return (sys.executable, "-P", "-m", "flexslurm.head.plan_process", *where, *what, *more)


def read_planned(text: bytes) -> Gear | NoGear:
    """What `plan_command` printed. Raises ValueError."""
    try:
        answer = msgspec.msgpack.decode(text, type=Planned)
    except msgspec.MsgspecError as error:
        raise ValueError(f"the answer cannot be read: {error}") from error
    found = answer.gear or answer.none
    if found is None:
        raise ValueError("the answer is empty")
    return found


def main(argv: list[str] | None = None) -> int:
    """Plan; the exit code is the error's, as in the command line's table."""
    parser = argparse.ArgumentParser(prog="flexslurm plan process", description=__doc__)
    parser.add_argument("--service-dir", type=Path, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--signature", type=Signature.parse)
    parser.add_argument("--memory", action="append", default=[])
    arguments = parser.parse_args(argv)
    set_up_logging("planner")
    die_with_parent(arguments.parent)
    os.nice(_NICE)  # the head on the same processors passes tokens on
    answers = os.dup(1)
    os.dup2(2, 1)  # HiGHS writes lines of its own to the standard output
    try:
        memory = read_memory(arguments.memory)
        text = _plan(ServiceDir(arguments.service_dir), arguments.signature, memory)
    except FlexslurmError as error:
        logging.getLogger(__name__).error("%s", error)
        return error.exit_code
    with os.fdopen(answers, "wb") as file:
        file.write(text)
    return 0


def _plan(directory: ServiceDir, signature: Signature | None, memory: Mapping[str, int]) -> bytes:
    from flexslurm.head.planning import ServicePlanner

    service, site = load_section(Service, directory.service), load_section(Site, directory.site)
    planner = ServicePlanner(service, site, memory=memory)
    if signature is None:
        write_atomically(directory.table(memory), planner.make_table(lambda done, total: None))
        return b""
    found = planner.exact(signature)
    answer = Planned(gear=found) if isinstance(found, Gear) else Planned(none=found)
    return msgspec.msgpack.encode(answer)


if __name__ == "__main__":
    sys.exit(main())
