"""The states of a sequence, and its tokens cut across prompt and answer."""

from __future__ import annotations

import pytest
from fake_replica import make_request

from flexslurm.engine.sequence import TRANSITIONS, IllegalTransition, Sequence, SequenceState


def test_every_transition_is_in_the_table_or_an_error_with_a_story() -> None:
    assert TRANSITIONS.keys() == set(SequenceState)
    for state in SequenceState:
        for to in SequenceState:
            sequence = Sequence(make_request("s"))
            sequence.state = state
            if to in TRANSITIONS[state]:
                sequence.move(to)
                assert sequence.state is to
            else:
                with pytest.raises(IllegalTransition, match=f"s cannot go from {state} to {to}"):
                    sequence.move(to)
                assert sequence.state is state


def test_the_story_names_the_states_it_went_through() -> None:
    sequence = Sequence(make_request("s"), (7,))
    for state in ("prefilling", "evicted", "prefilling", "decoding", "finished"):
        sequence.move(SequenceState(state))
    story = "waiting → prefilling → evicted → prefilling → decoding → finished"
    with pytest.raises(IllegalTransition, match=rf"\({story}\); it has 1 tokens of answer"):
        sequence.move(SequenceState.DECODING)


@pytest.mark.parametrize(("start", "end"), [(0, 2), (1, 4), (3, 5), (4, 6), (0, 6), (2, 2)])
def test_tokens_are_cut_across_prompt_and_answer(start: int, end: int) -> None:
    sequence = Sequence(make_request("s", (10, 11, 12, 13)), (14, 15))
    assert sequence.tokens(start, end) == tuple(range(10, 16))[start:end]
