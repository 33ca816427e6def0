"""Which parts of a run of bytes are still to come; pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


class Spans:
    """Disjoint ranges `[start, stop)`, rising, none of them empty."""

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._ranges: list[tuple[int, int]] = []
        for start, stop in ranges:
            self.add(start, stop)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self._ranges)

    def __bool__(self) -> bool:
        return bool(self._ranges)

    @property
    def total(self) -> int:
        return sum(stop - start for start, stop in self._ranges)

    def add(self, start: int, stop: int) -> None:
        if start >= stop:
            return
        before = [one for one in self._ranges if one[1] < start]
        after = [one for one in self._ranges if one[0] > stop]
        near = self._ranges[len(before) : len(self._ranges) - len(after)]
        merged = min([start, *(s for s, _ in near)]), max([stop, *(e for _, e in near)])
        self._ranges = [*before, merged, *after]

    def remove(self, start: int, stop: int) -> None:
        if start >= stop:
            return
        found: list[tuple[int, int]] = []
        for lo, hi in self._ranges:
            found += [one for one in ((lo, min(hi, start)), (max(lo, stop), hi)) if one[0] < one[1]]
        self._ranges = found

    def meet(self, start: int, stop: int) -> list[tuple[int, int]]:
        """What of `[start, stop)` is in them."""
        cut = ((max(lo, start), min(hi, stop)) for lo, hi in self._ranges)
        return [one for one in cut if one[0] < one[1]]

    @staticmethod
    def are_proper(ranges: Iterable[tuple[int, int]], total: int) -> bool:
        """Whether ranges rise, are disjoint, not empty and in `[0, total)`."""
        at = 0
        for start, stop in ranges:
            if not at <= start < stop <= total:
                return False
            at = stop
        return True
