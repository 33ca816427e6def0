"""One choice of an answer as its tokens come: text, stop strings, log probabilities; pure.

Invariants: text that may still turn out to be part of a stop string is not given out; nor is a
part of a character. A token's log probabilities are given out with the first of its text, and
never where its text is cut off. What `take` has given out is never changed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from flexslurm.errors import (
    ContextTooLong,
    GenerationFailed,
    NotServing,
    Overloaded,
    RequestAborted,
    RequestError,
)
from flexslurm.gateway.detokenize import Detokenizer
from flexslurm.gateway.stops import Match, StopMatcher
from flexslurm.messages import FinishReason, TokenEvent, TokenLogprobs

_ERRORS: dict[str | None, type[RequestError]] = {
    kind.code: kind
    for kind in (ContextTooLong, Overloaded, NotServing, RequestAborted, GenerationFailed)
}


def error_of(event: TokenEvent) -> RequestError:
    """The error that an event of a sequence that failed stands for."""
    usual = RequestAborted if event.finish is FinishReason.ABORT else GenerationFailed
    kind = _ERRORS.get(event.code, usual)
    return kind(event.error or "the request was ended before it finished")


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token with its log probabilities and where its text begins in the choice's text."""

    token: int
    offset: int
    logprobs: TokenLogprobs


@dataclass(slots=True)
class ChoiceDelta:
    """What is new of a choice since the last look."""

    text: str = ""
    scored: list[ScoredToken] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class EndRules:
    """How a choice ends, beyond what the generator sees to."""

    stop_strings: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    """The request's own and the end-of-sequence tokens."""
    told_token_ids: frozenset[int] = frozenset()
    """Those that `stop_reason` names: the request's own."""
    min_tokens: int = 0
    include_stop: bool = False


class Choice:
    """Takes the events of one sequence; `take` gives what is new."""

    __slots__ = (
        "_detokenizer",
        "_fresh",
        "_given",
        "_held",
        "_matcher",
        "_rules",
        "_scored",
        "_seen",
        "_tokens",
        "completion_tokens",
        "error",
        "finish_reason",
        "index",
        "must_abort",
        "stop_reason",
    )

    def __init__(self, index: int, detokenizer: Detokenizer, rules: EndRules) -> None:
        self.index = index
        self.completion_tokens = 0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error: RequestError | None = None
        self.must_abort = False
        """A stop string was seen while the generator still runs the sequence."""
        self._detokenizer = detokenizer
        self._rules = rules
        self._matcher = StopMatcher(rules.stop_strings) if rules.stop_strings else None
        self._held = ""
        """Text that is known but may be the beginning of a stop string."""
        self._seen = 0
        """Characters known; those given out or ready are `_seen - len(_held)`."""
        self._given = 0
        self._fresh: list[str] = []
        self._scored: deque[ScoredToken] = deque()
        self._tokens: list[int] = []

    @property
    def ended(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    def push(self, event: TokenEvent) -> bool:
        """Take the next event; whether it ended the choice. Events after the end are ignored."""
        if self.ended:
            return False
        if event.token is not None:
            self._push_token(event.token, event.logprobs, event.finish)
        if event.finish is not None and self.finish_reason is None:
            self._end(event.finish, event)
        return self.ended

    def take(self) -> ChoiceDelta:
        """What is new and certain. After the end: all the rest."""
        piece = ChoiceDelta("".join(self._fresh), tokens=self._tokens)
        self._fresh.clear()
        self._tokens = []
        self._given += len(piece.text)
        while self._scored and (self._scored[0].offset < self._given or self.ended):
            piece.scored.append(self._scored.popleft())
        return piece

    @property
    def has_news(self) -> bool:
        return bool(self._fresh) or self.ended

    def _push_token(
        self, token: int, logprobs: TokenLogprobs | None, finish: FinishReason | None
    ) -> None:
        self.completion_tokens += 1
        self._tokens.append(token)
        if finish is FinishReason.STOP and token in self._rules.stop_token_ids:
            if token in self._rules.told_token_ids:
                self.stop_reason = token
            if not self._rules.include_stop:
                return
        if logprobs is not None:
            self._scored.append(ScoredToken(token, self._seen, logprobs))
        self._add(self._detokenizer.push(token), finish)

    def _add(self, text: str, finish: FinishReason | None) -> None:
        if not text:
            return
        self._seen += len(text)
        if self._matcher is None:
            self._fresh.append(text)
            return
        text = self._held + text
        if self.completion_tokens > self._rules.min_tokens:
            match = self._matcher.feed(text[len(self._held) :])
            if match is not None:
                self._stop_at(match, text, finish)
                return
        else:
            self._matcher.skip(len(text))
        ready = len(text) - self._matcher.held
        if ready:
            self._fresh.append(text[:ready])
        self._held = text[ready:]

    def _stop_at(self, match: Match, text: str, finish: FinishReason | None) -> None:
        """Cut at the match; `text` is what was not given out before, `_seen` its end."""
        cut = match.end if self._rules.include_stop else match.begin
        keep = cut - (self._seen - len(text))
        assert keep >= 0, "a part of a stop string was given out"
        self._fresh.append(text[:keep])
        self._held = ""
        while self._scored and self._scored[-1].offset >= cut:
            self._scored.pop()
        self.finish_reason = FinishReason.STOP.value
        self.stop_reason = match.stop
        self.must_abort = finish is None

    def _end(self, finish: FinishReason, event: TokenEvent) -> None:
        if finish in (FinishReason.ABORT, FinishReason.ERROR):
            self.error = error_of(event)
        else:
            self._add(self._detokenizer.finish(), finish)
        if self.ended:
            return
        if self._held:
            self._fresh.append(self._held)
            self._held = ""
        self.finish_reason = finish.value
