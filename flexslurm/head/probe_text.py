"""The tokens that a new replica is probed with: a plain text's, in the model's own vocabulary."""

from __future__ import annotations

from itertools import cycle, islice

from flexslurm.gateway.text import TextModel

_TEXT = "The quick brown fox jumps over the lazy dog, and then sleeps until the morning comes. "


def probe_tokens(text: TextModel, count: int) -> tuple[int, ...]:
    """So many ids that the model has and that are no special tokens, as far as there are any.

    A tokenizer that knows none of the text's words gives the first ids that are not special.
    """
    special = set(text.eos_ids)
    for number, token in text.tokenizer.get_added_tokens_decoder().items():
        if token.special:
            special.add(number)
    found = text.encode(_TEXT, add_special_tokens=False)
    usual = [token for token in found if token < text.vocab_size and token not in special]
    usual = usual or [token for token in range(text.vocab_size) if token not in special] or [0]
    return tuple(islice(cycle(usual), count))
