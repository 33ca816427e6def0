"""Sizes in words; imports nothing, for commands that must answer at once."""

from __future__ import annotations


def show_bytes(nbytes: float) -> str:
    """Bytes as people read them, to four figures; `units.Quantity.show` never rounds."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.4g} TiB"
