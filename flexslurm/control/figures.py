"""Three figures that judge the shifts: throughput kept, requests that succeed, time spent; pure.

Fed with what happens and when, by one clock; knows none itself. Throughput is compared with that of
the time just before each shift, so a service that is idle anyway neither gains nor loses by it.

Two stretches of time cannot be compared, and there is no figure, where no token was given out
before the shift, where no request was live in one of them, or where the load itself explains the
difference: less was given out, and less than two thirds as many requests were live (on average over
the stretch); or more was, and more than one and a half times as many were.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

_LOAD_CHANGE = 1.5
"""Times as many live requests, or as few, that are another load."""
_MOST_KEPT = 100
"""Shifts of which the figures stay readable."""


@dataclass(frozen=True, slots=True)
class ThroughputKept:
    """Throughput of one shift, over that just before; None where there was none to compare with."""

    during: float | None = None
    after: float | None = None


@dataclass(frozen=True, slots=True)
class Judgement:
    """The figures so far; None where nothing was seen to judge by."""

    kept_during: float | None
    """Tokens per second during shifts over those just before, weighted by the shifts' length."""
    kept_after: float | None
    """Tokens per second just after shifts over those just before."""
    success: float | None
    """Requests that ended as they should, of all that ended."""
    shifting: float
    """Share of the time since serving began."""
    shifts: int
    paused_s: float
    """Without a gear that serves, since the first one did."""

    def figures(self) -> dict[str, float | None]:
        """By name, for programs."""
        return {
            "throughput_kept_during": self.kept_during,
            "throughput_kept_after": self.kept_after,
            "requests_succeeded": self.success,
            "time_shifting": self.shifting,
            "paused_s": self.paused_s,
        }

    def words(self) -> str:
        """For people, in one line."""

        def share(value: float | None) -> str:
            return "-" if value is None else f"{100 * value:.1f} %"

        return (
            f"throughput kept during shifts {share(self.kept_during)}, "
            f"after them {share(self.kept_after)}; "
            f"requests that succeeded {share(self.success)}; "
            f"time spent shifting {share(self.shifting)} "
            f"({self.shifts} shift{'' if self.shifts == 1 else 's'})"
        )


@dataclass(slots=True)
class _Live:
    """How many requests were live, over the looks of a stretch of time."""

    total: int = 0
    looks: int = 0

    def add(self, count: int) -> None:
        self.total += count
        self.looks += 1

    def explains(self, before: _Live, kept: float) -> bool:
        """Whether the load, not the shift, made throughput `kept` times what it was before."""
        if not (self.looks and before.looks):
            return False  # nobody counts them
        mine, theirs = self.total / self.looks, before.total / before.looks
        if not (mine and theirs):
            return True
        change = mine / theirs
        return change > _LOAD_CHANGE if kept > 1 else change < 1 / _LOAD_CHANGE and kept < 1


@dataclass(slots=True)
class _OpenShift:
    """A shift that is under way, or whose time after is."""

    before: float
    """Tokens per second just before."""
    live_before: _Live
    began: float
    epoch: int
    tokens: int = 0
    ended: float | None = None
    after_tokens: int = 0
    live: _Live = field(default_factory=_Live)
    live_after: _Live = field(default_factory=_Live)

    def during(self, took: float) -> float | None:
        """What was kept in the `took` seconds of the shift; None where nothing can be said."""
        if self.before <= 0 or took <= 0:
            return None
        kept = self.tokens / self.before / took
        return None if self.live.explains(self.live_before, kept) else kept

    def after(self, span: float) -> float | None:
        """The same of the `span` seconds after it."""
        if self.before <= 0 or span <= 0:
            return None
        kept = self.after_tokens / self.before / span
        return None if self.live_after.explains(self.live_before, kept) else kept


