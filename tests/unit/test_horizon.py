"""What courses are worth, against sums over what may happen; more risk is never a gain."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil, exp, inf

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from flexslurm.control.horizon import (
    MOST_LOSSES,
    Gone,
    Leg,
    Outlook,
    RiskGroup,
    expected_tokens,
    states,
)


def nothing(gone: Gone) -> float:
    return 0.0


def after(tokens_per_s: float) -> Callable[[Gone], float]:
    return lambda gone: tokens_per_s


# -------------------------------------------------------------------------------- by hand


def test_the_figures_of_the_worked_example() -> None:
    sure = [RiskGroup(ends_in_s=720.0)]
    assert expected_tokens([Leg(1000.0)], sure, nothing, 0.0, 720.0) == 720_000
    assert expected_tokens([Leg(300.0, 90.0), Leg(750.0)], [], nothing, 0.0, 720.0) == 499_500


def test_the_worked_example_with_an_end_that_is_uncertain() -> None:
    for mean_s in (300.0, 900.0):
        risky = [RiskGroup(ends_in_s=720.0, hazard_per_s=1 / mean_s)]
        found = expected_tokens([Leg(1000.0)], risky, nothing, 0.0, 720.0)
        assert found == pytest.approx(1000 * mean_s * (1 - exp(-720 / mean_s)), rel=1e-9)


def test_several_known_ends_are_exact() -> None:
    """Three pilots, each with its own deadline: 300, 200, 100 and then no tokens per second."""
    groups = [RiskGroup(ends_in_s=100.0), RiskGroup(ends_in_s=250.0), RiskGroup(ends_in_s=600.0)]
    left = {(1, 0, 0): 200.0, (1, 1, 0): 100.0}
    found = expected_tokens([Leg(300.0)], groups, lambda gone: left.get(gone, 0.0), 30.0, 1000.0)
    assert found == 300 * 100 + 200 * 150 + 100 * 350
    slow_first = [Leg(50.0, 150.0), Leg(300.0)]
    found = expected_tokens(slow_first, groups, lambda gone: left.get(gone, 0.0), 30.0, 500.0)
    assert found == 50 * 150 + 200 * 100 + 100 * 250


def test_like_members_fall_one_by_one() -> None:
    """Three replicas of 100 on a pilot each, without a pause: each counts as long as it lives."""
    group = [RiskGroup(count=3, hazard_per_s=1 / 500)]
    found = expected_tokens([Leg(300.0)], group, lambda gone: 100.0 * (3 - gone[0]), 0.0, 1000.0)
    assert found == pytest.approx(3 * 100 * 500 * (1 - exp(-2)), rel=1e-9)


def test_a_loss_pauses_and_a_known_end_does_not() -> None:
    risky, sure = [RiskGroup(hazard_per_s=1 / 500)], [RiskGroup(ends_in_s=400.0)]
    without = expected_tokens([Leg(100.0)], risky, after(80.0), 0.0, 1000.0)
    paused = expected_tokens([Leg(100.0)], risky, after(80.0), 60.0, 1000.0)
    lost = 80 * (60 * (1 - exp(-940 / 500)))  # the last ones pause only to the horizon
    assert without - paused > lost
    assert without - paused < 80 * 60 * (1 - exp(-2))
    for pause_s in (0.0, 60.0):
        found = expected_tokens([Leg(100.0)], sure, after(80.0), pause_s, 1000.0)
        assert found == 100 * 400 + 80 * 600


def test_losing_those_that_stand_by_costs_nothing_while_they_do() -> None:
    spare = RiskGroup(count=2, hazard_per_s=1 / 10, used=False)

    def without(gone: Gone) -> float:
        return inf if not gone[0] else 70.0 if gone[1] < 2 else 0.0

    own = RiskGroup(hazard_per_s=0.0)
    assert expected_tokens([Leg(100.0)], [own, spare], without, 60.0, 1000.0) == pytest.approx(1e5)
    ends = replace(own, ends_in_s=500.0)
    found = expected_tokens([Leg(100.0)], [ends, spare], without, 60.0, 1000.0)
    assert found == pytest.approx(100 * 500, rel=1e-6), "by then the spares are gone too"


# ------------------------------------------------------------------------------ by brute force


def rate_of(legs: Sequence[Leg], at: float) -> float:
    for leg in legs[:-1]:
        assert leg.seconds is not None
        if at < leg.seconds:
            return leg.tokens_per_s
        at -= leg.seconds
    return legs[-1].tokens_per_s


def summed(
    legs: Sequence[Leg],
    groups: Sequence[RiskGroup],
    without: Callable[[Gone], float],
    recovery: float,
    horizon: float,
    steps: int,
) -> float:
    """Over every choice of moments of loss, and then over time; members one by one.

    A loss is in the middle of its cell, and no cell is on both sides of what changes by then.
    """
    members = [(g, one) for g, one in enumerate(groups) for _ in range(one.count)]
    ends = [one.ends_in_s for one in groups if one.ends_in_s is not None]
    turns = list(itertools.accumulate(leg.seconds or 0.0 for leg in legs[:-1]))
    changes = [at for at in (*ends, *turns, horizon - recovery) if 0.0 < at < horizon]
    cells = [
        (a + i * (b - a) / count, a + (i + 1) * (b - a) / count)
        for a, b in itertools.pairwise(sorted({0.0, horizon, *changes}))
        for count in [ceil(steps * (b - a) / horizon)]
        for i in range(count)
    ]
    choices = []
    for _, one in members:
        h = one.hazard_per_s
        moments = [(exp(-h * lo) - exp(-h * hi), (lo + hi) / 2) for lo, hi in cells]
        choices.append([(exp(-h * horizon), inf), *(m for m in moments if m[0] > 0)])

    def gone(lost: Sequence[float], at: float) -> Gone:
        count = [0] * len(groups)
        for (g, one), moment in zip(members, lost, strict=True):
            end = inf if one.ends_in_s is None else one.ends_in_s
            count[g] += at >= min(moment, end)
        return tuple(count)

    def rate(state: Gone) -> float:
        return without(state) if any(state) else inf

    total = 0.0
    for outcome in itertools.product(*choices):
        chance, lost = 1.0, [moment for _, moment in outcome]
        for p, _ in outcome:
            chance *= p
        borders = sorted({0.0, horizon, *(t for t in (*lost, *ends, *turns) if t < horizon)})
        tokens = 0.0
        for a, b in itertools.pairwise(borders):
            middle = (a + b) / 2
            tokens += min(rate_of(legs, middle), rate(gone(lost, middle))) * (b - a)
        for (g, one), moment in zip(members, lost, strict=True):
            end = inf if one.ends_in_s is None else one.ends_in_s
            if moment < min(horizon, end) and one.used:
                state = list(gone([inf] * len(lost), moment))
                state[g] += 1
                first = min(legs[-1].tokens_per_s, rate(tuple(state)))
                tokens -= first * min(recovery, horizon - moment)
        total += chance * tokens
    return max(total, 0.0)


hazards = st.floats(0, 0.02)
ends = st.none() | st.floats(5, 900)


@settings(max_examples=25, deadline=None)
@example((0.0, 0.0), (None, None), 0.0, 5.0, 5e-324, 0.0, 50.0)
@example((0.015625, 0.015625), (None, 5.0), 0.0, 0.0, 153.0, 74.0, 88.0)
@given(
    st.tuples(hazards, hazards), st.tuples(ends, ends), st.floats(0, 200),
    st.floats(0, 1000), st.floats(0, 1000), st.floats(0, 100), st.floats(50, 800),
)  # fmt: skip
def test_expected_tokens_is_the_expectation(
    hazard: tuple[float, float], end: tuple[float | None, float | None],
    shift_s: float, during: float, then: float, recovery: float, horizon: float,
) -> None:  # fmt: skip
    legs = [Leg(during, shift_s), Leg(then)]
    groups = [RiskGroup(1, e, h) for e, h in zip(end, hazard, strict=True)]
    left = {(1, 0): 0.6 * then, (0, 1): 0.3 * then, (1, 1): 0.1 * then}

    def without(gone: Gone) -> float:
        return left[gone]

    found = expected_tokens(legs, groups, without, recovery, horizon)
    expected = summed(legs, groups, without, recovery, horizon, steps=60)
    assert found == pytest.approx(expected, rel=2e-2, abs=0.005 * horizon * max(during, then) + 1.0)


@settings(max_examples=40, deadline=None)
@given(
    st.floats(1e-5, 0.05), st.floats(0, 200), st.floats(0, 1000), st.floats(0, 1),
    st.floats(0, 100), st.floats(150, 800),
)  # fmt: skip
def test_one_loss_is_exact(
    hazard: float, shift_s: float, then: float, kept: float, recovery: float, horizon: float
) -> None:
    """In closed form: `∫ r(t) e^{-ht} dt`, and after the loss nothing, then what is kept."""
    rate, group = kept * then, [RiskGroup(hazard_per_s=hazard)]
    found = expected_tokens([Leg(then, shift_s), Leg(then)], group, after(rate), recovery, horizon)
    alive = then * (1 - exp(-hazard * horizon)) / hazard
    served = horizon - recovery
    lost = 1 - exp(-hazard * served)
    mean = lost / hazard - served * exp(-hazard * served)
    expected = alive + rate * (served * lost - mean)
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-3)


@given(st.lists(st.tuples(st.floats(1, 2000), st.floats(0, 500)), max_size=5), st.floats(1, 1500))
def test_known_ends_are_exact_however_many(
    members: list[tuple[float, float]], horizon: float
) -> None:
    """Pilots that add up: each gives its own until its end."""
    groups = [RiskGroup(ends_in_s=end) for end, _ in members]
    rates = [rate for _, rate in members]

    def without(gone: Gone) -> float:
        return sum(rate for rate, n in zip(rates, gone, strict=True) if not n)

    found = expected_tokens([Leg(sum(rates))], groups, without, 99.0, horizon)
    expected = sum(rate * min(end, horizon) for end, rate in members)
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-6)


def test_more_losses_than_are_told_apart_lie_between_few_and_all() -> None:
    group = [RiskGroup(count=40, hazard_per_s=1 / 1800)]
    found = expected_tokens([Leg(400.0)], group, lambda gone: 10.0 * (40 - gone[0]), 0.0, 3600.0)
    exact = 400 * 1800 * (1 - exp(-2))
    assert found == pytest.approx(exact, rel=1e-9), "replicas that add up"


def test_all_states_that_are_asked_for_are_told_beforehand() -> None:
    groups = [
        RiskGroup(3, None, 1e-4), RiskGroup(1, 500.0, 1e-3), RiskGroup(2, 900.0),
        RiskGroup(2, None, 1e-4, used=False),
    ]  # fmt: skip
    asked = set()

    def without(gone: Gone) -> float:
        asked.add(gone)
        return 1.0

    expected_tokens([Leg(5.0, 100.0), Leg(9.0)], groups, without, 30.0, 2000.0)
    told = states(groups, 2000.0)
    assert asked <= set(told) and len(told) == len(set(told)) < 60
    assert (3, 1, 2, 2) in told


# ----------------------------------------------------------------------------- never a gain

risks = st.lists(
    st.builds(
        RiskGroup,
        count=st.integers(1, 4),
        ends_in_s=st.none() | st.floats(0, 1000),
        hazard_per_s=st.floats(0, 0.01),
        used=st.booleans(),
    ),
    min_size=1,
    max_size=3,
)


def adds_up(groups: Sequence[RiskGroup], own: float) -> Callable[[Gone], float]:
    """What serves falls with who is gone: of the gear's own, then of those that stand by."""

    def without(gone: Gone) -> float:
        if not any(n for n, g in zip(gone, groups, strict=True) if g.used):
            return inf
        total = sum(g.count for g in groups)
        return own * (1 - sum(gone) / total) ** 2

    return without


