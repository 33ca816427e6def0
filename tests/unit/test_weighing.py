"""Useful tokens: what meets the targets, at which load; and what never turns a decision round."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexslurm.control.choices import Observation, Option, PolicySettings, ShiftPrice
from flexslurm.control.horizon import Outlook, RiskGroup
from flexslurm.control.policy import decide
from flexslurm.control.spread import Spread
from flexslurm.control.trends import Sample, Targets, Window, summary
from flexslurm.control.weighing import useful, weigh
from flexslurm.gear import Gear, Signature
from flexslurm.planner.layouts import replica_cycle_s, replica_first_token_s, replica_tokens_per_s
from flexslurm.planner.model_spec import ModelSpec
from flexslurm.planner.planner import Planner
from flexslurm.planner.problem import Problem
from flexslurm.planner.published import config_of
from flexslurm.planner.targets import WithinTargets
from flexslurm.planner.topology import Topology
from flexslurm.planner.workload import Goal, Slo, Workload
from tests.unit.test_policy import gear, seen

TARGETS = Targets(ttft_s=1.0, tpot_s=0.05)
SETTINGS = PolicySettings(targets=TARGETS)
NOW, OTHER = gear("now", 100.0), gear("other", 120.0)


def window(
    tokens_per_s: float = 100.0, *, waiting: int = 8, ttft_s: tuple[float, ...] = (0.5,) * 10,
    tpot_s: tuple[float, ...] = (0.02,) * 10, arrived: int = 0, busy: float = 1.0,
) -> Window:  # fmt: skip
    """Thirty samples of 10 s; one of them has the latencies, answers are of 100 tokens."""
    calm = [Sample(float(i), tokens_per_s, 4, waiting, busy, busy) for i in range(29)]
    last = Sample(
        29.0, tokens_per_s, 4, waiting, busy, busy, arrived, 10, 1000, Spread.of(ttft_s),
        Spread.of(tpot_s),
    )  # fmt: skip
    return summary([*calm, last])


def case(windows: tuple[Window, ...], **more: object) -> Observation:
    return seen(NOW, NOW, options=(Option(OTHER),), windows=windows, **more)


# --------------------------------------------------------------------------- what is measured


def test_the_share_within_the_targets_is_of_those_that_miss_neither() -> None:
    half = (0.5,) * 5 + (3.0,) * 5
    assert TARGETS.share(window()) == 1.0
    assert TARGETS.share(window(ttft_s=half)) == 0.5
    assert TARGETS.share(window(ttft_s=half, tpot_s=(0.02,) * 2 + (0.2,) * 8)) == 0.2
    assert TARGETS.share(window(ttft_s=(3.0,) * 3)) is None, "too few to tell"
    assert Targets(ttft_s=1.0).share(window(tpot_s=(9.0,) * 10)) == 1.0
    assert not Targets() and Targets(tpot_s=0.1)


@given(st.lists(st.floats(1e-4, 1e3), min_size=1, max_size=50), st.floats(1e-4, 1e3))
def test_a_share_read_from_classes_is_that_of_durations_a_tenth_off(
    durations: list[float], limit: float
) -> None:
    found = Spread.of(durations).within(limit)
    low = sum(d <= limit / 1.1 for d in durations) / len(durations)
    high = sum(d <= limit * 1.1 for d in durations) / len(durations)
    assert low <= found <= high


def test_a_gear_whose_tokens_come_too_late_is_left_for_one_in_time() -> None:
    """The other is hardly faster: what counts is that seven in ten were late."""
    late = window(tpot_s=(0.02,) * 3 + (0.09,) * 7)
    decision = decide(case((late, late), within={"other": 110.0}), SETTINGS)
    assert decision.gear == OTHER
    assert "110 of 120 tokens/s within the targets" in decision.reason
    assert "30 of 100 tokens/s within the targets" in decision.reason
    assert "30% within the targets" in decision.reason
    without = decide(case((late, late)), PolicySettings())
    assert without.gear is None and "1.20 times now" in without.reason


def test_late_in_one_window_is_no_reason() -> None:
    late, fine = window(tpot_s=(0.09,) * 10), window()
    for windows in ((late, fine), (fine, late)):
        assert decide(case(windows), SETTINGS).gear is None


def test_a_gear_that_would_be_late_by_estimate_is_not_gone_to() -> None:
    fast = gear("fast", 300.0)
    one = seen(NOW, fast, windows=(window(), window()), within={"fast": 60.0})
    stays = decide(one, SETTINGS)
    assert stays.gear is None
    assert "fast is estimated at 0.60 times now" in stays.reason
    assert "60 of 300 tokens/s within the targets" in stays.reason
    assert decide(one, PolicySettings()).gear == fast


def test_at_a_low_load_the_same_gear_may_be_in_time() -> None:
    """It gives 60 within the targets: no more is wanted, so that it is as good as any."""
    rate = useful(
        seen(None, OTHER, within={"other": 60.0}), SETTINGS, window(30.0, waiting=0, busy=0.3)
    )
    assert rate(OTHER) == pytest.approx(30 / 0.7)
    rate = useful(
        seen(None, OTHER, within={"other": 60.0}), SETTINGS, window(80.0, waiting=0, busy=0.3)
    )
    assert rate(OTHER) == 60.0


def test_what_nobody_can_carry_is_late_everywhere() -> None:
    """Twice as much comes in as either can do: in both, first tokens come as late as measured."""
    flood = window(ttft_s=(0.5,) + (9.0,) * 9, arrived=600)
    assert flood.offered_tokens_per_s == 200.0
    stays = decide(case((flood, flood)), SETTINGS)
    assert stays.gear is None and "1.20 times now" in stays.reason
    large = gear("large", 300.0)
    goes = decide(replace(case((flood, flood)), options=(Option(large),)), SETTINGS)
    assert goes.gear == large and "10 of 100 tokens/s within the targets" in goes.reason


def test_where_nothing_meets_the_targets_all_tokens_count() -> None:
    never = window(tpot_s=(0.09,) * 10)
    hopeless = case((never, never), within={"other": 0.0})
    decision = decide(hopeless, SETTINGS)
    assert decision.gear is None and "1.20 times now" in decision.reason
    assert "nothing meets the targets, so that late tokens count too" in decision.reason
    large = Option(gear("large", 200.0))
    decision = decide(replace(hopeless, options=(large,), within={"large": 0.0}), SETTINGS)
    assert decision.gear == large.gear


def test_what_a_gear_did_under_load_is_remembered() -> None:
    late = window(tpot_s=(0.02,) * 5 + (0.09,) * 5)
    known = case((late, late), attained={"other": 0.4})
    assert decide(known, SETTINGS).gear is None, "it was no better"
    assert decide(replace(known, attained={}), SETTINGS).gear == OTHER


def test_a_loss_leaves_for_what_meets_the_targets() -> None:
    slow, hasty = gear("slow", 100.0), gear("hasty", 300.0)
    lost = seen(None, hasty, options=(Option(slow),), within={"hasty": 20.0, "slow": 100.0})
    assert decide(lost, SETTINGS).gear == slow
    assert decide(lost, PolicySettings()).gear == hasty
    none = replace(lost, within={"hasty": 0.0, "slow": 0.0})
    assert decide(none, SETTINGS).gear == hasty, "where none does, the most tokens"


# --------------------------------------------------------------------- what never turns it round

rates = st.floats(1, 2000)
outlooks = st.builds(
    lambda count, end, hazard, left: Outlook(
        (RiskGroup(count, end, hazard),),
        {(n,): gear(f"left{n}", left * (count - n) / count + 1) for n in range(1, count)},
    ),
    st.integers(1, 3), st.none() | st.floats(10, 2000), st.floats(0, 0.01), rates,
)  # fmt: skip
prices = st.builds(
    ShiftPrice, st.floats(0, 900), rates, st.floats(0, 100_000), st.just(()), st.just(0)
)


def riskier(outlook: Outlook, more: float) -> Outlook:
    [one] = outlook.groups
    group = replace(one, hazard_per_s=one.hazard_per_s + more)
    return replace(outlook, groups=(group,))


def leaves(one: Observation, policy: PolicySettings) -> bool:
    return decide(one, policy).gear is not None


@settings(max_examples=80, deadline=None)
@given(rates, rates, outlooks, outlooks, prices, st.floats(0, 0.02), st.floats(0, 2))
def test_risk_speaks_for_leaving_and_against_going(
    own: float, other: float, mine: Outlook, its: Outlook, price: ShiftPrice, more: float,
    weight: float,
) -> None:  # fmt: skip
    policy = PolicySettings(eviction_risk_weight=weight)
    current, best = gear("current", own), gear("best", other)
    one = seen(current, best, options=(Option(best, price, its),), outlook=mine)
    if leaves(one, policy):
        assert leaves(replace(one, outlook=riskier(mine, more)), policy)
        assert leaves(replace(one, options=(Option(best, price, Outlook()),)), policy)
    else:
        worse = Option(best, price, riskier(its, more))
        assert not leaves(replace(one, options=(worse,)), policy)


@settings(max_examples=80, deadline=None)
@given(
    rates, rates, outlooks, prices, st.floats(0, 900), st.floats(0, 1e5), st.floats(0, 1),
    st.floats(0, 3),
)  # fmt: skip
def test_a_higher_price_never_speaks_for_going(
    own: float, other: float, mine: Outlook, price: ShiftPrice, seconds: float, lost: float,
    slower: float, ratio: float,
) -> None:  # fmt: skip
    policy = PolicySettings(migration_benefit_ratio=1.01)
    current, best = gear("current", own), gear("best", other)
    one = seen(current, best, options=(Option(best, price),), outlook=mine)
    if leaves(one, policy):
        return
    dearer = ShiftPrice(
        price.seconds + seconds, price.tokens_per_s * slower, price.lost_tokens + lost
    )
    assert not leaves(replace(one, options=(Option(best, dearer),)), policy)
    assert not leaves(one, replace(policy, migration_benefit_ratio=1.01 + ratio))


@settings(max_examples=80, deadline=None)
@given(rates, rates, rates, rates, st.floats(0, 1))
def test_more_in_time_never_speaks_against_a_gear(
    own: float, other: float, in_time: float, more: float, load: float
) -> None:
    current, best = gear("current", own), gear("best", other)
    windows = (window(own * load, waiting=0, busy=0.5), window(own, waiting=8))
    one = seen(current, best, options=(Option(best),), within={"best": in_time})
    for each in windows:
        low = weigh(one, current, SETTINGS, one.options, 3600.0, each)
        better = replace(one, within={"best": in_time + more})
        high = weigh(better, current, SETTINGS, one.options, 3600.0, each)
        assert high.rate >= low.rate and high.shift >= low.shift
        assert high.stay == low.stay
        assert low.rate <= low.every + 1e-9


# ------------------------------------------------------------------------------- by the cost model

SPEC = ModelSpec.from_config(config_of("llama-3.1-8b"), name="llama-3.1-8b")
FIGURES = Topology.from_catalogue(("h100", "l4"))


def planned(slo: Slo, pool: str = "h100:1,l4:2") -> tuple[Problem, Gear]:
    goal, signature = Goal(Workload(1000, 100), slo), Signature.parse(pool)
    found = Planner(SPEC, FIGURES, goal, signature).plan(signature)
    assert isinstance(found, Gear)
    return Problem(SPEC, FIGURES, goal), found


def test_a_plan_that_meets_the_targets_gives_all_of_it_in_time() -> None:
    problem, found = planned(Slo(2.0, 0.1))
    assert found.estimates.tpot_s <= 0.1
    assert WithinTargets(problem).gear(found, 1.0) >= found.estimates.tokens_per_s * (1 - 1e-9)


def test_a_gear_made_for_no_targets_gives_less_within_tight_ones() -> None:
    _, found = planned(Slo())
    tight = Problem(
        SPEC, FIGURES, Goal(Workload(1000, 100), Slo(tpot_s=found.estimates.tpot_s / 3))
    )
    inside = WithinTargets(tight).gear(found, 1.0)
    assert 0 < inside < found.estimates.tokens_per_s
    never = Problem(SPEC, FIGURES, Goal(Workload(1000, 100), Slo(tpot_s=1e-6)))
    assert WithinTargets(never).gear(found, 1.0) == 0.0
    first = Problem(SPEC, FIGURES, Goal(Workload(1000, 100), Slo(ttft_s=1e-6)))
    assert WithinTargets(first).gear(found, 1.0) == 0.0


def test_within_is_the_best_batch_that_is_in_time() -> None:
    """Against every batch, one by one; a machine half as fast has half the time."""
    problem, found = planned(Slo(3.0, 0.04), "l4:2")
    for speed in (1.0, 0.5, 1.7):
        expected = 0.0
        for one in found.replicas:
            best = 0.0
            for batch in {*problem.batches(len(one.stages)), one.max_batch}:
                small = msgspec.structs.replace(one, max_batch=min(batch, one.max_batch))
                if (
                    replica_cycle_s(problem, small) / speed <= 0.04
                    and replica_first_token_s(problem, small) / speed <= 3.0
                ):
                    best = max(best, replica_tokens_per_s(problem, small) * speed)
            expected += best
        assert WithinTargets(problem).gear(found, speed) == pytest.approx(expected)
