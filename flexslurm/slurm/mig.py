"""MIG slices by the names that Slurm and the driver give them; pure, asks no card.

`1g.10gb`, `a100_3g.40gb`, `nvidia_h100_80gb_hbm3_1g.10gb+me`: seventh parts of a card's compute,
and its memory in GB. Figures are taken low: an eighth of the card for each part.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_MIG = re.compile(
    r"^(?:(?P<card>.*?)[_-])?(?:\d+c\.)?(?P<g>\d)g\.(?P<gb>\d{1,3})gb(?:\+\S*)?$", re.IGNORECASE
)
# Eighths of the card's memory that come with so many parts of its compute (MIG's profiles).
_EIGHTHS = {1: 1, 2: 2, 3: 4, 4: 4, 7: 8}
_KEPT_OF_MEMORY = 0.95
"""What the driver leaves of a slice's nominal memory: 9.5 GiB of 10 GB."""


@dataclass(frozen=True, slots=True)
class MigSlice:
    """A profile, and the card's name where Slurm says it."""

    card: str | None
    parts: int
    """Of the seven parts of the card's compute."""
    gigabytes: int

    @property
    def memory_bytes(self) -> int:
        return int(self.gigabytes * 2**30 * _KEPT_OF_MEMORY)

    @property
    def compute_share(self) -> float:
        return min(self.parts, 8) / 8

    @property
    def card_gigabytes(self) -> int:
        """The whole card's memory, as far as the profile gives it away."""
        return self.gigabytes * 8 // _EIGHTHS.get(self.parts, 8)

    @property
    def memory_share(self) -> float:
        """Of the card's memory, and of its bandwidth."""
        return _EIGHTHS.get(self.parts, 8) / 8


def mig_slice(gres_type: str | None) -> MigSlice | None:
    """The slice that a GRES type names; None: a whole card."""
    match = _MIG.match(gres_type or "")
    if match is None:
        return None
    return MigSlice(match["card"] or None, int(match["g"]), int(match["gb"]))
