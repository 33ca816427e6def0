"""The OpenAI-compatible API as a FastAPI application; knows requests and text, never GPUs."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
from fastapi import APIRouter, FastAPI, Request
from fastapi.routing import APIRoute
from starlette.responses import Response

import flexslurm
from flexslurm.errors import ContextTooLong, InvalidRequest, UnknownModel
from flexslurm.gateway import problems, translate
from flexslurm.gateway import responses as out
from flexslurm.gateway.answers import AnswerSettings, ChatForm, Form, TextForm
from flexslurm.gateway.card import Bounds, ModelCard
from flexslurm.gateway.choice import Choice, EndRules
from flexslurm.gateway.guard import REQUEST_ID, Gate, KeyRing
from flexslurm.gateway.metrics import Metrics
from flexslurm.gateway.node_metrics import joined, node_page
from flexslurm.gateway.port import Generator
from flexslurm.gateway.schemas import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    Prompt,
    TokenizeBody,
)
from flexslurm.gateway.streaming import Answer, Lifecycle, Session
from flexslurm.gateway.text import TextModel
from flexslurm.gateway.translate import GenerationPlan, Tokens
from flexslurm.messages import ServiceState

READY_STATES = frozenset({ServiceState.SERVING, ServiceState.SHIFTING})


def create_app(
    generator: Generator,
    model: ModelCard,
    text: TextModel,
    metrics: Metrics,
    api_keys: frozenset[str] = frozenset(),
    extra_status: Callable[[], dict[str, Any]] | None = None,
    *,
    bounds: Bounds | None = None,
) -> FastAPI:
    """The application; `extra_status` adds to the body of /health. No keys: open to all."""
    if not model.created:
        model = msgspec.structs.replace(model, created=int(time.time()))
    gateway = Gateway(generator, model, text, metrics, bounds or Bounds())
    app = FastAPI(title="flexslurm", version=flexslurm.__version__, docs_url=None, redoc_url=None)
    app.state.lifecycle = gateway.lifecycle
    router = APIRouter()
    _add_generation_routes(router, gateway)
    _add_model_routes(router, gateway)
    _add_service_routes(router, gateway, extra_status)
    app.include_router(router)
    problems.install(app)
    metrics.watch(generator.serving)
    app.add_middleware(
        Gate,
        keys=KeyRing(api_keys),
        body_bytes=gateway.bounds.body_bytes,
        counter=metrics,
        known_paths=[
            route.path
            for route in router.routes
            if isinstance(route, APIRoute) and "{" not in route.path
        ],
    )
    return app


class Gateway:
    """What the routes share."""

    def __init__(
        self,
        generator: Generator,
        model: ModelCard,
        text: TextModel,
        metrics: Metrics,
        bounds: Bounds,
    ) -> None:
        self.generator = generator
        self.model = model
        self.text = text
        self.metrics = metrics
        self.bounds = bounds
        self.lifecycle = Lifecycle()

    async def encode(self, text: str, param: str, *, add_special_tokens: bool) -> list[int]:
        """Long texts in a thread: the tokenizer lets go of the interpreter meanwhile.

        Raises ContextTooLong, without tokenizing it, for a text that cannot fit.
        """
        fewest, context = self.text.fewest_tokens(text), self.context()
        if fewest > context:
            raise ContextTooLong(
                f"the text's {len(text)} characters are at least {fewest} tokens; "
                f"at most {context} are taken",
                param=param,
            )
        if len(text) <= self.bounds.inline_chars:
            return self.text.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(
            self.text.encode, text, add_special_tokens=add_special_tokens
        )

    async def completion(self, request_id: str, body: CompletionBody) -> Response:
        translate.check_model_name(body.model, self.model)
        translate.check_completion(body, self.bounds)
        add_special = body.add_special_tokens is not False
        prompts = [await self._prompt_tokens(p, add_special) for p in body.prompt]
        plan = self._plan(request_id, body, prompts)
        echo = [self._echo(p, t) for p, t in zip(body.prompt, prompts, strict=True)]
        form = TextForm(self._settings(plan, body), echo if body.echo else None)
        choices = self._choices(plan, body, in_context=True)
        if body.max_tokens == 0:  # with echo: nothing is generated
            return _nothing_more(body, form, choices)
        return self._answer(plan, body, form, choices)

    async def chat(self, request_id: str, body: ChatBody) -> Response:
        translate.check_model_name(body.model, self.model)
        translate.check_chat(body, self.bounds)
        rendered = translate.render_chat(
            self.text,
            body.messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            documents=body.documents,
            variables=body.chat_template_kwargs,
        )
        tokens = await self.encode(
            rendered, "messages", add_special_tokens=body.add_special_tokens is True
        )
        prompt = translate.check_prompt(tokens, self.text, "messages")
        plan = self._plan(request_id, body, [prompt])
        choices = self._choices(plan, body, in_context=body.continue_final_message)
        return self._answer(plan, body, ChatForm(self._settings(plan, body)), choices)

    async def _prompt_tokens(self, prompt: Prompt, add_special_tokens: bool) -> Tokens:
        tokens: Sequence[int] = (
            prompt
            if isinstance(prompt, tuple)
            else await self.encode(prompt, "prompt", add_special_tokens=add_special_tokens)
        )
        return translate.check_prompt(tokens, self.text, "prompt")

    def _echo(self, prompt: Prompt, tokens: Tokens) -> str:
        return prompt if isinstance(prompt, str) else self.text.decode(tokens)

    def _plan(
        self, request_id: str, body: GenerationBody, prompts: Sequence[Tokens]
    ) -> GenerationPlan:
        return translate.plan_request(
            body,
            prompts,
            request_id=request_id,
            text=self.text,
            limits=self.generator.limits(),
            random_seed=lambda: secrets.randbits(63),
        )

    def _settings(self, plan: GenerationPlan, body: GenerationBody) -> AnswerSettings:
        options = body.stream_options
        return AnswerSettings(
            plan=plan,
            model=self.model.name,
            created=int(time.time()),
            text=self.text,
            logprobs=translate.wanted_logprobs(body),
            token_ids=bool(body.return_token_ids),
            tokens_as_ids=bool(body.return_tokens_as_token_ids),
            include_usage=options is not None and options.include_usage,
            continuous_usage=options is not None and options.continuous_usage_stats,
        )

    def _choices(
        self, plan: GenerationPlan, body: GenerationBody, *, in_context: bool
    ) -> list[Choice]:
        """`in_context`: the text goes on from the prompt's, else it stands by itself."""
        rules = EndRules(
            stop_strings=tuple(body.stop),
            told_token_ids=frozenset(body.stop_token_ids or ()),
            min_tokens=body.min_tokens or 0,
            include_stop=body.include_stop_str_in_output,
        )
        choices: list[Choice] = []
        for index, sequence in enumerate(plan.sequences):
            detokenizer = self.text.detokenizer(
                skip_special=body.skip_special_tokens,
                context=sequence.prompt if in_context else (),
            )
            ends = replace(rules, stop_token_ids=frozenset(sequence.stop.stop_token_ids))
            choices.append(Choice(index, detokenizer, ends))
        return choices

    def _answer(
        self, plan: GenerationPlan, body: GenerationBody, form: Form, choices: list[Choice]
    ) -> Answer:
        return Answer(
            lambda: Session(self.generator, plan.sequences, choices),
            form,
            stream=bool(body.stream),
            ping_s=self.bounds.ping_s,
            lifecycle=self.lifecycle,
            counter=self.metrics,
        )

    # -- tokens

    async def tokenize(self, body: TokenizeBody) -> Response:
        """Token ids of a text or of rendered messages. Raises InvalidRequest."""
        translate.check_model_name(body.model, self.model)
        translate.check_unlisted(body.unlisted, list(TokenizeBody.model_fields))
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("give either prompt or messages", param="prompt")
        text, special = body.prompt or "", body.add_special_tokens is not False
        if body.messages is not None:
            special = body.add_special_tokens is True
            text = translate.render_chat(
                self.text,
                body.messages,
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=body.continue_final_message,
                variables=body.chat_template_kwargs,
            )
        tokens = await self.encode(text, "prompt", add_special_tokens=special)
        names = [self.text.token_name(t) for t in tokens] if body.return_token_strs else None
        return json_response(
            {
                "count": len(tokens),
                "max_model_len": self.context(),
                "tokens": tokens,
                "token_strs": names,
            }
        )

    async def detokenize(self, body: DetokenizeBody) -> Response:
        translate.check_model_name(body.model, self.model)
        translate.check_unlisted(body.unlisted, list(DetokenizeBody.model_fields))
        if body.tokens:
            translate.check_prompt(body.tokens, self.text, "tokens")
        if len(body.tokens) <= self.bounds.inline_chars:
            return json_response({"prompt": self.text.decode(body.tokens)})
        return json_response({"prompt": await asyncio.to_thread(self.text.decode, body.tokens)})

    # -- the service

    def context(self) -> int:
        """Tokens of prompt and answer that a request may have now."""
        limits = self.generator.limits()
        return limits.model_context if limits.max_context is None else limits.max_context

    def entry(self) -> out.ModelEntry:
        model = self.model
        return out.ModelEntry(
            id=model.name, created=model.created, root=model.name, max_model_len=self.context()
        )

    def health(self) -> tuple[int, dict[str, Any]]:
        """HTTP status and body: 200 while requests are answered, also during a shift."""
        now = self.generator.serving()
        stopping = self.lifecycle.stopping
        state = now.state if stopping is None else ServiceState.STOPPING
        body = {
            "state": state,
            "reason": now.reason if stopping is None else stopping,
            "epoch": now.epoch,
            "replicas": now.replicas,
            "gpus": now.gpus,
            "running": now.running,
            "waiting": now.waiting,
        }
        return (200 if state in READY_STATES else 503), body


