"""The gateway inside the head: its model, text, metrics and server put together."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flexslurm.config.service import Service
from flexslurm.errors import RequestError
from flexslurm.gateway.api import create_app
from flexslurm.gateway.card import ModelCard
from flexslurm.gateway.guard import load_api_keys
from flexslurm.gateway.metrics import Metrics
from flexslurm.gateway.port import Generator
from flexslurm.gateway.server import GatewayServer
from flexslurm.gateway.text import TextModel
from flexslurm.head.observer import SequenceSummary
from flexslurm.head.probe_text import probe_tokens
from flexslurm.messages import SequenceRequest


class MetricsObserver:
    """Turns what the ledger tells into metrics."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def accepted(self, request: SequenceRequest) -> None:
        self._metrics.accepted(request.seq_id, len(request.prompt))

    def refused(self, error: RequestError) -> None:
        """Counted by HTTP status already."""

    def first_token(self, ttft_s: float) -> None:
        self._metrics.first_token(ttft_s)

    def next_token(self, gap_s: float) -> None:
        self._metrics.gap(gap_s)

    def ended(self, summary: SequenceSummary) -> None:
        self._metrics.finished(summary.reason, summary.e2e_s, summary.output_tokens, summary.ttft_s)


class ApiServer:
    """The API of one service; `start` once, `stop` once."""

    def __init__(self, service: Service, model_context: int) -> None:
        path = Path(service.model.path)
        template = service.model.chat_template
        keys = service.gateway.api_keys_file
        self._service = service
        self._card = ModelCard(
            name=service.model.name or path.name,
            path=str(path),
            context=model_context,
            created=int(time.time()),
        )
        self._text = TextModel.load(path, Path(template) if template else None)
        self._keys = load_api_keys(Path(keys)) if keys else frozenset()
        self.metrics = Metrics(self._card.name)
        self.observer = MetricsObserver(self.metrics)
        self._server: GatewayServer | None = None
        self.url = ""

    def probe_tokens(self, count: int) -> tuple[int, ...]:
        """So many tokens of a plain text in the model's vocabulary: see `head.probe_text`."""
        return probe_tokens(self._text, count)

    async def start(
        self, generator: Generator, extra_status: Callable[[], dict[str, Any]], address: str
    ) -> str:
        """Listen; returns the base URL under which other nodes reach it."""
        app = create_app(generator, self._card, self._text, self.metrics, self._keys, extra_status)
        host = self._service.gateway.host
        self._server = await GatewayServer.start(app, host, self._service.gateway.port)
        shown = address if host in ("0.0.0.0", "::", "") else host  # noqa: S104
        self.url = f"http://{shown}:{self._server.port}"
        return self.url

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(grace_s=1.0)
