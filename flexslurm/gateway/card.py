"""What the gateway is told about the service: the model's name and its own limits; only values."""

from __future__ import annotations

import msgspec


class ModelCard(msgspec.Struct, frozen=True):
    """The model that is served."""

    name: str
    """Its name in the API."""
    path: str
    """Its checkpoint directory; shown to nobody outside."""
    context: int
    """Tokens of prompt and answer the model itself can take."""
    created: int = 0
    """Unix time the service was started, as OpenAI's `created`."""


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on what one request may ask for, and the gateway's own times."""

    body_bytes: int = 32 * 2**20
    choices: int = 128
    """`n` of one request."""
    sequences: int = 512
    """`n` times the number of prompts."""
    stop_strings: int = 16
    stop_chars: int = 512
    """Length of one stop string."""
    logprobs: int = 20
    ping_s: float = 15.0
    """A stream that is silent for this long gets a comment, so that no proxy cuts it."""
    inline_chars: int = 16_384
    """Longer prompts, and as many tokens to be told as text, go to a thread: streams go on."""
