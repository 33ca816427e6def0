"""Choices to the bytes of an answer, whole or in chunks, in both APIs' forms; never waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from flexslurm.gateway import responses as out
from flexslurm.gateway.choice import Choice, ChoiceDelta, ScoredToken
from flexslurm.gateway.text import TextModel
from flexslurm.gateway.translate import GenerationPlan

# JSON has no infinity; this is what other servers write for an impossible token.
LEAST_LOGPROB = -9999.0


@dataclass(frozen=True, slots=True)
class AnswerSettings:
    """What all chunks of an answer have in common."""

    plan: GenerationPlan
    model: str
    created: int
    text: TextModel
    logprobs: int = -1
    token_ids: bool = False
    tokens_as_ids: bool = False
    include_usage: bool = False
    continuous_usage: bool = False

    def usage(self, choices: Sequence[Choice]) -> out.Usage:
        return out.usage_of(self.plan.prompt_tokens, sum(c.completion_tokens for c in choices))

    def token_text(self, token: int) -> str:
        if self.tokens_as_ids:
            return f"token_id:{token}"
        return self.text.token_bytes(token).decode("utf-8", "replace")


class Form(Protocol):
    """How one of the two APIs writes an answer."""

    def chunk(self, choice: Choice, piece: ChoiceDelta, choices: Sequence[Choice]) -> bytes:
        """The server-sent events for what is new of a choice; empty if nothing is to be said."""
        ...

    def closing(self, choices: Sequence[Choice]) -> bytes:
        """The events after the last choice has ended."""
        ...

    def whole(self, choices: Sequence[Choice]) -> bytes:
        """The answer that is not streamed, all choices ended."""
        ...


def _is_news(settings: AnswerSettings, choice: Choice, piece: ChoiceDelta) -> bool:
    return bool(piece.text or piece.scored or choice.ended or (settings.token_ids and piece.tokens))


def _chunk_usage(
    settings: AnswerSettings, choices: Sequence[Choice]
) -> out.Usage | msgspec.UnsetType | None:
    if settings.continuous_usage:
        return settings.usage(choices)
    return None if settings.include_usage else msgspec.UNSET


def _ids(settings: AnswerSettings, tokens: list[int]) -> list[int] | msgspec.UnsetType:
    return tokens if settings.token_ids else msgspec.UNSET


# -------------------------------------------------------------------------------------- chat


class ChatForm:
    """Chat completions; the first chunk of a choice names the role."""

    def __init__(self, settings: AnswerSettings) -> None:
        self._settings = settings
        self._id = f"chatcmpl-{settings.plan.request_id}"
        self._begun: set[int] = set()

    def chunk(self, choice: Choice, piece: ChoiceDelta, choices: Sequence[Choice]) -> bytes:
        settings = self._settings
        if not _is_news(settings, choice, piece):
            return b""
        opening = b""
        if choice.index not in self._begun:
            self._begun.add(choice.index)
            opening = self._opening(choice, choices)
        delta = out.DeltaChoice(
            index=choice.index,
            delta=out.Delta(content=piece.text or None),
            logprobs=self._logprobs(piece.scored),
            finish_reason=choice.finish_reason,
            token_ids=_ids(settings, piece.tokens),
        )
        if choice.finish_reason is not None:
            delta.stop_reason = choice.stop_reason
        return opening + out.sse(self._envelope([delta], _chunk_usage(settings, choices)))

    def closing(self, choices: Sequence[Choice]) -> bytes:
        if not self._settings.include_usage:
            return out.DONE
        return out.sse(self._envelope([], self._settings.usage(choices))) + out.DONE

    def whole(self, choices: Sequence[Choice]) -> bytes:
        settings = self._settings
        done: list[out.ChatChoice] = []
        for choice in choices:
            piece = choice.take()
            done.append(
                out.ChatChoice(
                    index=choice.index,
                    message=out.ChatMessageOut(content=piece.text),
                    logprobs=self._logprobs(piece.scored),
                    finish_reason=choice.finish_reason,
                    stop_reason=choice.stop_reason,
                    token_ids=_ids(settings, piece.tokens),
                )
            )
        return out.encode(
            out.ChatCompletion(
                id=self._id,
                created=settings.created,
                model=settings.model,
                choices=done,
                usage=settings.usage(choices),
                prompt_token_ids=_ids(settings, list(settings.plan.prompts[0])),
            )
        )

    def _opening(self, choice: Choice, choices: Sequence[Choice]) -> bytes:
        role = out.DeltaChoice(index=choice.index, delta=out.Delta(role="assistant", content=""))
        chunk = self._envelope([role], _chunk_usage(self._settings, choices))
        if len(self._begun) == 1:
            chunk.prompt_token_ids = _ids(self._settings, list(self._settings.plan.prompts[0]))
        return out.sse(chunk)

    def _envelope(
        self, choices: list[out.DeltaChoice], usage: out.Usage | msgspec.UnsetType | None
    ) -> out.ChatChunk:
        return out.ChatChunk(
            id=self._id,
            created=self._settings.created,
            model=self._settings.model,
            choices=choices,
            usage=usage,
        )

    def _logprobs(self, scored: list[ScoredToken]) -> out.ChatLogprobs | None:
        if self._settings.logprobs < 0:
            return None
        return out.ChatLogprobs([self._scored_token(item) for item in scored])

    def _scored_token(self, item: ScoredToken) -> out.TokenLogprob:
        best = [
            self._top(token, logprob)
            for token, logprob in item.logprobs.top[: self._settings.logprobs]
        ]
        name, data = self._token(item.token)
        return out.TokenLogprob(name, _finite(item.logprobs.logprob), data, best)

    def _top(self, token: int, logprob: float) -> out.TopLogprob:
        name, data = self._token(token)
        return out.TopLogprob(name, _finite(logprob), data)

    def _token(self, token: int) -> tuple[str, list[int]]:
        return self._settings.token_text(token), list(self._settings.text.token_bytes(token))


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


# ------------------------------------------------------------------------------- completions


class TextForm:
    """Text completions; `echo` has one text per prompt, to stand before its choices' texts."""

    def __init__(self, settings: AnswerSettings, echo: Sequence[str] | None = None) -> None:
        self._settings = settings
        self._id = f"cmpl-{settings.plan.request_id}"
        self._echo = echo
        self._begun: set[int] = set()

    def chunk(self, choice: Choice, piece: ChoiceDelta, choices: Sequence[Choice]) -> bytes:
        settings = self._settings
        if not _is_news(settings, choice, piece):
            return b""
        entry = self._choice(choice, piece, first=choice.index not in self._begun)
        self._begun.add(choice.index)
        return out.sse(self._envelope([entry], _chunk_usage(settings, choices)))

    def closing(self, choices: Sequence[Choice]) -> bytes:
        if not self._settings.include_usage:
            return out.DONE
        return out.sse(self._envelope([], self._settings.usage(choices))) + out.DONE

    def whole(self, choices: Sequence[Choice]) -> bytes:
        done = [self._choice(choice, choice.take(), first=True) for choice in choices]
        return out.encode(self._envelope(done, self._settings.usage(choices)))

    def _choice(self, choice: Choice, piece: ChoiceDelta, *, first: bool) -> out.TextChoice:
        prompt_index = choice.index // self._settings.plan.n
        echo = self._echo[prompt_index] if self._echo is not None else ""
        entry = out.TextChoice(
            index=choice.index,
            text=(echo if first else "") + piece.text,
            logprobs=self._logprobs(piece.scored, len(echo)),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            token_ids=_ids(self._settings, piece.tokens),
        )
        if first:
            prompt = self._settings.plan.prompts[prompt_index]
            entry.prompt_token_ids = _ids(self._settings, list(prompt))
        return entry

    def _envelope(
        self, choices: list[out.TextChoice], usage: out.Usage | msgspec.UnsetType | None
    ) -> out.TextCompletion:
        return out.TextCompletion(
            id=self._id,
            created=self._settings.created,
            model=self._settings.model,
            choices=choices,
            usage=usage,
        )

    def _logprobs(self, scored: list[ScoredToken], base: int) -> out.TextLogprobs | None:
        settings = self._settings
        if settings.logprobs < 0:
            return None
        return out.TextLogprobs(
            text_offset=[base + item.offset for item in scored],
            token_logprobs=[_finite(item.logprobs.logprob) for item in scored],
            tokens=[settings.token_text(item.token) for item in scored],
            top_logprobs=[self._best(item) for item in scored],
        )

    def _best(self, item: ScoredToken) -> dict[str, float]:
        """The n best and, whether among them or not, the chosen one."""
        settings = self._settings
        best = item.logprobs.top[: settings.logprobs]
        found: dict[str, float] = {}
        for token, logprob in best:  # two tokens may look alike: the better one stays
            found.setdefault(settings.token_text(token), _finite(logprob))
        found.setdefault(settings.token_text(item.token), _finite(item.logprobs.logprob))
        return found
