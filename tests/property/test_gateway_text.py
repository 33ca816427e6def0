"""Incremental text equals the tokenizer's own, and stop strings never get out."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import pytest
from gateway_fakes import (
    ScriptedDetokenizer,
    byte_level_tokenizer,
    metaspace_tokenizer,
    word_tokenizer,
)
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from flexslurm.gateway import detokenize
from flexslurm.gateway.choice import Choice, EndRules
from flexslurm.gateway.detokenize import decoding_of
from flexslurm.gateway.stops import StopMatcher
from flexslurm.gateway.text import TextModel
from flexslurm.messages import FinishReason, TokenEvent

TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": functools.cache(byte_level_tokenizer),
    "metaspace": functools.cache(metaspace_tokenizer),
    "metaspace, no strip": functools.cache(lambda: metaspace_tokenizer(strip=False)),
    "word pieces": functools.cache(word_tokenizer),
}
EXACT = ("byte-level", "metaspace", "metaspace, no strip")


def test_the_exact_ways_are_taken_where_they_can_be() -> None:
    kinds = [type(decoding_of(make())).__name__ for make in TOKENIZERS.values()]
    assert kinds == [
        "ByteLevelDecoding",
        "MetaspaceDecoding",
        "MetaspaceDecoding",
        "WindowDecoding",
    ]


def pieces_of(tokenizer: Tokenizer, tokens: list[int], skip_special: bool) -> list[str]:
    detokenizer = decoding_of(tokenizer).start(skip_special)
    return [*(detokenizer.push(token) for token in tokens), detokenizer.finish()]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data(), skip_special=st.booleans())
def test_pieces_join_to_the_whole_decoding(
    name: str, data: st.DataObject, skip_special: bool
) -> None:
    tokenizer = TOKENIZERS[name]()
    ids = st.integers(0, tokenizer.get_vocab_size() + 2)  # some ids the vocabulary lacks
    tokens = data.draw(st.lists(ids, max_size=60))
    pieces = pieces_of(tokenizer, tokens, skip_special)
    assert "".join(pieces) == tokenizer.decode(tokens, skip_special_tokens=skip_special)


@pytest.mark.parametrize("name", EXACT)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
@example(text="🎉🎉 naïve 你好  x")
@example(text="  ")
def test_text_makes_the_round_trip_in_whole_characters(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]()
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    pieces = pieces_of(tokenizer, tokens, False)
    assert "".join(pieces) == tokenizer.decode(tokens, skip_special_tokens=False)
    if name == "byte-level":
        assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


@pytest.mark.parametrize("name", ["byte-level", "metaspace"])
@given(before=st.text("abcé 你🎉", max_size=8), after=st.text("abcé 你🎉", min_size=1, max_size=8))
def test_text_that_continues_a_prompt_begins_where_the_prompt_ends(
    name: str, before: str, after: str
) -> None:
    tokenizer = TOKENIZERS[name]()
    prompt = tokenizer.encode(before, add_special_tokens=False).ids
    answer = tokenizer.encode(after, add_special_tokens=False).ids
    text = TextModel(tokenizer)
    detokenizer = text.detokenizer(skip_special=True, context=prompt)
    found = "".join([*(detokenizer.push(t) for t in answer), detokenizer.finish()])
    assert text.decode(prompt) + found == text.decode([*prompt, *answer])


def test_a_long_run_of_bytes_flows_before_it_ends() -> None:
    tokenizer = TOKENIZERS["metaspace"]()
    tokens = tokenizer.encode("你" * 200, add_special_tokens=False).ids
    detokenizer = decoding_of(tokenizer).start(False)
    early = "".join(detokenizer.push(token) for token in tokens)
    assert len(early) >= 199
    assert early + detokenizer.finish() == tokenizer.decode(tokens, skip_special_tokens=False)


def test_a_run_of_bytes_that_is_not_text_is_one_mark_a_byte() -> None:
    tokenizer = TOKENIZERS["metaspace"]()
    tokens = [tokenizer.token_to_id(piece) for piece in ("a", "<0xE4>", "<0xBD>", "a", "<0xFF>")]
    assert pieces_of(tokenizer, tokens, False) == ["a", "", "", "\ufffd\ufffda", "", "\ufffd"]


def test_a_decoder_that_looks_back_is_given_a_window() -> None:
    tokenizer = TOKENIZERS["word pieces"]()
    tokens = tokenizer.encode("the streams flowing a stream . ").ids * 20
    detokenizer = decoding_of(tokenizer).start(True)
    assert isinstance(detokenizer, detokenize._WindowText)
    text = "".join([*(detokenizer.push(token) for token in tokens), detokenizer.finish()])
    assert text == tokenizer.decode(tokens)
    assert len(detokenizer._tokens) <= detokenize.WINDOW_TOKENS


# -------------------------------------------------------------------------------- stop strings

LETTERS = "ab"  # few, so that stop strings begin, overlap and fail often


def first_stop(text: str, stops: list[str]) -> tuple[int, int] | None:
    """By definition: the match that ends first, the longest of those."""
    ends = [
        (end, end - len(stop))
        for stop in stops
        for end in range(len(stop), len(text) + 1)
        if text[end - len(stop) : end] == stop
    ]
    return (min(ends)[1], min(ends)[0]) if ends else None


@given(
    text=st.text(LETTERS, max_size=60),
    stops=st.lists(st.text(LETTERS, min_size=1, max_size=5), min_size=1, max_size=4),
)
@example(text="aab", stops=["b", "ab"])
def test_the_matcher_finds_what_a_plain_search_finds(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    match = matcher.feed(text)
    assert (None if match is None else (match.begin, match.end)) == first_stop(text, stops)
    if match is None:
        held = text[len(text) - matcher.held :]
        longest = max((n for s in stops for n in range(len(s)) if text.endswith(s[:n])), default=0)
        assert len(held) == longest


def cut(text: str, cuts: list[int]) -> list[str]:
    at = sorted({0, len(text), *(c % (len(text) + 1) for c in cuts)})
    return [text[a:b] for a, b in itertools.pairwise(at)]


def run_choice(texts: list[str], rules: EndRules, looks: list[bool]) -> tuple[Choice, list[str]]:
    """Push one token per text, taking what is ready where `looks` says."""
    choice = Choice(0, ScriptedDetokenizer(texts), rules)
    given_out: list[str] = []
    for index in range(len(texts)):
        last = index == len(texts) - 1
        finish = FinishReason.LENGTH if last else None
        choice.push(TokenEvent(seq_id="x/0", token=index, position=index, finish=finish))
        if looks[index % len(looks)]:
            given_out.append(choice.take().text)
        if choice.ended:
            break
    given_out.append(choice.take().text)
    return choice, given_out


@given(
    text=st.text(LETTERS, min_size=1, max_size=60),
    stops=st.lists(st.text(LETTERS, min_size=1, max_size=5), min_size=1, max_size=4),
    cuts=st.lists(st.integers(0, 60), max_size=20),
    looks=st.lists(st.booleans(), min_size=1, max_size=7),
    include=st.booleans(),
)
def test_no_part_of_a_stop_string_gets_out(
    text: str, stops: list[str], cuts: list[int], looks: list[bool], include: bool
) -> None:
    rules = EndRules(stop_strings=tuple(stops), include_stop=include)
    choice, given_out = run_choice(cut(text, cuts), rules, looks)
    match = first_stop(text, stops)
    if match is None:
        assert "".join(given_out) == text
        assert (choice.finish_reason, choice.stop_reason) == ("length", None)
        return
    begin, end = match
    expected = text[: end if include else begin]
    assert "".join(given_out) == expected
    for so_far in range(len(given_out)):
        assert expected.startswith("".join(given_out[:so_far]))
    assert choice.finish_reason == "stop"
    assert choice.stop_reason == text[begin:end]


@given(
    texts=st.lists(st.text(LETTERS, max_size=4), min_size=1, max_size=20),
    stop=st.text(LETTERS, min_size=1, max_size=3),
    min_tokens=st.integers(0, 20),
)
def test_stop_strings_count_only_after_min_tokens(
    texts: list[str], stop: str, min_tokens: int
) -> None:
    rules = EndRules(stop_strings=(stop,), min_tokens=min_tokens)
    choice, given_out = run_choice(texts, rules, [True])
    free, rest = "".join(texts[:min_tokens]), "".join(texts[min_tokens:])
    match = first_stop(rest, [stop])
    assert "".join(given_out) == free + (rest if match is None else rest[: match[0]])
    assert choice.completion_tokens == len(texts) or choice.completion_tokens > min_tokens
