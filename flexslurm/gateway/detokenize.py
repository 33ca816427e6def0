"""Token ids to text, one token at a time, in constant work per token; never emits half a character.

What comes out, joined, equals the tokenizer's decoding of all tokens at once. That is exact where
the tokenizer's decoder is one of the two kinds nearly all causal models use:

- byte-level (GPT-2's alphabet): tokens are bytes, the text is their UTF-8 decoding;
- metaspace with byte fallback (SentencePiece's): tokens are text with `▁` for a space, and
  `<0xAB>` tokens spell bytes. A run of such bytes is text if *all of it* is valid UTF-8, else one
  replacement character per byte; so a run can be released only when it ends. Runs longer than
  `MAX_RUN_BYTES` are released early, as their characters complete, so that a stream in a script
  without tokens of its own still flows.

Any other decoder is driven through a window of the last tokens, which is what other servers do for
every tokenizer.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tokenizers import Tokenizer

MAX_RUN_BYTES = 64
WINDOW_TOKENS = 6
MAX_PENDING_TOKENS = 16
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
SPACE_MARK = "\N{LOWER ONE EIGHTH BLOCK}"

_new_utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer(Protocol):
    """One sequence's text as it grows."""

    def prime(self, context: Sequence[int]) -> None:
        """Before the first push: the text goes on from these tokens, and theirs is not wanted."""
        ...

    def push(self, token: int) -> str:
        """Take the next token; the text that is now certain, often empty."""
        ...

    def finish(self) -> str:
        """The text still held back: call once, after the last token."""
        ...


class Decoding(Protocol):
    """How one tokenizer's tokens become text; shared by all sequences."""

    def start(self, skip_special: bool) -> Detokenizer: ...

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token stands for by itself; special tokens spell their name."""
        ...


def decoding_of(tokenizer: Tokenizer) -> Decoding:
    """Choose by the tokenizer's decoder."""
    config = _decoder_config(tokenizer)
    names = Names(tokenizer)
    if config.get("type") == "ByteLevel":
        return ByteLevelDecoding(names)
    metaspace = _read_metaspace(config)
    if metaspace is not None:
        return MetaspaceDecoding(names, *metaspace)
    return WindowDecoding(tokenizer)


def _decoder_config(tokenizer: Tokenizer) -> dict[str, Any]:
    decoder = tokenizer.decoder
    if decoder is None:
        return {}
    config = json.loads(decoder.__getstate__())
    while config.get("type") == "Sequence" and len(config["decoders"]) == 1:
        config = config["decoders"][0]
    assert isinstance(config, dict)
    return config


def _read_metaspace(config: dict[str, Any]) -> tuple[int, bool] | None:
    """(leading spaces stripped from the text, whether bytes fall back), None for other decoders."""
    is_sequence = config.get("type") == "Sequence"
    stages: list[dict[str, Any]] = config["decoders"] if is_sequence else []
    replace = {"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "}
    if not stages or stages[0] != replace:
        return None
    rest = [stage["type"] for stage in stages[1:]]
    byte_fallback = rest[:1] == ["ByteFallback"]
    rest = rest[1:] if byte_fallback else rest
    no_strip: dict[str, Any] = {"content": " ", "start": 0, "stop": 0}
    strip = stages[-1] if rest == ["Fuse", "Strip"] else no_strip
    if rest[:1] != ["Fuse"] or len(rest) > 2 or strip["content"] != " " or strip["stop"] != 0:
        return None
    return int(strip["start"]), byte_fallback


class Names:
    """Token ids to the strings the vocabulary has for them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._id_to_token: Callable[[int], str | None] = tokenizer.id_to_token
        self._special = frozenset(
            str(added.content)
            for added in tokenizer.get_added_tokens_decoder().values()
            if added.special
        )

    def text(self, token: int) -> str:
        """Empty for an id the vocabulary lacks: such ids decode to nothing."""
        return self._id_to_token(token) or ""

    def is_special(self, name: str) -> bool:
        return name in self._special


# ------------------------------------------------------------------------------------ byte-level


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes: character → byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


class ByteLevelDecoding:
    """Tokens of the byte-level alphabet; a token with any other character stands for itself."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._all: dict[int, bytes] = {}
        self._plain: dict[int, bytes] = {}

    def start(self, skip_special: bool) -> Detokenizer:
        return _ByteLevelText(self._plain if skip_special else self._all, self)

    def token_bytes(self, token: int) -> bytes:
        found = self._all.get(token)
        return self.look_up(token)[0] if found is None else found

    def look_up(self, token: int) -> tuple[bytes, bytes]:
        """Fill both tables for a token: (with special tokens, without)."""
        name = self._names.text(token)
        try:
            data = bytes([_BYTE_OF[char] for char in name])
        except KeyError:
            data = name.encode()
        self._all[token] = data
        self._plain[token] = b"" if self._names.is_special(name) else data
        return data, self._plain[token]


class _ByteLevelText:
    __slots__ = ("_decode", "_decoding", "_table")

    def __init__(self, table: dict[int, bytes], decoding: ByteLevelDecoding) -> None:
        self._table = table
        self._decoding = decoding
        self._decode = _new_utf8("replace").decode

    def prime(self, context: Sequence[int]) -> None:
        for token in context:
            self.push(token)

    def push(self, token: int) -> str:
        data = self._table.get(token)
        if data is None:
            self._decoding.look_up(token)
            data = self._table[token]
        return self._decode(data)

    def finish(self) -> str:
        return self._decode(b"", True)