# hypothesis found once that losses in the slow time of a shift came cheaper than later ones
COURSE = (243.0, 0.36, 930.0)
GROUPS = [RiskGroup(2, None, 0.01), RiskGroup(1, None, 0.002), RiskGroup(2, None, 0.01)]
courses = st.tuples(st.floats(0, 300), st.floats(0, 1000), st.floats(0, 1000))


@settings(max_examples=150, deadline=None)
@example(GROUPS, COURSE, 32.0, 710.0, 2, 0.0065)
@given(risks, courses, st.floats(0, 60), st.floats(1, 1200), st.integers(0, 2), st.floats(0, 0.01))
def test_more_risk_is_never_worth_more(
    groups: list[RiskGroup], course: tuple[float, float, float], recovery: float,
    horizon: float, which: int, more: float,
) -> None:  # fmt: skip
    assume(which < len(groups))
    # a member that was safe is one more to be lost: what is told apart changes with it
    assume(groups[which].hazard_per_s or sum(g.count for g in groups) <= MOST_LOSSES)
    shift_s, during, then = course
    legs = [Leg(min(during, then), shift_s), Leg(then)]
    one = groups[which]
    worse = [*groups]
    worse[which] = replace(one, hazard_per_s=one.hazard_per_s + more)
    without = adds_up(groups, then)
    before = expected_tokens(legs, groups, without, recovery, horizon)
    assert expected_tokens(legs, worse, without, recovery, horizon) <= before * (1 + 1e-6) + 1e-6


