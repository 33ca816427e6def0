"""The bandwidth of this machine's loopback, over which virtual GPUs move their bytes."""

from __future__ import annotations

import socket
import statistics
import threading
import time

_CHUNK_BYTES = 1 << 20
_CHUNKS = 64
_TRIES = 3
_TIMEOUT_S = 30.0


def loopback_bytes_per_s() -> float:
    """Bytes per second of one TCP connection in one direction: the median of a few tries."""
    return statistics.median(_once() for _ in range(_TRIES))


def _once() -> float:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(_TIMEOUT_S)
        sender = threading.Thread(target=_send, args=(server.getsockname()[1],), daemon=True)
        sender.start()
        connection, _ = server.accept()
        with connection:
            connection.settimeout(_TIMEOUT_S)
            landing = bytearray(_CHUNK_BYTES)
            began, received = time.perf_counter(), 0
            while count := connection.recv_into(landing):
                received += count
            seconds = time.perf_counter() - began
        sender.join(_TIMEOUT_S)
    return received / seconds


def _send(port: int) -> None:
    chunk = bytes(_CHUNK_BYTES)
    with socket.create_connection(("127.0.0.1", port), timeout=_TIMEOUT_S) as connection:
        for _ in range(_CHUNKS):
            connection.sendall(chunk)