# ------------------------------------------------------------------------------------ metaspace


Piece = str | int | None
"""A token's text, the byte it stands for, or nothing at all."""


class MetaspaceDecoding:
    """SentencePiece's vocabulary: `▁` is a space, `<0xAB>` a byte."""

    def __init__(self, names: Names, strip: int, byte_fallback: bool) -> None:
        self._names = names
        self._strip = strip
        self._byte_fallback = byte_fallback
        self._all: dict[int, Piece] = {}
        self._plain: dict[int, Piece] = {}

    def start(self, skip_special: bool) -> Detokenizer:
        return _MetaspaceText(self._plain if skip_special else self._all, self, self._strip)

    def token_bytes(self, token: int) -> bytes:
        self.look_up(token)
        piece = self._all[token]
        return bytes([piece]) if isinstance(piece, int) else (piece or "").encode()

    def look_up(self, token: int) -> None:
        """Fill both tables for a token: with special tokens, without."""
        if token in self._all:
            return
        name = self._names.text(token)
        byte = _fallback_byte(name) if self._byte_fallback else None
        piece: Piece = name.replace(SPACE_MARK, " ") if byte is None else byte
        self._all[token] = piece if name else None
        self._plain[token] = None if self._names.is_special(name) else self._all[token]


def _fallback_byte(name: str) -> int | None:
    if len(name.encode()) != 6 or not (name.startswith("<0x") and name.endswith(">")):
        return None
    try:
        return int(name[3:5], 16)
    except ValueError:
        return None


class _MetaspaceText:
    __slots__ = ("_decoding", "_long_run", "_run", "_strip", "_table")

    def __init__(self, table: dict[int, Piece], decoding: MetaspaceDecoding, strip: int) -> None:
        self._table = table
        self._decoding = decoding
        self._strip = strip
        self._run = bytearray()
        self._long_run: codecs.IncrementalDecoder | None = None

    def prime(self, context: Sequence[int]) -> None:
        for token in context:
            self.push(token)
        if self._run or self._long_run is not None:
            # The run's complete characters are the context's; the text begins with the rest.
            reader = self._long_run or _new_utf8("replace")
            reader.decode(bytes(self._run))
            self._run = bytearray(reader.getstate()[0])
            self._long_run = None
            self._strip = 0

    def push(self, token: int) -> str:
        try:
            piece = self._table[token]
        except KeyError:
            self._decoding.look_up(token)
            piece = self._table[token]
        if piece is None:
            return ""
        if isinstance(piece, int):
            return self._stripped(self._byte(piece))
        return self._stripped(self._end_run() + piece)

    def finish(self) -> str:
        return self._stripped(self._end_run())

    def _byte(self, byte: int) -> str:
        if self._long_run is not None:
            return self._long_run.decode(bytes([byte]))
        self._run.append(byte)
        if len(self._run) <= MAX_RUN_BYTES:
            return ""
        self._long_run = _new_utf8("replace")
        text = self._long_run.decode(bytes(self._run))
        self._run.clear()
        return text

    def _end_run(self) -> str:
        if self._long_run is not None:
            text = self._long_run.decode(b"", True)
            self._long_run = None
            return text
        if not self._run:
            return ""
        run = bytes(self._run)
        self._run.clear()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return REPLACEMENT * len(run)

    def _stripped(self, text: str) -> str:
        """Drop the spaces that stand before the whole text, as many as the decoder says."""
        if not self._strip or not text:
            return text
        at = 0
        while at < len(text) and at < self._strip and text[at] == " ":
            at += 1
        self._strip = self._strip - at if at == len(text) else 0
        return text[at:]


# --------------------------------------------------------------------------------- any decoder


class WindowDecoding:
    """Any decoder, by decoding the last tokens with and without the newest."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def start(self, skip_special: bool) -> Detokenizer:
        return _WindowText(self, skip_special)

    def decode(self, tokens: Sequence[int], skip_special: bool) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=skip_special))

    def token_bytes(self, token: int) -> bytes:
        return self.decode([token], False).encode()


class _WindowText:
    """`_given` is what the tokens in the window decoded to when text was last given out."""

    __slots__ = ("_decoding", "_given", "_pending", "_skip_special", "_tokens")

    def __init__(self, decoding: WindowDecoding, skip_special: bool) -> None:
        self._decoding = decoding
        self._skip_special = skip_special
        self._tokens: list[int] = []
        self._pending = 0
        self._given = ""

    def prime(self, context: Sequence[int]) -> None:
        for token in context:
            self.push(token)
        self.finish()

    def push(self, token: int) -> str:
        self._tokens.append(token)
        self._pending += 1
        text = self._decoding.decode(self._tokens, self._skip_special)
        if text.endswith(REPLACEMENT) and self._pending < MAX_PENDING_TOKENS:
            return ""
        return self._give(text)

    def finish(self) -> str:
        return self._give(self._decoding.decode(self._tokens, self._skip_special))

    def _give(self, text: str) -> str:
        new = text[len(self._given) :]
        if not new:
            # Tokens without text, such as skipped ones, must not push the context out.
            del self._tokens[len(self._tokens) - self._pending :]
        else:
            del self._tokens[:-WINDOW_TOKENS]
            self._given = self._decoding.decode(self._tokens, self._skip_special)
        self._pending = 0
        return new