class ServiceFigures:
    """Accumulates; times never run backwards, and at most one shift is under way.

    `around_s`: how much time before and after a shift it is compared with. An after-time that the
    next shift cuts short counts for what there is of it, if that is at least a tenth.
    """

    def __init__(self, around_s: float = 30.0) -> None:
        assert around_s > 0
        self._around_s = around_s
        self._recent: deque[tuple[float, int]] = deque()
        self._recent_live: deque[tuple[float, int]] = deque()
        self._began: float | None = None
        self._now = 0.0
        self._open: _OpenShift | None = None
        self._after: _OpenShift | None = None
        self._during_weight = self._during_sum = 0.0
        self._after_weight = self._after_sum = 0.0
        self._shifting_s = self._paused_s = 0.0
        self._paused_at: float | None = None
        self._calm_since: float | None = None
        self._last_rate, self._last_live = 0.0, _Live()
        self._shifts = 0
        self._good = self._bad = 0
        self._kept: dict[int, ThroughputKept] = {}

    # ------------------------------------------------------------------ what happens

    def serving(self, now: float) -> None:
        """A gear serves: time counts from the first of these, and a pause ends."""
        self._at(now)
        if self._began is None:
            self._began = now
        self._end_pause(now)

    def paused(self, now: float) -> None:
        """No gear serves, by a shift or a loss."""
        self._at(now)
        if self._paused_at is None and self._began is not None:
            self._paused_at = now

    def tokens(self, now: float, count: int) -> None:
        """Tokens were given out."""
        self._at(now)
        if self._recent and now - self._recent[-1][0] < self._around_s / 100:
            at, before = self._recent.pop()
            self._recent.append((at, before + count))
        else:
            self._recent.append((now, count))
        if self._open is not None:
            self._open.tokens += count
        if self._after is not None:
            self._after.after_tokens += count
        while self._recent[0][0] <= now - self._around_s:
            self._recent.popleft()

    def live(self, now: float, count: int) -> None:
        """So many requests are accepted and not ended; told a few times a second, or never."""
        self._at(now)
        self._recent_live.append((now, count))
        while self._recent_live[0][0] <= now - self._around_s:
            self._recent_live.popleft()
        if self._open is not None:
            self._open.live.add(count)
        if self._after is not None:
            self._after.live_after.add(count)

    def request_ended(self, success: bool) -> None:
        """A request ended by itself: aborts by its client are not told."""
        if success:
            self._good += 1
        else:
            self._bad += 1

    def shift_began(self, now: float, epoch: int = 0) -> None:
        """A shift from a gear that serves; the first gear's install is none."""
        self._at(now)
        assert self._open is None, "two shifts at once"
        self._close_after(now)
        if self._began is None:
            return
        self._shifts += 1
        rate = self._calm_rate(now)
        self._open = _OpenShift(rate, self._last_live, now, epoch)

    def _calm_rate(self, now: float) -> float:
        """Tokens per second since the last shift, at most `around_s` back; notes who was live.

        Where that is too short to say, what was before the last shift is what there was.
        """
        assert self._began is not None
        calm = self._calm_since if self._calm_since is not None else self._began
        span = min(self._around_s, now - calm)
        if span < self._around_s / 10 and self._calm_since is not None:
            return self._last_rate
        span = self._alike_s(now, span)
        count = sum(n for at, n in self._recent if at >= now - span)
        self._last_rate = count / span if span > 0 else 0.0
        seen = [number for at, number in self._recent_live if at >= now - span]
        self._last_live = _Live(sum(seen), len(seen))
        return self._last_rate

    def _alike_s(self, now: float, span: float) -> float:
        """The latest part of a time, a tenth of `around_s` or more, with about its end's load."""
        latest = self._recent_live[-1][1] if self._recent_live else 0
        for at, count in reversed(self._recent_live if latest else ()):
            if not latest / _LOAD_CHANGE <= count <= latest * _LOAD_CHANGE:
                return min(span, max(now - at, self._around_s / 10))
        return span

    def shift_ended(self, now: float) -> None:
        """It was committed or given up."""
        self._at(now)
        shift = self._open
        if shift is None:
            return
        self._open = None
        shift.ended = self._calm_since = now
        took = now - shift.began
        self._shifting_s += took
        kept = shift.during(took)
        if kept is not None:
            self._during_weight += took
            self._during_sum += kept * took
            self._keep(shift.epoch, ThroughputKept(kept))
        self._after = shift

    # ------------------------------------------------------------------ what it comes to

    def judge(self, now: float) -> Judgement:
        """The figures as of now; what is under way is counted so far."""
        self._at(now)
        during_weight, during_sum = self._during_weight, self._during_sum
        shifting = self._shifting_s
        if self._open is not None:
            took = now - self._open.began
            shifting += took
            kept = self._open.during(took)
            if kept is not None:
                during_weight += took
                during_sum += kept * took
        age = now - self._began if self._began is not None else 0.0
        ended = self._good + self._bad
        paused = now - self._paused_at if self._paused_at is not None else 0.0
        return Judgement(
            kept_during=during_sum / during_weight if during_weight else None,
            kept_after=self._after_sum / self._after_weight if self._after_weight else None,
            success=self._good / ended if ended else None,
            shifting=shifting / age if age > 0 else 0.0,
            shifts=self._shifts,
            paused_s=self._paused_s + paused,
        )

    def _at(self, now: float) -> None:
        assert now >= self._now, f"time runs backwards: {now} after {self._now}"
        self._now = now
        after = self._after
        if after is not None and after.ended is not None and now > after.ended + self._around_s:
            self._close_after(after.ended + self._around_s)

    def _close_after(self, now: float) -> None:
        """Count the time after a shift, which ends now."""
        after, self._after = self._after, None
        if after is None or after.ended is None:
            return
        span = now - after.ended
        kept = after.after(span) if span >= self._around_s / 10 else None
        if kept is not None:
            self._after_weight += span
            self._after_sum += kept * span
            self._keep(after.epoch, ThroughputKept(self.kept(after.epoch).during, kept))

    def _keep(self, epoch: int, kept: ThroughputKept) -> None:
        self._kept[epoch] = kept
        while len(self._kept) > _MOST_KEPT:
            del self._kept[min(self._kept)]

    def kept(self, epoch: int) -> ThroughputKept:
        """What one shift kept, once that is known."""
        return self._kept.get(epoch, ThroughputKept())

    def _end_pause(self, now: float) -> None:
        if self._paused_at is not None:
            self._paused_s += now - self._paused_at
            self._paused_at = None
