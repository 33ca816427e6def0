"""The tokens of an install's probe: the model's own, no special ones, as many as are wanted."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from flexslurm.gateway.text import TextModel
from flexslurm.head.probe_text import probe_tokens


def text_model(words: list[str], *, vocab_size: int | None = None, unk: str = "?") -> TextModel:
    """The vocabulary's first two tokens are special, then come these words."""
    vocabulary = {word: number for number, word in enumerate(["<s>", "</s>", *words])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=unk))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens(
        [AddedToken("<s>", special=True), AddedToken("</s>", special=True)]
    )
    return TextModel(tokenizer, eos_ids=(1,), vocab_size=vocab_size)


def test_they_are_words_of_a_plain_text() -> None:
    made = text_model(["?", "the", "dog", "brown", "never"])
    tokens = probe_tokens(made, 16)
    assert len(tokens) == 16
    assert {"dog", "brown"} <= {made.token_name(token) for token in tokens}
    assert not {"<s>", "</s>", "never"} & {made.token_name(token) for token in tokens}


def test_ids_that_the_model_lacks_and_special_ones_are_left_out() -> None:
    made = text_model(["?", "fox", "dog"], vocab_size=4)
    assert set(probe_tokens(made, 9)) == {2, 3}, "dog is beyond the embedding"
    unknown = text_model(["?"], unk="</s>")
    assert probe_tokens(unknown, 3) == (2, 2, 2), "all words are special here"
    bare = text_model([], vocab_size=2, unk="</s>")
    assert probe_tokens(bare, 2) == (0, 0), "there is nothing else"


def test_none_are_wanted() -> None:
    assert probe_tokens(text_model(["?"]), 0) == ()


@pytest.mark.parametrize("count", [1, 16, 200])
def test_a_real_tokenizer_gives_them(tiny_model: Path, count: int) -> None:
    made = TextModel.load(tiny_model)
    tokens = probe_tokens(made, count)
    assert len(tokens) == count
    assert all(0 <= token < made.vocab_size and token not in made.eos_ids for token in tokens)
