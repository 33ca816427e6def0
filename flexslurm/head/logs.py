"""How our processes log: one line an event on stderr, with time, process and level."""

from __future__ import annotations

import logging
import os
import sys


def set_up_logging(process: str) -> None:
    """Call once at the start of a process; FLEXSLURM_LOG sets the level."""
    level = os.environ.get("FLEXSLURM_LOG", "INFO").upper()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter(
            f"%(asctime)s.%(msecs)03d {process} %(levelname).1s %(message)s",
            datefmt="%Y-%m-%d %H:%M:%S",
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    known = logging.getLevelNamesMapping()
    root.setLevel(known.get(level, logging.INFO))
    for noisy in ("asyncio", "zmq", "zmq.auth", "uvicorn.access", "httpx"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
