"""Memory that the system has pages for before anybody waits for it; changes no byte of it.

The first to write to memory of the system waits for each of its pages, which takes ten times as
long as the writing and more.
"""

from __future__ import annotations

import ctypes
import mmap

_POPULATE_WRITE = 23
"""Linux 5.14; older systems refuse, and the pages come when they are written to."""
_AT_ONCE_BYTES = 4 << 20

_madvise = ctypes.CDLL(None, use_errno=True).madvise  # lets go of the interpreter, unlike mmap's
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_madvise.restype = ctypes.c_int


def populate(address: int, nbytes: int) -> bool:
    """Have pages for this memory, which must be mapped; whether the system has given them all."""
    at = address // mmap.PAGESIZE * mmap.PAGESIZE
    end = address + nbytes
    while at < end:
        count = min(_AT_ONCE_BYTES, end - at)
        if _madvise(at, count, _POPULATE_WRITE):
            return False
        at += count
    return True
