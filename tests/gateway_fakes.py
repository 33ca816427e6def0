"""Tokenizers, a generator and a running server for tests of the gateway.

`FakeGenerator` passes the same contract suite as the real one (tests/contract).
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import openai
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from flexslurm.errors import ContextTooLong, RequestError
from flexslurm.gateway.api import create_app
from flexslurm.gateway.card import Bounds, ModelCard
from flexslurm.gateway.chat_template import ChatTemplate
from flexslurm.gateway.metrics import Metrics
from flexslurm.gateway.port import ServedLimits, Serving
from flexslurm.gateway.server import GatewayServer
from flexslurm.gateway.text import TextModel
from flexslurm.messages import FinishReason, SequenceRequest, TokenEvent, TokenLogprobs

MODEL = "small"
USER = [{"role": "user", "content": "hi"}]
SAID = "a stream of naïve text, 🎉 to the END of it"
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "a stream of tokens is a stream of text, and no stream is broken",
    "Größe, naïve, façade, Ærø: letters of more than one byte",
    "STOP here, or go on to the END of it",
]


class ScriptedDetokenizer:
    """Its tokens are indices into a list of texts."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = texts

    def prime(self, context: object) -> None: ...

    def push(self, token: int) -> str:
        return self.texts[token]

    def finish(self) -> str:
        return ""


def byte_level_tokenizer() -> Tokenizer:
    """A small byte-level BPE, trained here: 256 bytes, some merges, three special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|bos|>", "<|start|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def metaspace_tokenizer(*, strip: bool = True) -> Tokenizer:
    """SentencePiece's manner, as Llama 2 has it: `▁` for spaces, bytes where letters lack."""
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)] + list(".,!?A▁")
    words = ["▁the", "▁a", "th", "▁t", "he", "▁▁", "ing", "é"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *letters, *words]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    merges = [("▁", "t"), ("▁", "a"), ("t", "h"), ("h", "e"), ("▁t", "he"), ("▁", "▁")]
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    stages = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(stages + [decoders.Strip(" ", 1, 0)] * strip)
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<unk>", "<s>", "</s>")])
    return tokenizer


def word_tokenizer() -> Tokenizer:
    """WordPiece: a decoder that neither of the exact ways knows."""
    pieces = ["[UNK]", "[SEP]", "the", "stream", "##s", "##ing", "flow", ".", "a", "don", "'", "t"]
    tokenizer = Tokenizer(models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("[UNK]", "[SEP]")])
    return tokenizer


@functools.cache
def small_text() -> TextModel:
    """The byte-level tokenizer with a chat template; `<|end|>` ends a sequence."""
    tokenizer = byte_level_tokenizer()
    return TextModel(
        tokenizer,
        eos_ids=(tokenizer.token_to_id("<|end|>"),),
        chat_template=ChatTemplate({"default": TEMPLATE}, {"eos_token": "<|end|>"}),
    )


# -------------------------------------------------------------------------------- the generator

Answer = Callable[[SequenceRequest, int], int]
"""The token at a position of a sequence's answer."""


def says(text: str, *, model: TextModel | None = None) -> Answer:
    """This text, then the end-of-sequence token, whatever is asked."""
    model = model or small_text()
    tokens = [*model.encode(text, add_special_tokens=False), model.eos_ids[0]]
    return lambda request, position: tokens[min(position, len(tokens) - 1)]


class _Stream:
    """Events of one request, in the order they came."""

    def __init__(self, generator: FakeGenerator, open_ids: set[str]) -> None:
        self.events: deque[TokenEvent] = deque()
        self.open_ids = open_ids
        self.changed = asyncio.Event()
        self._generator = generator

    def __aiter__(self) -> _Stream:
        return self

    async def __anext__(self) -> TokenEvent:
        while not self.events:
            if not self.open_ids:
                raise StopAsyncIteration
            self.changed.clear()
            await self.changed.wait()
        return self.events.popleft()

    async def aclose(self) -> None:
        self.events.clear()
        self._generator.abort(sorted(self.open_ids))


class _Live:
    def __init__(self, request: SequenceRequest, stream: _Stream) -> None:
        self.request = request
        self.stream = stream
        self.position = 0


def _check_bounded(request: SequenceRequest) -> None:
    """What workers rely on: it can be sent, and no number indexes beyond the vocabulary."""
    msgspec.msgpack.encode(request)
    vocab = small_text().vocab_size
    assert 0 <= request.sampling.top_k <= vocab, request.sampling
    assert all(0 <= token < vocab for token in request.sampling.logit_bias or ())
    assert all(0 <= token < vocab for token in request.stop.stop_token_ids)


