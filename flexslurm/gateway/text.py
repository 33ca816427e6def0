"""The model's text side: tokenizer, chat template, special tokens; never the weights, never torch.

Read from the checkpoint directory: `tokenizer.json`, `tokenizer_config.json`,
`generation_config.json`, `config.json`, and `chat_template.jinja` where there is one. Which special
tokens are put around a text is tokenizer.json's rule alone; `add_bos_token` in the configuration is
for tokenizers without that file, as in transformers.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import AddedToken, Tokenizer

from flexslurm.errors import InvalidRequest, ModelError, unreadable
from flexslurm.gateway.chat_template import ChatTemplate
from flexslurm.gateway.detokenize import (
    Decoding,
    Detokenizer,
    WindowDecoding,
    decoding_of,
)

# Enough tokens of the prompt for an unfinished character or a leading space to be seen.
_CONTEXT_TOKENS = 16
# Unicode normalization makes at most this many characters into one.
_NORMALIZED_SHRINK = 4


class SamplingDefaults(msgspec.Struct, frozen=True):
    """What holds where a request says nothing: the model's recommendation, else OpenAI's."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


class TextModel:
    """Text to tokens and back, for one model. Thread-safe: nothing changes after loading."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        eos_ids: Sequence[int] = (),
        chat_template: ChatTemplate | None = None,
        defaults: SamplingDefaults | None = None,
        vocab_size: int | None = None,
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.tokenizer = tokenizer
        self.eos_ids = tuple(eos_ids)
        self.chat_template = chat_template
        self.defaults = defaults or SamplingDefaults()
        self.vocab_size = vocab_size or tokenizer.get_vocab_size(with_added_tokens=True)
        self._decoding = decoding_of(tokenizer)
        self._most_chars = _most_chars_per_token(tokenizer, self._decoding)

    @classmethod
    def load(cls, path: Path, chat_template: Path | None = None) -> TextModel:
        """Read a checkpoint directory; `chat_template` is a file that replaces the model's own.

        Raises ModelError naming the file that is missing or damaged.
        """
        config = _read_json(path / "config.json")
        config = config.get("text_config", config)
        generation = _read_json(path / "generation_config.json")
        settings_file = path / "tokenizer_config.json"
        settings = _read_json(settings_file)
        special = _special_tokens(path, settings)
        tokenizer = _load_tokenizer(path / "tokenizer.json")
        with _as_transformers_writes(settings_file):
            _add_missing_tokens(tokenizer, settings, special)
            sources = _template_sources(path, settings, chat_template)
        with _as_transformers_writes(path / "config.json"):
            eos_ids = _eos_ids(tokenizer, special, generation, config)
            vocab_size = _vocab_size(config)
        return cls(
            tokenizer,
            eos_ids=eos_ids,
            chat_template=_chat_template(sources, special, chat_template or path),
            defaults=_sampling_defaults(generation, path / "generation_config.json"),
            vocab_size=vocab_size,
        )

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids. Raises InvalidRequest for text that is not Unicode (lone surrogates)."""
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InvalidRequest("the text has a surrogate without its partner") from None
        return list(self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def fewest_tokens(self, text: str) -> int:
        """A number of tokens that this text has at least, found without tokenizing it."""
        return 0 if self._most_chars is None else len(text) // self._most_chars

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """All at once; for a prompt that is echoed, never for a stream."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens))

    def detokenizer(self, *, skip_special: bool, context: Sequence[int] = ()) -> Detokenizer:
        """For one sequence. `context`: tokens before its first, whose text it continues."""
        detokenizer = self._decoding.start(skip_special)
        if context:
            detokenizer.prime(context[-_CONTEXT_TOKENS:])
        return detokenizer

    def token_bytes(self, token: int) -> bytes:
        """What a token stands for by itself, perhaps a part of a character."""
        return self._decoding.token_bytes(token)

    def token_name(self, token: int) -> str:
        """The token as the vocabulary spells it."""
        return self.tokenizer.id_to_token(token) or ""


def _most_chars_per_token(tokenizer: Tokenizer, decoding: Decoding) -> int | None:
    """Characters that one token can stand for; None where an unknown word of any length is one."""
    if isinstance(decoding, WindowDecoding):
        return None
    longest = max(map(len, tokenizer.get_vocab(with_added_tokens=True)), default=1)
    return _NORMALIZED_SHRINK * longest


def _chat_template(
    sources: dict[str, str], special: dict[str, str], place: Path
) -> ChatTemplate | None:
    if not sources:
        return None
    try:
        return ChatTemplate(sources, special)
    except ModelError as error:
        raise ModelError(f"{place}: {error.message}", hint=error.hint) from error


@contextlib.contextmanager
def _as_transformers_writes(file: Path) -> Iterator[None]:
    """What is read from JSON that has another shape is the file's fault: raises ModelError."""
    try:
        yield
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        words = f"{type(error).__name__}: {error}"
        raise ModelError(
            f"{file}: not as transformers writes it ({words})",
            hint="save the tokenizer again with tokenizer.save_pretrained",
        ) from error


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object; an empty one where there is no file: all of these may be left out."""
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read as JSON: {unreadable(error)}") from error
    if not isinstance(data, dict):
        raise ModelError(f"{path}: a JSON object is expected")
    return data


def _load_tokenizer(path: Path) -> Tokenizer:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ModelError(
            f"{path}: no such file",
            hint="the model needs a fast tokenizer: save it with tokenizer.save_pretrained",
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: cannot be read: {unreadable(error)}") from error
    try:
        return Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing narrower
        raise ModelError(f"{path}: not a tokenizer: {error}") from error


def _token_text(value: object) -> str | None:
    """A special token is written as a string, or as an object with its `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _special_tokens(path: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Name to text, such as `bos_token`: the variables that templates know."""
    found: dict[str, str] = {}
    older = _read_json(path / "special_tokens_map.json")
    for name, value in {**older, **settings}.items():
        text = _token_text(value) if name.endswith("_token") else None
        if text is not None:
            found[name] = text
    return found


def _added_token(spec: dict[str, Any]) -> AddedToken:
    flags = {
        name: bool(spec[name])
        for name in ("lstrip", "rstrip", "single_word", "normalized", "special")
        if name in spec
    }
    return AddedToken(str(spec.get("content", "")), **flags)


def _add_missing_tokens(
    tokenizer: Tokenizer, settings: dict[str, Any], special: dict[str, str]
) -> None:
    """Tokens that only tokenizer_config.json has, as older checkpoints do."""
    listed = settings.get("added_tokens_decoder", {})
    for _, spec in sorted(listed.items(), key=lambda item: int(item[0])):
        if tokenizer.token_to_id(spec["content"]) is None:
            tokenizer.add_tokens([_added_token(spec)])
    for text in special.values():
        if tokenizer.token_to_id(text) is not None:
            tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False)])


def _template_sources(
    path: Path, settings: dict[str, Any], override: Path | None
) -> dict[str, str]:
    """Templates by name: the file given, else chat_template.jinja, else the configuration's."""
    if override is not None:
        return {"default": _read_template(override)}
    own = settings.get("chat_template")
    sources: dict[str, str] = {}
    if isinstance(own, str):
        sources["default"] = own
    elif isinstance(own, list):
        sources = {str(entry["name"]): str(entry["template"]) for entry in own}
    if (path / "chat_template.jinja").exists():
        sources = {"default": _read_template(path / "chat_template.jinja")}
        for extra in sorted((path / "additional_chat_templates").glob("*.jinja")):
            sources[extra.stem] = _read_template(extra)
    return sources


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ModelError(f"{path}: no such chat template") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: cannot be read: {unreadable(error)}") from error


def _ids(value: object) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [item for item in values if isinstance(item, int) and not isinstance(item, bool)]


def _eos_ids(
    tokenizer: Tokenizer,
    special: dict[str, str],
    generation: dict[str, Any],
    config: dict[str, Any],
) -> tuple[int, ...]:
    """The generation configuration's, else the model's; and the tokenizer's in any case."""
    source = generation if "eos_token_id" in generation else config
    found = _ids(source.get("eos_token_id"))
    own = tokenizer.token_to_id(special["eos_token"]) if "eos_token" in special else None
    if own is not None:
        found.append(own)
    return tuple(dict.fromkeys(found))


_DEFAULT_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 1e6),
    "top_p": (0.0, 1.0),
    "top_k": (-1, 2**31),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-6, 10.0),
}


def _sampling_defaults(generation: dict[str, Any], file: Path) -> SamplingDefaults:
    """The model's recommendation. Raises ModelError for one that no request could ask for."""
    known: dict[str, Any] = {}
    for name, (least, most) in _DEFAULT_RANGES.items():
        value = generation.get(name)
        if value is None:
            continue
        kinds = (int,) if name == "top_k" else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= most:
            raise ModelError(
                f"{file}: {name} is {value!r}, which is not from {least:g} to {most:g}",
                hint="mend it, or remove it: then OpenAI's default holds",
            )
        known[name] = value
    return SamplingDefaults(**known)


def _vocab_size(config: dict[str, Any]) -> int | None:
    size = config.get("vocab_size")
    return size if isinstance(size, int) and size > 0 else None
