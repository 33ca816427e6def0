"""Decisions with their reasons: forced ones, gains, risks, windows, gaps and named plans."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flexslurm.control.choices import (
    Decision,
    Observation,
    Option,
    PolicySettings,
    ShiftPrice,
)
from flexslurm.control.horizon import Outlook, RiskGroup
from flexslurm.control.policy import decide, same_layout
from flexslurm.control.trends import Sample, Window, summary
from flexslurm.gear import Estimates, Gear, NoGear, Replica, Shape, Signature, Stage


def gear(name: str, tokens_per_s: float, nodes: int = 1, layers: int = 12) -> Gear:
    cuts = [layers * i // nodes for i in range(nodes + 1)]
    stages = tuple(Stage("a", 1, cuts[i], cuts[i + 1], 64, i) for i in range(nodes))
    one = Replica(stages, max_batch=int(tokens_per_s), max_batch_tokens=64, max_context=256)
    signature = Signature.of([Shape("a", 1)] * nodes)
    return Gear(name, signature, 16, (one,), Estimates(tokens_per_s, 0.1, 0.01, 1000, 1.0))


NOTHING = NoGear(Signature(), "40 bytes are short")
SETTINGS = PolicySettings(min_action_gap_s=180.0, migration_benefit_ratio=1.3)


def seen(current: Gear | None, best: Gear | NoGear, **more: object) -> Observation:
    known: dict[str, object] = {
        "lost": (), "leaving": (), "best_with_leaving": best, "since_shift_s": None, **more,
    }  # fmt: skip
    return Observation(current=current, best=best, **known)  # type: ignore[arg-type]


def window(tokens_per_s: float, waiting: int = 0, busy: float = 1.0, count: int = 30) -> Window:
    return summary([Sample(i, tokens_per_s, 4, waiting, busy) for i in range(count)])


# -------------------------------------------------------------------------------- worked example

STEADY, NIMBLE = gear("steady", 1000.0), gear("nimble", 750.0)
TWELVE_MINUTES = 720.0
COST = ShiftPrice(seconds=90.0, tokens_per_s=300.0)


def test_twelve_sure_minutes_are_worth_staying_for() -> None:
    decision = decide(
        seen(
            STEADY,
            STEADY,
            options=(Option(NIMBLE, COST),),
            outlook=Outlook((RiskGroup(ends_in_s=TWELVE_MINUTES),)),
        ),
        SETTINGS,
    )
    assert decision == Decision(
        None,
        "nimble is estimated at 0.69 times steady: 499,500 tokens in the next 12 min "
        "(300 tokens/s for 90 s, then 750 tokens/s) against 720,000 (1000 tokens/s), "
        "below the benefit ratio of 1.3",
    )


def test_the_same_with_the_end_uncertain_enough_is_not() -> None:
    def answer(mean_life_s: float, weight: float = 0.8) -> Decision:
        outlook = Outlook((RiskGroup(1, TWELVE_MINUTES, 1 / mean_life_s),))
        case = seen(STEADY, STEADY, options=(Option(NIMBLE, COST),), outlook=outlook)
        return decide(case, replace(SETTINGS, eviction_risk_weight=weight))

    assert answer(3600.0).gear is None
    assert answer(300.0).gear == NIMBLE
    assert "499,500 tokens" in answer(300.0).reason
    assert answer(300.0, weight=0.0).gear is None, "a weight of 0 ignores what may come"


# ------------------------------------------------------------------------------------- forced


def test_a_loss_forces_a_shift_whatever_the_gap() -> None:
    case = seen(gear("old", 500), gear("rest", 100), lost=("p2",), since_shift_s=1.0)
    decision = decide(case, SETTINGS)
    assert decision.gear is not None
    assert decision.gear.name == "rest"
    assert decision.reason == "lost p2: rest fits what is left (100 tokens/s)"


def test_without_a_gear_what_fits_is_taken_with_leaving_gpus_too() -> None:
    late = gear("late", 100)
    case = seen(None, NOTHING, best_with_leaving=late)
    assert decide(case, SETTINGS).gear == late
    nothing = decide(seen(None, NOTHING, best_with_leaving=NOTHING), SETTINGS)
    assert nothing.gear is None
    assert "40 bytes are short" in nothing.reason


def test_a_notice_forces_a_shift_and_without_a_gear_serving_goes_on() -> None:
    old = gear("old", 500)
    assert decide(seen(old, gear("rest", 100), leaving=("p2",)), SETTINGS).gear is not None
    stays = decide(seen(old, NOTHING, leaving=("p2",)), SETTINGS)
    assert stays.gear is None
    assert "serving until then (40 bytes are short)" in stays.reason


def test_what_will_be_evicted_is_said_beforehand() -> None:
    small = gear("small", 100)
    option = Option(small, ShiftPrice(evicted=("s9", "s8")))
    reason = decide(seen(gear("old", 500), small, leaving=("p2",), options=(option,)), SETTINGS)
    assert reason.reason.endswith("; 2 sequences do not fit in it and will be recomputed (s9, s8)")


def test_of_several_gears_a_loss_leaves_for_the_most_tokens() -> None:
    slow, fast = gear("slow", 100), gear("fast", 120)
    options = (Option(fast, ShiftPrice(seconds=900.0)), Option(slow))
    assert decide(seen(None, slow, options=options), SETTINGS).gear == slow
    assert decide(seen(None, slow, options=(Option(fast),)), SETTINGS).gear == fast


def test_a_loss_leaves_for_what_lasts() -> None:
    """The faster gear's pilots end one after the other, and less serves each time."""
    fast, steady = gear("fast", 1000.0), gear("steady", 800.0)
    groups = (RiskGroup(ends_in_s=600.0), RiskGroup(ends_in_s=1200.0))
    outlook = Outlook(groups, {(1, 0): gear("half", 500.0)})
    options = (Option(fast, outlook=outlook), Option(steady))
    assert decide(seen(None, fast, options=options), SETTINGS).gear == steady
    longer = replace(outlook, groups=(RiskGroup(ends_in_s=3000.0), groups[1]))
    lasts = replace(longer, groups=(longer.groups[0], RiskGroup(ends_in_s=3300.0)))
    options = (Option(fast, outlook=lasts), Option(steady))
    assert decide(seen(None, fast, options=options), SETTINGS).gear == fast


