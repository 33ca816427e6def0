"""Finds and cuts this process's own TCP connections by address; never touches another's.

gloo offers no way to break off an operation: its `abort` does nothing. But an operation on a
connection that is shut down fails at once, at both ends, also when the peer is stopped or its
machine is gone. So a group is ended by shutting down the connections of its own gloo device.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import NewType

Endpoint = NewType("Endpoint", str)
"""`HOST:PORT` as the kernel names it."""

_FAMILIES = (socket.AF_INET, socket.AF_INET6)


def listening() -> frozenset[Endpoint]:
    """Where this process listens for TCP connections."""
    return frozenset(_name(link.getsockname()) for link in _tcp_sockets() if _is_listening(link))


def connections(own: Endpoint, peers: frozenset[Endpoint]) -> int:
    """How many connections were accepted at `own` or made to one of `peers`."""
    return sum(1 for _ in _between(own, peers))


def cut(own: Endpoint, peers: frozenset[Endpoint]) -> int:
    """Shut those connections down in both directions; returns how many. Never blocks."""
    count = 0
    for link in _between(own, peers):
        with contextlib.suppress(OSError):  # the other side may have closed it this moment
            link.shutdown(socket.SHUT_RDWR)
        count += 1
    return count


def _between(own: Endpoint, peers: frozenset[Endpoint]) -> Iterator[socket.socket]:
    for link in _tcp_sockets():
        if _is_listening(link):
            continue
        try:
            here, there = _name(link.getsockname()), _name(link.getpeername())
        except OSError:
            continue
        if here == own or there in peers:
            yield link


def _tcp_sockets() -> Iterator[socket.socket]:
    """Duplicates of this process's TCP sockets, each closed when the next one is asked for."""
    for entry in Path("/proc/self/fd").iterdir():
        # a duplicate cannot be closed and reused under our hands by a thread of gloo
        try:
            number = os.dup(int(entry.name))
        except OSError:
            continue
        try:
            link = socket.socket(fileno=number)
        except OSError:
            os.close(number)
            continue
        with link:
            if link.family in _FAMILIES and link.type == socket.SOCK_STREAM:
                yield link


def _is_listening(link: socket.socket) -> bool:
    return bool(link.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _name(address: tuple[str, int]) -> Endpoint:
    return Endpoint(f"{address[0]}:{address[1]}")
