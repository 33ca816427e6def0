"""Where weights go in an arena, and what has to move for them; pure arithmetic on ranges of bytes.

Weights want to lie at the low end without gaps. They are taken where the fewest pages are in the
way; what is in the way moves to other cells. Gaps, which retired epochs leave, are closed by
sliding weights down.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple


class WeightRange(NamedTuple):
    """A range `[start, stop)` of bytes that weights have."""

    start: int
    stop: int
    movable: bool
    need: int
    """What they take when they are moved: less than now, where parts of them were freed."""


class Slide(NamedTuple):
    """Weights, by their number, go to `start`, which is not above where they are."""

    number: int
    start: int


def gaps(placed: Sequence[WeightRange], total: int) -> list[tuple[int, int]]:
    """What no weights have, rising; `placed` rises too."""
    found, at = [], 0
    for one in placed:
        if one.start > at:
            found.append((at, one.start))
        at = one.stop
    if total > at:
        found.append((at, total))
    return found


def best_run(
    placed: Sequence[WeightRange],
    total: int,
    size: int,
    in_the_way: Callable[[int, int], int | None],
) -> int | None:
    """Where `size` bytes fit between weights, with the fewest pages in the way, then the lowest.

    `in_the_way(start, stop)`: pages there, None where they cannot go away.
    """
    best: tuple[int, int] | None = None
    for start, stop in gaps(placed, total):
        if stop - start < size:
            continue
        pages = in_the_way(start, start + size)
        if pages == 0:
            return start
        if pages is not None and (best is None or pages < best[0]):
            best = pages, start
    return None if best is None else best[1]


def slides(placed: Sequence[WeightRange], most_bytes: float) -> list[Slide]:
    """Close gaps from below, moving weights of at most so many bytes, but at least one."""
    found: list[Slide] = []
    at = moved = 0
    for number, one in enumerate(placed):
        if one.movable and (one.start > at or one.stop - one.start > one.need):
            if found and moved + one.need > most_bytes:
                break
            found.append(Slide(number, at))
            moved += one.need
            at += one.need
        else:
            at = one.stop
    return found
