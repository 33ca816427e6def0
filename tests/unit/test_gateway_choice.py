"""What a choice gives out, and when: text, log probabilities and token ids together."""

from __future__ import annotations

import pytest
from gateway_fakes import ScriptedDetokenizer

from flexslurm.errors import GenerationFailed, NotServing, RequestAborted, RequestError
from flexslurm.gateway.choice import Choice, ChoiceDelta, EndRules
from flexslurm.messages import FinishReason, TokenEvent, TokenLogprobs


class Driven:
    """A choice whose token i has the text `texts[i]` and the log probability -i."""

    def __init__(self, *texts: str, rules: EndRules | None = None) -> None:
        self.choice = Choice(0, ScriptedDetokenizer(texts), rules or EndRules())
        self.next = 0

    def push(self, finish: FinishReason | None = None) -> ChoiceDelta:
        event = TokenEvent(
            seq_id="x/0",
            token=self.next,
            position=self.next,
            logprobs=TokenLogprobs(-float(self.next)),
            finish=finish,
        )
        self.next += 1
        self.choice.push(event)
        return self.choice.take()


def scored(piece: ChoiceDelta) -> list[tuple[int, int]]:
    return [(item.token, item.offset) for item in piece.scored]


def test_log_probabilities_come_with_their_tokens_text() -> None:
    driven = Driven("a ", "EN", "X b", "", "c", rules=EndRules(stop_strings=("END",)))
    first = driven.push()
    assert (first.text, scored(first), first.tokens) == ("a ", [(0, 0)], [0])
    held = driven.push()
    assert (held.text, scored(held), held.tokens) == ("", [], [1])
    freed = driven.push()
    assert (freed.text, scored(freed)) == ("ENX b", [(1, 2), (2, 4)])
    silent = driven.push()
    assert (silent.text, scored(silent)) == ("", [])
    last = driven.push(FinishReason.LENGTH)
    assert (last.text, scored(last)) == ("c", [(3, 7), (4, 7)])


def test_log_probabilities_end_where_the_text_is_cut() -> None:
    driven = Driven("a ", "b E", "N", "D c", rules=EndRules(stop_strings=("END",)))
    pieces = [driven.push() for _ in range(4)]
    assert "".join(piece.text for piece in pieces) == "a b "
    assert [token for piece in pieces for token, _ in scored(piece)] == [0, 1]
    assert driven.choice.completion_tokens == 4
    assert driven.choice.must_abort


def test_a_stop_string_in_the_last_token_needs_no_abort() -> None:
    driven = Driven("a ", "END", rules=EndRules(stop_strings=("END",)))
    driven.push()
    driven.push(FinishReason.LENGTH)
    assert (driven.choice.finish_reason, driven.choice.must_abort) == ("stop", False)


def test_what_looks_like_a_stop_string_is_given_out_at_the_end() -> None:
    driven = Driven("a ", "EN", rules=EndRules(stop_strings=("END",)))
    driven.push()
    piece = driven.push(FinishReason.LENGTH)
    assert (piece.text, scored(piece)) == ("EN", [(1, 2)])


def test_an_end_token_has_no_text_unless_asked_for() -> None:
    for include, text in ((False, "a"), (True, "a</s>")):
        rules = EndRules(stop_token_ids=frozenset({1}), include_stop=include)
        driven = Driven("a", "</s>", rules=rules)
        pieces = [driven.push(), driven.push(FinishReason.STOP)]
        assert "".join(piece.text for piece in pieces) == text
        assert [t for p in pieces for t, _ in scored(p)] == ([0, 1] if include else [0])
        assert [token for piece in pieces for token in piece.tokens] == [0, 1]
        assert (driven.choice.stop_reason, driven.choice.completion_tokens) == (None, 2)


def test_events_after_the_end_are_ignored() -> None:
    driven = Driven("END", "more", rules=EndRules(stop_strings=("END",)))
    driven.push()
    piece = driven.push(FinishReason.LENGTH)
    assert (piece.text, piece.tokens, driven.choice.completion_tokens) == ("", [], 1)
    assert driven.choice.finish_reason == "stop"


@pytest.mark.parametrize(
    ("finish", "code", "kind"),
    [
        (FinishReason.ERROR, None, GenerationFailed),
        (FinishReason.ABORT, None, RequestAborted),
        (FinishReason.ERROR, "no_capacity", NotServing),
        (FinishReason.ABORT, "no such code", RequestAborted),
    ],
)
def test_a_failure_is_the_error_it_stands_for(
    finish: FinishReason, code: str | None, kind: type[RequestError]
) -> None:
    choice = Choice(0, ScriptedDetokenizer(()), EndRules())
    event = TokenEvent(
        seq_id="x/0", token=None, position=0, finish=finish, error="so it is", code=code
    )
    assert choice.push(event)
    assert type(choice.error) is kind and choice.error.message == "so it is"
    assert choice.finish_reason is None