def test_several_ends_of_the_gear_to_go_to_are_counted_and_said() -> None:
    """1000 for 10 min, 500 for 10 more, and nothing in the last 40."""
    large = gear("large", 1000.0, nodes=2)
    groups = (RiskGroup(ends_in_s=600.0), RiskGroup(ends_in_s=1200.0))
    outlook = Outlook(groups, {(1, 0): gear("half", 500.0)})
    case = seen(gear("small", 100.0), large, options=(Option(large, outlook=outlook),))
    reason = decide(case, SETTINGS).reason
    assert "900,000 tokens in the next 60 min (1000 tokens/s, pilots of it ending" in reason
    assert "ending in 10 min, 20 min) against 360,000 (100 tokens/s)" in reason


def test_what_is_recomputed_is_counted_and_said() -> None:
    large = gear("large", 140.0, nodes=2)
    price = ShiftPrice(60.0, 80.0, 40_000.0, ("s9",), 3)
    case = seen(gear("small", 100.0), large, options=(Option(large, price),))
    decision = decide(case, SETTINGS)
    assert decision.gear is None
    assert (
        "460,400 tokens in the next 60 min (80 tokens/s for 60 s, then 140 tokens/s, "
        "less 40,000 for recomputing 3 sequences) against 360,000 (100 tokens/s)"
    ) in decision.reason


# -------------------------------------------------------------------------------------- gains