@settings(max_examples=150, deadline=None)
@given(risks, st.floats(0, 1000), st.floats(1, 1200), st.integers(0, 2), st.floats(0, 1000))
def test_an_earlier_end_is_never_worth_more(
    groups: list[RiskGroup], rate: float, horizon: float, which: int, end: float
) -> None:
    # what is told apart changes where there are more members at risk than losses that are
    assume(which < len(groups) and sum(g.count for g in groups if g.hazard_per_s) <= MOST_LOSSES)
    one = groups[which]
    sooner = end if one.ends_in_s is None else min(end, one.ends_in_s)
    worse = [*groups]
    worse[which] = replace(one, ends_in_s=sooner)
    without = adds_up(groups, rate)
    before = expected_tokens([Leg(rate)], groups, without, 0.0, horizon)
    assert expected_tokens([Leg(rate)], worse, without, 0.0, horizon) <= before * (1 + 1e-6) + 1e-6


@settings(max_examples=100, deadline=None)
@given(risks, courses, st.floats(0, 60), st.floats(0, 60), st.floats(1, 1200))
def test_a_longer_recovery_is_never_worth_more(
    groups: list[RiskGroup], course: tuple[float, float, float], recovery: float, more: float,
    horizon: float,
) -> None:  # fmt: skip
    shift_s, during, then = course
    legs = [Leg(min(during, then), shift_s), Leg(then)]
    without = adds_up(groups, then)
    before = expected_tokens(legs, groups, without, recovery, horizon)
    longer = expected_tokens(legs, groups, without, recovery + more, horizon)
    assert longer <= before * (1 + 1e-6) + 1e-6


# ---------------------------------------------------------------------------------- outlooks


def test_a_gear_ends_with_its_first_member_and_risks_add_up() -> None:
    groups = (
        RiskGroup(1, 600.0, 0.001), RiskGroup(2, None, 0.002), RiskGroup(1, 300.0),
        RiskGroup(5, 100.0, 0.5, used=False),
    )  # fmt: skip
    outlook = Outlook(groups)
    assert outlook.ends_s == (300.0, 600.0) and outlook.known_end_s == 300.0
    assert outlook.hazard_per_s == pytest.approx(0.005)
    assert outlook.hits((0, 1, 0, 0)) and not outlook.hits((0, 0, 0, 5))
    assert Outlook().known_end_s is None and Outlook().hazard_per_s == 0
