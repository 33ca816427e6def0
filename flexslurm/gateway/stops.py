"""Finding stop strings in text that comes in pieces; never lets a part of one out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Match(NamedTuple):
    """A stop string and where, in all the text so far, it begins and ends."""

    stop: str
    begin: int
    end: int


class StopMatcher:
    """Knuth, Morris and Pratt over several patterns at once: constant work per character.

    The match that ends first wins, since generation would have ended there; of several that end
    together, the longest. So the outcome does not depend on how the text was cut into pieces.
    """

    __slots__ = ("_at", "_failure", "_seen", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string would stop everything"
        self._stops = tuple(sorted(set(stops), key=len, reverse=True))
        self._failure = tuple(_failure_table(stop) for stop in self._stops)
        self._at = [0] * len(self._stops)
        self._seen = 0

    @property
    def held(self) -> int:
        """Characters at the end of the text that may be the beginning of a stop string."""
        return max(self._at, default=0)

    def skip(self, chars: int) -> None:
        """Let characters pass in which no stop string may begin or end."""
        self._seen += chars
        self._at = [0] * len(self._stops)

    def feed(self, text: str) -> Match | None:
        """Read on; after a match nothing more may be fed."""
        for char in text:
            self._seen += 1
            for index, stop in enumerate(self._stops):
                at = self._at[index]
                while at and stop[at] != char:
                    at = self._failure[index][at - 1]
                if stop[at] == char:
                    at += 1
                if at == len(stop):
                    return Match(stop, self._seen - len(stop), self._seen)
                self._at[index] = at
        return None


def _failure_table(pattern: str) -> tuple[int, ...]:
    """For each prefix, the length of its longest proper border."""
    table = [0] * len(pattern)
    length = 0
    for index in range(1, len(pattern)):
        while length and pattern[index] != pattern[length]:
            length = table[length - 1]
        if pattern[index] == pattern[length]:
            length += 1
        table[index] = length
    return tuple(table)