def test_a_returning_pilot_is_taken_back_at_once_where_no_gain_is_asked_for() -> None:
    settings = PolicySettings(min_action_gap_s=0.0, migration_benefit_ratio=1.0)
    small, large = gear("small", 100.0), gear("large", 100.0, nodes=2)
    cost = (Option(large, ShiftPrice(seconds=5.0)),)
    for options in ((), cost):
        case = seen(small, large, since_shift_s=0.1, options=options)
        assert decide(case, settings).gear == large
    # Also while measuring has only begun, and whatever the load was.
    idle = window(1.0, busy=0.1)
    for windows in ((), (idle,), (idle, idle)):
        assert decide(seen(small, large, windows=windows), settings).gear == large


def test_the_benefit_ratio_is_of_tokens_over_the_horizon() -> None:
    small, large = gear("small", 100.0), gear("large", 140.0, nodes=2)
    assert decide(seen(small, large), SETTINGS).gear == large
    dear = Option(large, ShiftPrice(seconds=600.0))
    stays = decide(seen(small, large, options=(dear,)), SETTINGS)
    assert stays.gear is None
    assert "1.17 times" in stays.reason
    assert "below the benefit ratio of 1.3" in stays.reason
    lossy = Option(large, ShiftPrice(lost_tokens=100_000.0))
    assert decide(seen(small, large, options=(lossy,)), SETTINGS).gear is None


def test_a_shift_soon_after_another_waits() -> None:
    small, large = gear("small", 100.0), gear("large", 200.0, nodes=2)
    decision = decide(seen(small, large, since_shift_s=60.0), SETTINGS)
    assert decision.gear is None
    assert decision.look_again_s == 120.0
    assert decision.reason.endswith(": 120 s too early")
    assert decide(seen(small, large, since_shift_s=180.0), SETTINGS).gear == large


def test_the_same_layout_over_another_allocation_is_no_other_gear() -> None:
    one, two = gear("one", 100.0, nodes=2), gear("two", 100.0, nodes=2)
    swapped = tuple(
        Replica(
            tuple(Stage(s.gpu_type, s.tp, s.lo, s.hi, s.kv_blocks, 1 - s.node) for s in r.stages),
            r.max_batch, r.max_batch_tokens, r.max_context,
        )
        for r in two.replicas
    )  # fmt: skip
    other = Gear("two", two.signature, 16, swapped, two.estimates)
    assert same_layout(one, other)
    settings = replace(SETTINGS, migration_benefit_ratio=1.0)
    assert decide(seen(one, other), settings).gear is None


# ----------------------------------------------------------------------------- load and windows


def test_a_load_that_the_gear_carries_is_no_reason_to_leave() -> None:
    now, other = gear("now", 100.0), gear("other", 200.0)
    light = window(50.0, busy=0.5)
    decision = decide(seen(now, other, windows=(light, light)), SETTINGS)
    assert decision.gear is None
    assert "1.00 times now" in decision.reason
    assert decision.look_again_s == SETTINGS.window_s


def test_two_windows_must_agree() -> None:
    now, other = gear("now", 100.0), gear("other", 200.0)
    heavy, light = window(95.0, waiting=8), window(20.0, busy=0.2)
    assert decide(seen(now, other, windows=(heavy, heavy)), SETTINGS).gear == other
    for windows in ((light, heavy), (heavy, light), (heavy,), ()):
        decision = decide(seen(now, other, windows=windows), SETTINGS)
        assert decision.gear is None, windows
        assert decision.look_again_s == SETTINGS.window_s
    assert (
        "window before says otherwise"
        in decide(seen(now, other, windows=(heavy, light)), SETTINGS).reason
    )
    third = gear("third", 210.0)
    options = (Option(third),)
    assert decide(seen(now, other, windows=(heavy, heavy), options=options), SETTINGS).gear == third


def test_a_plan_for_fewer_gpus_than_are_used_is_no_new_gpus() -> None:
    """It must show in two windows, like all that comes of the load."""
    now, fewer = gear("now", 100.0, nodes=3), gear("fewer", 200.0, nodes=2)
    heavy = window(95.0, waiting=8)
    options = (Option(fewer),)
    assert decide(seen(now, now, options=options, windows=(heavy,)), SETTINGS).gear is None
    assert decide(seen(now, now, options=options, windows=(heavy, heavy)), SETTINGS).gear == fewer


