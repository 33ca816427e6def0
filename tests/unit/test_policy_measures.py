"""Rates of losses, windows against lists, the three figures against stories."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexslurm.control.figures import ServiceFigures
from flexslurm.control.losses import LossHistory
from flexslurm.control.trends import Corrections, Sample, Trends, corrected, p95, summary


def test_hazards_come_from_what_was_lost() -> None:
    history = LossHistory(prior_s=1000.0)
    history.watched("spot", 9000.0)
    assert history.hazard_per_s("spot") == 0.0
    history.lost("spot")
    history.lost("spot")
    assert history.hazard_per_s("spot") == pytest.approx(2 / 10_000)
    assert history.hazard_per_s("other") == 0.0


# -------------------------------------------------------------------------------------- trends


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=60))
def test_p95_is_the_least_value_that_19_in_20_do_not_exceed(values: list[float]) -> None:
    found = p95(values)
    assert found in values
    assert sum(v <= found for v in values) >= 0.95 * len(values)
    below = [v for v in values if v < found]
    assert not below or sum(v <= max(below) for v in values) < 0.95 * len(values)


def sample(at: float, tokens: float = 1.0, waiting: int = 0, busy: float = 0.5) -> Sample:
    return Sample(at, tokens, 1, waiting, busy)


def test_windows_do_not_overlap_and_come_whole_or_not_at_all() -> None:
    trends = Trends(interval_s=10.0, window_s=60.0)
    for i in range(1, 5):
        trends.add(sample(10.0 * i, tokens=1.0))
    assert trends.windows(40.0) == ()
    trends.add(sample(50.0, tokens=1.0))
    trends.add(sample(60.0, tokens=1.0))
    assert [w.tokens_per_s for w in trends.windows(60.0)] == [1.0]
    for i in range(7, 13):
        trends.add(sample(10.0 * i, tokens=3.0))
    assert [w.tokens_per_s for w in trends.windows(120.0)] == [3.0, 1.0]
    assert [w.samples for w in trends.windows(120.0)] == [6, 6]
    assert trends.windows(300.0) == (), "what is old is no window of now"
    trends.clear()
    assert trends.windows(120.0) == ()


def test_samples_are_bounded() -> None:
    trends = Trends(interval_s=10.0, window_s=60.0)
    for i in range(10_000):
        trends.add(sample(float(i)))
    assert len(trends._samples) == 14


def test_a_saturated_window_bounds_no_demand() -> None:
    assert summary([sample(1.0, 70.0)]).demand_tokens_per_s == pytest.approx(100.0)
    assert summary([sample(1.0, 70.0, waiting=3)]).demand_tokens_per_s is None
    assert summary([sample(1.0, 70.0, busy=1.0)]).demand_tokens_per_s is None


def test_corrections_follow_what_saturated_windows_show() -> None:
    corrections = Corrections(weight=0.5)
    corrections.measured("a", 100.0, summary([sample(1.0, 50.0)]))
    assert not corrections.factors, "an idle gear shows nothing"
    full = summary([sample(1.0, 50.0, waiting=5)])
    corrections.measured("a", 100.0, full)
    assert corrections.factors == {"a": 0.5}
    corrections.measured("a", 50.0, full)
    assert corrections.factors == {"a": 0.75}
    assert corrected(100.0, "a", corrections.factors) == 75.0
    assert corrected(100.0, "b", corrections.factors) == 75.0
    assert corrected(100.0, "b", {}) == 100.0


# ------------------------------------------------------------------------------------- figures


def run(figures: ServiceFigures, start: int, stop: int, per_s: int) -> None:
    for second in range(start, stop):
        figures.tokens(second + 1.0, per_s)


def test_a_shift_is_judged_by_what_was_before_it() -> None:
    figures = ServiceFigures(around_s=10.0)
    figures.serving(0.0)
    run(figures, 0, 20, 100)
    figures.shift_began(20.0)
    run(figures, 20, 25, 90)
    figures.shift_ended(25.0)
    run(figures, 25, 35, 120)
    run(figures, 35, 100, 7)
    found = figures.judge(100.0)
    assert found.kept_during == pytest.approx(0.9)
    assert found.kept_after == pytest.approx(1.2)
    assert found.shifting == pytest.approx(0.05)
    assert found.shifts == 1
    assert found.success is None


def test_a_shift_right_after_another_is_not_judged_by_the_slow_time_between() -> None:
    figures = ServiceFigures(around_s=10.0)
    figures.serving(0.0)
    run(figures, 0, 20, 100)
    figures.shift_began(20.0)
    run(figures, 20, 24, 50)
    figures.shift_ended(24.0)
    figures.shift_began(24.5)
    run(figures, 24, 28, 50)
    figures.shift_ended(28.5)
    assert figures.judge(40.0).kept_during == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize(
    ("live", "tokens", "during", "after"),
    [
        ((4, 4, 4), (100, 50, 90), 0.5, 0.9),
        ((4, 0, 4), (100, 0, 90), None, 0.9),
        ((0, 4, 4), (1, 90, 90), None, None),
        ((4, 2, 1), (100, 50, 40), None, None),
        ((1, 4, 4), (40, 90, 90), None, None),
        ((4, 9, 9), (100, 20, 90), 0.2, 0.9),  # they pile up since it is slow
        ((4, 0, 0), (0, 0, 0), None, None),
    ],
)
def test_a_load_that_changed_says_nothing_of_the_shift(
    live: tuple[int, int, int],
    tokens: tuple[int, int, int],
    during: float | None,
    after: float | None,
) -> None:
    figures = ServiceFigures(around_s=10.0)
    figures.serving(0.0)
    for stretch, (start, stop) in enumerate([(0, 20), (20, 25), (25, 40)]):
        if stretch == 1:
            figures.shift_began(20.0, epoch=2)
        if stretch == 2:
            figures.shift_ended(25.0)
        for second in range(start, stop):
            figures.live(second + 0.5, live[stretch])
            figures.tokens(second + 0.75, tokens[stretch])
    found = figures.judge(45.0)
    assert found.kept_during == (None if during is None else pytest.approx(during, rel=0.1))
    assert found.kept_after == (None if after is None else pytest.approx(after, rel=0.1))
    assert figures.kept(2).during == found.kept_during
    assert "(1 shift)" in found.words()


def test_a_shift_is_compared_with_the_load_that_it_met() -> None:
    figures = ServiceFigures(around_s=10.0)
    figures.serving(0.0)
    for second in range(26):
        if second == 20:
            figures.shift_began(20.0)
        figures.live(second + 0.5, 1 if second < 16 else 10)
        figures.tokens(second + 0.75, 10 if second < 16 else 80 if second < 20 else 60)
    figures.shift_ended(26.0)
    assert figures.judge(26.0).kept_during == pytest.approx(0.75, rel=0.15)


def test_the_first_install_is_no_shift_and_time_before_it_does_not_count() -> None:
    figures = ServiceFigures()
    figures.shift_began(5.0)
    figures.shift_ended(9.0)
    figures.paused(9.0)
    figures.serving(10.0)
    found = figures.judge(20.0)
    assert (found.shifts, found.shifting, found.paused_s) == (0, 0.0, 0.0)
    assert found.kept_during is None


def test_pauses_and_what_is_under_way_count_so_far() -> None:
    figures = ServiceFigures(around_s=10.0)
    figures.serving(0.0)
    run(figures, 0, 10, 10)
    figures.shift_began(10.0)
    figures.paused(12.0)
    found = figures.judge(15.0)
    assert found.paused_s == pytest.approx(3.0)
    assert found.shifting == pytest.approx(5 / 15)
    assert found.kept_during == 0.0
    figures.serving(16.0)
    figures.shift_ended(16.0)
    assert figures.judge(30.0).paused_s == pytest.approx(4.0)


def test_success_is_of_what_ended() -> None:
    figures = ServiceFigures()
    for good in (True, True, True, False):
        figures.request_ended(good)
    assert figures.judge(1.0).success == 0.75
    assert "succeeded 75.0 %" in figures.judge(1.0).words()


@given(
    st.lists(st.tuples(st.sampled_from(["t", "b", "e", "p", "s"]), st.floats(0, 30)), max_size=40)
)
def test_no_order_of_events_gives_impossible_figures(events: list[tuple[str, float]]) -> None:
    figures, now, open_shift = ServiceFigures(around_s=5.0), 0.0, False
    for kind, wait in events:
        now += wait
        if kind == "t":
            figures.tokens(now, 3)
        elif kind == "b" and not open_shift:
            figures.shift_began(now)
            open_shift = True
        elif kind == "e":
            figures.shift_ended(now)
            open_shift = False
        elif kind == "p":
            figures.paused(now)
        else:
            figures.serving(now)
    found = figures.judge(now)
    assert 0.0 <= found.shifting <= 1.0
    assert 0.0 <= found.paused_s <= now
    assert found.kept_during is None or found.kept_during >= 0.0


def test_corrections_fade() -> None:
    corrections = Corrections(half_life_s=100.0)
    corrections.measured("a", 100.0, summary([sample(1.0, 50.0, waiting=5)]))
    corrections.fade(100.0)
    assert corrections.factors == {"a": pytest.approx(0.75)}
    corrections.fade(1e6)
    assert corrections.factors == {"a": pytest.approx(1.0)}


def test_losses_and_the_time_watched_fade_alike() -> None:
    history = LossHistory(prior_s=1000.0, half_life_s=100.0)
    history.watched("spot", 9000.0)
    for _ in range(8):
        history.lost("spot")
    assert history.hazard_per_s("spot") == pytest.approx(8 / 10_000)
    history.fade(100.0)
    assert history.hazard_per_s("spot") == pytest.approx(4 / 5_500)
    again = LossHistory(prior_s=1000.0)
    again.remember(history.counts())
    assert again.hazard_per_s("spot") == pytest.approx(4 / 5_500)
