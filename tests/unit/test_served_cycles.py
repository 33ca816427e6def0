"""What a served cycle takes besides its step, from counters that are played."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from flexslurm.engine.served_cycles import Cycles, Reading, cycles_of
from flexslurm.errors import ServiceError

HEAD_S = 2e-3


def readings(steps_s: Sequence[float], besides_s: Sequence[float], each: int = 10) -> list[Reading]:
    """Parts of `each` steps, that took so long each and so much besides."""
    ends = itertools.accumulate(
        (each * (a + b) for a, b in zip(steps_s, besides_s, strict=True)), initial=100.0
    )
    done = itertools.accumulate((each * a for a in steps_s), initial=7.0)
    return [Reading(each * n, c, at) for n, (c, at) in enumerate(zip(done, ends, strict=True))]


def test_a_machine_that_is_slow_for_a_while_changes_the_step_and_not_the_rest() -> None:
    found = cycles_of(readings([0.020, 0.020, 0.031, 0.045, 0.020], [HEAD_S] * 5))
    assert found.besides_s == pytest.approx(HEAD_S)
    assert found.step_s == pytest.approx(0.020) and found.cycle_s == pytest.approx(0.022)
    assert found.low_s == pytest.approx(HEAD_S) and found.high_s == pytest.approx(HEAD_S)


def test_one_part_that_was_held_up_counts_for_nothing() -> None:
    found = cycles_of(readings([0.020] * 7, [HEAD_S] * 6 + [0.5]))
    assert found.besides_s == pytest.approx(HEAD_S)


@pytest.mark.parametrize("alone_s", [0.010, 0.0197, 0.020, 0.0203, 0.030])
def test_the_rest_is_never_less_than_what_was_seen_in_the_service(alone_s: float) -> None:
    """A step alone that came out longer, by noise or another load, takes nothing away."""
    found = cycles_of(readings([0.0195, 0.020, 0.0205], [HEAD_S] * 3))
    assert found.spread_s == pytest.approx(1.57 * 0.0005 / 3**0.5)
    more = 0.010 if alone_s == 0.010 else 0.0
    assert found.head_s(alone_s) == pytest.approx(HEAD_S + more)


def test_a_step_that_is_longer_in_a_service_counts_where_it_is_no_noise() -> None:
    steady = cycles_of(readings([0.020] * 4, [HEAD_S] * 4))
    assert steady.longer_s(0.018) == pytest.approx(0.002)
    noisy = cycles_of(readings([0.010, 0.020, 0.020, 0.030], [HEAD_S] * 4))
    assert noisy.longer_s(0.018) == 0.0
    assert "within its spread" in noisy.words(0.018)
    assert "within its spread" not in steady.words(0.018)
    assert "=" not in steady.words(0.018), "a remark in a profile is no entry"


def test_parts_without_a_step_are_left_out() -> None:
    some = readings([0.020, 0.020], [HEAD_S] * 2)
    idle = Reading(some[-1].steps, some[-1].computed_s, some[-1].at_s)
    assert cycles_of([*some, idle]) == cycles_of(some)
    with pytest.raises(ServiceError, match="no step"):
        cycles_of([idle, idle])


def test_a_step_of_a_virtual_clock_may_be_longer_than_its_cycle() -> None:
    """It may begin when the one before it ended: then there is nothing besides."""
    found = cycles_of(readings([0.020] * 3, [-1e-4] * 3))
    assert found.besides_s == 0.0
    assert found == Cycles(found.cycle_s, found.step_s, 0.0, 0.0, 0.0, found.spread_s)


def test_a_cycle_of_two_stages_is_two_steps_of_the_last_and_what_it_waits() -> None:
    found = cycles_of(readings([0.010] * 3, [0.001] * 3), stages=2)
    assert found.cycle_s == pytest.approx(0.022) and found.step_s == pytest.approx(0.010)
    assert found.besides_s == pytest.approx(0.002)
