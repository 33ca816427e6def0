"""In which order the layers of a model are handed over; pure."""

from __future__ import annotations


def turns_of(num_layers: int, turn_layers: int) -> list[tuple[range, bool]]:
    """The layers of each turn, and whether the edges belong to it: they come last."""
    starts = range(0, num_layers, turn_layers)
    return [
        (range(lo, min(lo + turn_layers, num_layers)), lo + turn_layers >= num_layers)
        for lo in starts
    ]
