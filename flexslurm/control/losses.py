"""How often members of each kind were lost, and what that says of the next hour; pure, no clock."""

from __future__ import annotations

from collections.abc import Mapping


class LossHistory:
    """How often members of each kind (a partition, a GPU type) were taken, but for known ends.

    The rate is losses / (time watched + prior): a kind that never lost anything is taken to be
    safe, and one loss soon after the start does not count for many. Both fade: what was lost a
    half-life ago counts half.
    """

    def __init__(self, prior_s: float = 6 * 3600.0, half_life_s: float = 7 * 86400.0) -> None:
        assert prior_s > 0 and half_life_s > 0
        self._prior_s, self._half_life_s = prior_s, half_life_s
        self._watched_s: dict[str, float] = {}
        self._losses: dict[str, float] = {}

    def fade(self, seconds: float) -> None:
        """So much time has passed."""
        left = 0.5 ** (seconds / self._half_life_s)
        for counts in (self._watched_s, self._losses):
            for kind in counts:
                counts[kind] *= left

    def watched(self, kind: str, member_seconds: float) -> None:
        """Members of this kind lived for so long, all together."""
        assert member_seconds >= 0
        self._watched_s[kind] = self._watched_s.get(kind, 0.0) + member_seconds

    def lost(self, kind: str) -> None:
        self._losses[kind] = self._losses.get(kind, 0.0) + 1

    def hazard_per_s(self, kind: str) -> float:
        """Losses per second and member."""
        return self._losses.get(kind, 0.0) / (self._watched_s.get(kind, 0.0) + self._prior_s)

    def counts(self) -> dict[str, tuple[float, float]]:
        """Seconds watched and losses by kind: what `remember` takes."""
        kinds = sorted(self._watched_s.keys() | self._losses.keys())
        return {k: (self._watched_s.get(k, 0.0), self._losses.get(k, 0.0)) for k in kinds}

    def remember(self, counts: Mapping[str, tuple[float, float]]) -> None:
        """Go on from what an earlier history had counted."""
        for kind, (watched_s, losses) in counts.items():
            self._watched_s[kind], self._losses[kind] = watched_s, losses