def _nothing_more(body: CompletionBody, form: TextForm, choices: list[Choice]) -> Response:
    for choice in choices:
        choice.finish_reason = "length"
    if not body.stream:
        return Response(form.whole(choices), media_type="application/json")
    chunks = [form.chunk(choice, choice.take(), choices) for choice in choices]
    events = b"".join([*chunks, form.closing(choices)])
    return Response(events, media_type="text/event-stream")


def json_response(value: object, status: int = 200) -> Response:
    return Response(out.encode(value), status, media_type="application/json")


def _add_generation_routes(router: APIRouter, gateway: Gateway) -> None:
    @router.post("/v1/completions", response_model=None)
    async def completions(request: Request, body: CompletionBody) -> Response:
        return await gateway.completion(request.scope[REQUEST_ID], body)

    @router.post("/v1/chat/completions", response_model=None)
    async def chat_completions(request: Request, body: ChatBody) -> Response:
        return await gateway.chat(request.scope[REQUEST_ID], body)

    @router.post("/tokenize", response_model=None)
    async def tokenize(body: TokenizeBody) -> Response:
        return await gateway.tokenize(body)

    @router.post("/detokenize", response_model=None)
    async def detokenize(body: DetokenizeBody) -> Response:
        return await gateway.detokenize(body)


