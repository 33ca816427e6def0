"""How fast bytes may go: a bucket that fills at a rate; arithmetic on times it is given.

What is sent arrives when a link of that rate would have delivered it: the time of its own bytes is
waited for, too. A sender that was late by a moment makes it good; idle time is not saved up.
"""

from __future__ import annotations

_CATCH_UP_S = 0.05


class Bucket:
    """One link's rate, shared by all who send over it; not thread-safe."""

    def __init__(self, bytes_per_s: float) -> None:
        assert bytes_per_s > 0.0
        self.bytes_per_s = bytes_per_s
        self._free_at = float("-inf")

    def wait_s(self, nbytes: int, now: float) -> float:
        """Take so many bytes; how long from `now` until they may be through."""
        late = now - self._free_at
        begin = self._free_at if late < _CATCH_UP_S else now
        self._free_at = begin + nbytes / self.bytes_per_s
        return max(self._free_at - now, 0.0)

    def rest(self, seconds: float, now: float) -> None:
        """Nothing more is to go through for so long."""
        self._free_at = max(self._free_at, now) + seconds


def piece_bytes(
    bytes_per_s: float, most: int, hurried: int, least: int = 32 << 10, every_s: float = 0.02
) -> int:
    """How much to send at a time, so that a slow link is used evenly.

    `hurried`: where there is no limit, which 0 bytes/s is.
    """
    if bytes_per_s <= 0.0:
        return hurried
    return max(min(int(bytes_per_s * every_s), most), least)
