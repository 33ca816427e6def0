"""Keeps lines of C libraries off the standard output; ours are printed before and after."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def only_ours_on_stdout() -> Iterator[None]:
    """HiGHS writes lines of its own to the process's standard output; they go nowhere."""
    sys.stdout.flush()
    try:
        saved = os.dup(1)
    except OSError:  # there is no standard output
        yield
        return
    nothing = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 1)
        yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)
        os.close(nothing)