class FakeGenerator:
    """Gives each running sequence one token a step; steps by itself unless `manual`."""

    def __init__(
        self,
        answer: Answer,
        *,
        context: int | None = 256,
        model_context: int = 1024,
        manual: bool = False,
        step_s: float = 0.0,
    ) -> None:
        self.answer = answer
        self.context = context
        self.model_context = model_context
        self.manual = manual
        self.step_s = step_s
        self.state, self.reason = "serving", "as ever"
        self.held = False
        """Sequences are accepted and wait, as they do for GPUs."""
        self.refuse: RequestError | None = None
        self.fail_at: tuple[int, FinishReason, str, str | None] | None = None
        """(position, how, words, code): every sequence fails when it gets there."""
        self.live: dict[str, _Live] = {}
        self.requests: list[SequenceRequest] = []
        self.aborted: list[str] = []
        self.given: Counter[str] = Counter()
        """Tokens given to each sequence."""
        self._ticking = False

    # -- Generator

    def submit(self, requests: Sequence[SequenceRequest]) -> AsyncIterator[TokenEvent]:
        if self.refuse is not None:
            raise self.refuse
        for request in requests:
            _check_bounded(request)
            limit = self.model_context if self.context is None else self.context
            if len(request.prompt) + request.stop.max_tokens > limit:
                raise ContextTooLong(f"more than {limit} tokens")
        stream = _Stream(self, {request.seq_id for request in requests})
        for request in requests:
            assert request.seq_id not in self.live
            self.live[request.seq_id] = _Live(request, stream)
        self.requests += requests
        self._schedule()
        return stream

    def abort(self, seq_ids: Sequence[str]) -> None:
        for seq_id in seq_ids:
            live = self.live.pop(seq_id, None)
            if live is not None:
                self.aborted.append(seq_id)
                live.stream.events = deque(e for e in live.stream.events if e.seq_id != seq_id)
                live.stream.open_ids.discard(seq_id)
                live.stream.changed.set()

    def limits(self) -> ServedLimits:
        return ServedLimits(self.context, self.model_context)

    def serving(self) -> Serving:
        running = 0 if self.held else len(self.live)
        return Serving(
            state=self.state,
            epoch=3,
            running=running,
            waiting=len(self.live) - running,
            kv_used=0.25,
            replicas=1,
            gpus=2,
            reason=self.reason,
        )

    # -- for tests

    def hold(self, held: bool = True) -> None:
        self.held = held
        self._schedule()

    def step(self) -> None:
        if self.held:
            return
        for live in list(self.live.values()):
            self._advance(live)

    def _advance(self, live: _Live) -> None:
        request, position = live.request, live.position
        if self.fail_at is not None and position == self.fail_at[0]:
            _, finish, words, code = self.fail_at
            self._emit(live, None, finish, error=words, code=code)
            return
        token = self.answer(request, position)
        live.position += 1
        self.given[request.seq_id] += 1
        finish = None
        if token in request.stop.stop_token_ids and live.position > request.stop.min_tokens:
            finish = FinishReason.STOP
        elif live.position == request.stop.max_tokens:
            finish = FinishReason.LENGTH
        self._emit(live, token, finish)

    def _emit(
        self, live: _Live, token: int | None, finish: FinishReason | None, **more: Any
    ) -> None:
        request = live.request
        wanted = request.sampling.logprobs
        logprobs = None
        if token is not None and wanted >= 0:
            others = [(token + 1 + i, -1.0 - i) for i in range(wanted - 1)]
            logprobs = TokenLogprobs(-0.5, ((token, -0.5), *others)[:wanted])
        position = live.position - 1 if token is not None else live.position
        live.stream.events.append(
            TokenEvent(
                seq_id=request.seq_id,
                token=token,
                position=position,
                logprobs=logprobs,
                finish=finish,
                **more,
            )
        )
        if finish is not None:
            del self.live[request.seq_id]
            live.stream.open_ids.discard(request.seq_id)
        live.stream.changed.set()

    def _schedule(self) -> None:
        if not self.manual and not self._ticking and self.live and not self.held:
            self._ticking = True
            asyncio.get_running_loop().call_later(self.step_s, self._tick)

    def _tick(self) -> None:
        self._ticking = False
        self.step()
        self._schedule()


# ----------------------------------------------------------------------------------- the server


class Running:
    """A gateway that listens, its generator, and a client for it."""

    def __init__(
        self,
        generator: FakeGenerator,
        server: GatewayServer,
        client: openai.AsyncOpenAI,
        metrics: Metrics,
    ) -> None:
        self.generator = generator
        self.server = server
        self.client = client
        self.metrics = metrics
        self.url = f"http://127.0.0.1:{server.port}"

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for what other tasks will bring about; fails after a minute."""
        end = time.monotonic() + 60.0
        while not condition():
            assert time.monotonic() < end, f"never: {what}"
            await asyncio.sleep(0.005)


@asynccontextmanager
async def gateway(
    generator: FakeGenerator,
    *,
    text: TextModel | None = None,
    keys: frozenset[str] = frozenset(),
    extra_status: Callable[[], dict[str, Any]] | None = None,
    bounds: Bounds | None = None,
) -> AsyncIterator[Running]:
    metrics = Metrics(MODEL)
    card = ModelCard(MODEL, "/nowhere", generator.model_context, created=1_700_000_000)
    app = create_app(
        generator, card, text or small_text(), metrics, keys, extra_status, bounds=bounds
    )
    server = await GatewayServer.start(app, "127.0.0.1", 0)
    key = next(iter(keys), "unused")
    try:
        async with openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{server.port}/v1", api_key=key, max_retries=0, timeout=200
        ) as client:
            yield Running(generator, server, client, metrics)
    finally:
        await server.stop(grace_s=0.0)


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an asynchronous test in a loop of its own, with a deadline."""

    @functools.wraps(test)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(120):
                await test(*args, **kwargs)

        asyncio.run(bounded())

    return wrapper
