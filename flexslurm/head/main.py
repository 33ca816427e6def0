"""`python -m flexslurm.head.main`: the head's process."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from pathlib import Path

from flexslurm.errors import FlexslurmError
from flexslurm.head.logs import set_up_logging


def head_command(directory: Path) -> tuple[str, ...]:
    """The command line that starts a head."""
    return (sys.executable, "-P", "-m", "flexslurm.head.main", "--service-dir", str(directory))


def main(argv: list[str] | None = None) -> int:
    """Serve until stopped; the exit code is the error's, as in the command line's table."""
    parser = argparse.ArgumentParser(prog="flexslurm head", description=__doc__)
    parser.add_argument("--service-dir", type=Path, required=True)
    arguments = parser.parse_args(argv)
    set_up_logging("head")
    from flexslurm.head.runtime import run_head

    try:
        return asyncio.run(run_head(arguments.service_dir))
    except FlexslurmError as error:
        logging.getLogger(__name__).error("%s", error)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
