"""When the policy is asked again: the earliest wish counts, and waits grow to a bound."""

from __future__ import annotations

import pytest

from flexslurm.control.agenda import Agenda


def test_the_earliest_wish_counts_and_is_asked_once() -> None:
    agenda = Agenda()
    assert not agenda.comes_due(1.0)
    agenda.soon(5.0)
    agenda.soon(3.0)
    agenda.soon(4.0)
    assert not agenda.comes_due(2.9)
    assert agenda.comes_due(3.0)
    assert not agenda.comes_due(9.0)


def test_waits_double_up_to_half_a_minute_however_often_it_fails() -> None:
    agenda, waits = Agenda(), []
    for _ in range(3000):
        agenda.failed(100.0)
        assert agenda.at is not None
        waits.append(agenda.at - 100.0)
        assert agenda.comes_due(agenda.at)
    assert waits[:4] == pytest.approx([0.2, 0.4, 0.8, 1.6])
    assert waits[10] == waits[-1] == 30.0