def _add_model_routes(router: APIRouter, gateway: Gateway) -> None:
    @router.get("/v1/models", response_model=None)
    async def models() -> Response:
        return json_response(out.ModelList(data=[gateway.entry()]))

    @router.get("/v1/models/{name:path}", response_model=None)
    async def model(name: str) -> Response:
        if name != gateway.model.name:
            raise UnknownModel(
                f"the model '{name}' is not served here", hint=f"'{gateway.model.name}' is"
            )
        return json_response(gateway.entry())


def _add_service_routes(
    router: APIRouter, gateway: Gateway, extra_status: Callable[[], dict[str, Any]] | None
) -> None:
    @router.head("/health", response_model=None, include_in_schema=False)
    @router.get("/health", response_model=None)
    async def health() -> Response:
        status, body = gateway.health()
        extra = extra_status() if extra_status is not None else {}
        return json_response({**extra, **body}, status)

    @router.get("/metrics", response_model=None)
    async def metrics(request: Request) -> Response:
        accept = request.headers.get("accept", "")
        page, content_type = gateway.metrics.exposition(accept)
        nodes = await asyncio.to_thread(node_page, gateway.metrics.node_readings(), accept)
        return Response(joined(page, nodes), headers={"content-type": content_type})

    @router.get("/version", response_model=None)
    async def version() -> Response:
        return json_response({"version": flexslurm.__version__})
