"""The demo's clients: streams over HTTP as any application would open them, with their timing."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPConnection, HTTPException
from typing import Any
from urllib.parse import urlsplit

_TIMEOUT_S = 120.0


@dataclass(slots=True)
class StreamRun:
    """One streamed answer. `times` are seconds on the monotonic clock, one a token."""

    body: dict[str, Any]
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    text: str = ""
    finish: str | None = None
    error: str = ""
    enough: bool = False
    """Set from outside: nothing more is read, and the connection is closed."""

    @property
    def longest_gap_s(self) -> float:
        gaps = (b - a for a, b in zip(self.times, self.times[1:], strict=False))
        return max(gaps, default=0.0)


def open_streams(
    endpoint: str,
    bodies: Sequence[dict[str, Any]],
    on_text: Callable[[int, str], None] | None = None,
) -> tuple[list[StreamRun], list[threading.Thread]]:
    """Start all streams at once, each on a thread; the runs fill while they go on."""
    runs = [StreamRun(body) for body in bodies]
    threads = [
        threading.Thread(
            target=stream, args=(endpoint, run, partial(_say, on_text, number)), daemon=True
        )
        for number, run in enumerate(runs)
    ]
    for thread in threads:
        thread.start()
    return runs, threads


def _say(on_text: Callable[[int, str], None] | None, number: int, text: str) -> None:
    if on_text is not None:
        on_text(number, text)


def stream(
    endpoint: str,
    run: StreamRun,
    on_text: Callable[[str], None] = lambda text: None,
    path: str = "/v1/chat/completions",
) -> None:
    """Read one answer to its end; what goes wrong is in `run.error`, and raises nothing."""
    parts = urlsplit(endpoint)
    connection = HTTPConnection(parts.hostname or "", parts.port or 80, timeout=_TIMEOUT_S)
    try:
        connection.request(
            "POST",
            path,
            json.dumps({**run.body, "stream": True, "return_token_ids": True}),
            {"Content-Type": "application/json"},
        )
        response = connection.getresponse()
        if response.status != 200:
            run.error = response.read().decode(errors="replace")
            return
        for line in response:
            if run.enough:
                break
            if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                _take(run, json.loads(line[6:]), on_text)
    except (OSError, HTTPException, ValueError) as error:
        run.error = f"{type(error).__name__}: {error}"
    finally:
        connection.close()


def _take(run: StreamRun, chunk: dict[str, Any], on_text: Callable[[str], None]) -> None:
    if "error" in chunk:
        run.error = str(chunk["error"].get("message", chunk["error"]))
    for choice in chunk.get("choices", ()):
        now = time.monotonic()
        tokens = choice.get("token_ids") or []
        run.tokens += tokens
        run.times += [now] * len(tokens)
        text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
        run.text += text
        run.finish = choice.get("finish_reason") or run.finish
        if text:
            on_text(text)


def questions(model: str, count: int, max_tokens: int) -> list[dict[str, Any]]:
    """Chat requests of different kinds: every other one is sampled, with a seed."""
    prompts = (
        "Explain how a computer boots, step by step.",
        "Write a short story about a lighthouse keeper.",
        "List reasons to learn to cook at home.",
        "Describe the water cycle to a child.",
        "How do bees find their way home?",
        "Give advice to someone who starts a garden.",
        "Tell the history of the bicycle.",
        "What should a traveller pack for a week in the mountains?",
    )
    return [
        {
            "model": model,
            "messages": [{"role": "user", "content": prompts[i % len(prompts)]}],
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "temperature": 0.0 if i % 2 == 0 else 0.8,
            "seed": 1000 + i,
        }
        for i in range(count)
    ]