def test_estimates_are_corrected_by_what_was_measured() -> None:
    now, other = gear("now", 100.0), gear("other", 200.0)
    heavy = window(95.0, waiting=8)
    case = seen(now, other, windows=(heavy, heavy), corrections={"now": 1.0, "other": 0.6})
    decision = decide(case, SETTINGS)
    assert decision.gear is None
    assert "1.20 times" in decision.reason
    # A gear that was never measured is taken to err as the others do.
    assert decide(replace(case, corrections={"now": 0.5}), SETTINGS).gear == other


# ---------------------------------------------------------------------------------- named plans


def test_only_named_plans_are_installed() -> None:
    settings = replace(SETTINGS, plans=("b",))
    a, b = gear("a", 200.0), gear("b", 100.0)
    assert decide(seen(None, a, options=(Option(b),)), settings).gear == b
    refused = decide(seen(None, a), settings)
    assert refused.gear is None
    assert "a would, but only b may be installed" in refused.reason


def test_the_default_plan_is_preferred_wherever_it_fits() -> None:
    settings = replace(SETTINGS, default_plan="b", fallback_plan="c")
    a, b = gear("a", 200.0), gear("b", 100.0)
    options = (Option(b),)
    taken = decide(seen(None, a, options=options), settings)
    assert taken.gear == b
    assert "is the default plan" in taken.reason
    back = decide(seen(a, a, options=options), settings)
    assert back.gear == b
    assert decide(seen(b, a, options=options), settings).gear is None
    early = decide(seen(a, a, options=options, since_shift_s=10.0), settings)
    assert early.gear is None
    assert early.look_again_s == 170.0


@pytest.mark.parametrize("current", [None, "old"])
def test_the_fallback_plan_is_for_when_nothing_else_fits(current: str | None) -> None:
    settings = replace(SETTINGS, plans=("a",), fallback_plan="c")
    a, c = gear("a", 50.0), gear("c", 500.0)
    lost = () if current is None else ("p1",)
    now = gear("old", 10.0) if current else None
    assert decide(seen(now, c, lost=lost, options=(Option(a),)), settings).gear == a
    alone = decide(seen(now, c, lost=lost), settings)
    assert alone.gear == c
    assert "is the fallback plan" in alone.reason
    assert decide(seen(a, c), settings).gear is None, "a is not left for the fallback plan"


def test_at_the_first_start_it_says_what_is_waited_for() -> None:
    short = NoGear(Signature(), "the model needs 3 GB more", short_bytes=3)
    waits = decide(seen(None, short, best_with_leaving=short, first=True), SETTINGS)
    assert waits.reason == "waiting for more GPUs: the model needs 3 GB more"
    planned = NoGear(Signature(), "the gear of a:1 is still being planned")
    waits = decide(seen(None, planned, best_with_leaving=planned, first=True), SETTINGS)
    assert waits.reason == "waiting for the first gear: the gear of a:1 is still being planned"
    first = decide(seen(None, gear("one", 70.0), first=True), SETTINGS)
    assert first.reason == "the first gear: one fits what is here (70 tokens/s)"
    later = decide(seen(None, NOTHING, best_with_leaving=NOTHING), SETTINGS)
    assert later.reason == "nothing serves, and nothing fits what is left: 40 bytes are short"


def test_two_reasons_to_stay_are_both_said_and_the_nearer_is_looked_at_again() -> None:
    """New GPUs are worth a shift that comes too early; another gear for the old ones is not."""
    small, large, other = gear("small", 100.0), gear("large", 200.0, nodes=2), gear("other", 90.0)
    heavy = window(95.0, waiting=8)
    case = seen(small, large, options=(Option(other),), windows=(heavy, heavy), since_shift_s=170.0)
    decision = decide(case, SETTINGS)
    assert decision.gear is None and decision.look_again_s == 10.0
    assert "large is estimated at 2.00 times small" in decision.reason
    assert ": 10 s too early; other is estimated at 0.90 times small" in decision.reason
