"""When a shape may be tried again: back-off after tries that came to nothing, giving up; pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from flexslurm.control.keeper_values import KeeperSettings

_MOST_DOUBLINGS = 30


@dataclass(slots=True)
class ShapeTrials:
    """What tries of one shape of one entry came to."""

    deaths: int = 0
    """In a row, at once and by the pilots' own fault."""
    fruitless: int = 0
    """Tries in a row that brought no pilot that lasted."""
    not_before: float = 0.0
    given_up_until: float | None = None
    why: str = ""


@dataclass(slots=True)
class Trials:
    """All shapes of all entries."""

    settings: KeeperSettings
    _by_shape: dict[tuple[int, int], ShapeTrials] = field(default_factory=dict)

    def of(self, entry: int, shape: int) -> ShapeTrials:
        return self._by_shape.setdefault((entry, shape), ShapeTrials())

    def lasted(self, entry: int, shape: int) -> None:
        """A pilot of this shape did its work: all is forgotten."""
        self._by_shape[entry, shape] = ShapeTrials()

    def fruitless(self, now: float, entry: int, shape: int, why: str) -> None:
        """A try came to nothing by nobody's fault of ours: wait, each time twice as long."""
        trial, settings = self.of(entry, shape), self.settings
        doublings = min(trial.fruitless, _MOST_DOUBLINGS)
        trial.fruitless += 1
        wait_s = min(settings.retry_s * 2.0**doublings, settings.retry_most_s)
        trial.not_before, trial.why = now + wait_s, why

    def died(self, now: float, entry: int, shape: int, why: str) -> bool:
        """A pilot died at once; whether the shape is given up now."""
        self.fruitless(now, entry, shape, why)
        trial = self.of(entry, shape)
        trial.deaths += 1
        if trial.deaths < self.settings.failures:
            return False
        self.give_up(now, entry, shape, f"{trial.deaths} pilots in a row died at once: {why}")
        return True

    def give_up(
        self, now: float, entry: int, shape: int, why: str, for_s: float | None = None
    ) -> None:
        trial = self.of(entry, shape)
        trial.given_up_until = now + (self.settings.give_up_s if for_s is None else for_s)
        trial.why, trial.deaths = why, 0

    def given_up(self, now: float, entry: int, shape: int) -> bool:
        until = self.of(entry, shape).given_up_until
        return until is not None and now < until

    def choose(self, now: float, entry: int, shapes: int) -> int | None:
        """The best shape that may be tried now; None: none, or the best one must wait a little."""
        for shape in range(shapes):
            if not self.given_up(now, entry, shape):
                return shape if now >= self.of(entry, shape).not_before else None
        return None

    def alternative(self, now: float, entry: int, shapes: int, but: int) -> bool:
        """Whether another shape is left to try."""
        return any(n != but and not self.given_up(now, entry, n) for n in range(shapes))

    def stuck(self, now: float, entry: int, shapes: int) -> str:
        """Why no shape of the entry is tried any more; "" while one is."""
        if not all(self.given_up(now, entry, shape) for shape in range(shapes)):
            return ""
        return "; ".join(dict.fromkeys(self.of(entry, shape).why for shape in range(shapes)))
