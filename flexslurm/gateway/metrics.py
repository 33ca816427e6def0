"""Prometheus metrics of the service, under vLLM's stems; never measures anything itself.

Whoever knows a figure reports it: the head's ledger calls `accepted`, `first_token`, `gap` and
`finished`; the gateway counts answers; gauges are read from the generator when scraped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

import flexslurm
from flexslurm.gateway.node_metrics import Readings
from flexslurm.gateway.port import Serving, StepTotals
from flexslurm.messages import ServiceState

_TTFT_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40,
    80, 160, 640,
)  # fmt: skip
_GAP_S = (
    0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20,
    40, 80,
)  # fmt: skip
_E2E_S = (
    0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920,
)  # fmt: skip
_TOKENS = tuple(2**power for power in range(18))
_SHIFT_S = (0.1, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512)

_GAUGES: dict[str, tuple[str, Callable[[Serving], float]]] = {
    "num_requests_running": ("Sequences in a batch.", lambda s: s.running),
    "num_requests_waiting": ("Sequences that wait for a place or for GPUs.", lambda s: s.waiting),
    "kv_cache_usage_ratio": ("Share of the KV blocks in use, 0 to 1.", lambda s: s.kv_used),
    "epoch": ("Epoch of the installed gear.", lambda s: s.epoch),
    "replicas": ("Replicas of the model in the installed gear.", lambda s: s.replicas),
    "gpus": ("GPUs in the installed gear.", lambda s: s.gpus),
}

_FIGURES = {
    "throughput_kept_during": "Tokens per second during shifts over those just before.",
    "throughput_kept_after": "Tokens per second just after shifts over those just before.",
    "requests_succeeded": "Share of the requests that ended as they should.",
    "time_shifting": "Share of the time since serving began that shifts took.",
}


class Metrics:
    """The registry of one service. Methods are cheap enough to call once a token."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._nodes: Callable[[], Readings] = dict
        self._model = model_name
        self._ttft = self._histogram("time_to_first_token_seconds", "", _TTFT_S)
        self._gap = self._histogram("inter_token_latency_seconds", "", _GAP_S)
        self._tpot = self._histogram(
            "request_time_per_output_token_seconds",
            "(end to end - first token) / (tokens - 1) of a sequence.",
            _GAP_S,
        )
        self._e2e = self._histogram("e2e_request_latency_seconds", "", _E2E_S)
        self._prompt_length = self._histogram("request_prompt_tokens", "Per sequence.", _TOKENS)
        self._answer_length = self._histogram("request_generation_tokens", "Per sequence.", _TOKENS)
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of accepted prompts.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self._sequences = Counter(
            "flexslurm_sequences",
            "Sequences that ended in the engine, by how.",
            ("model_name", "finished_reason"),
            registry=self.registry,
        )
        self._answers = Counter(
            "flexslurm_request_success",
            "Choices answered, by the finish_reason the client was told (or abort, error).",
            ("model_name", "finished_reason"),
            registry=self.registry,
        )
        self._shifts = Counter(
            "flexslurm_shifts",
            "Changes of gear, by outcome.",
            ("model_name", "outcome"),
            registry=self.registry,
        )
        self._shift_time = self._histogram("shift_duration_seconds", "", _SHIFT_S)
        self._http = Counter(
            "flexslurm_http_requests",
            "HTTP requests answered.",
            ("method", "path", "status"),
            registry=self.registry,
        )

    def _histogram(self, stem: str, words: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(
            f"flexslurm_{stem}",
            words or stem.replace("_", " ").capitalize() + ".",
            ("model_name",),
            buckets=buckets,
            registry=self.registry,
        )
        child = family.labels(self._model)
        assert isinstance(child, Histogram)
        return child

    def _counter(self, stem: str, words: str) -> Counter:
        family = Counter(f"flexslurm_{stem}", words, ("model_name",), registry=self.registry)
        child = family.labels(self._model)
        assert isinstance(child, Counter)
        return child

    # -- what the ledger reports, per sequence

    def accepted(self, seq_id: str, prompt_tokens: int) -> None:
        self._prompt_tokens.inc(prompt_tokens)
        self._prompt_length.observe(prompt_tokens)

    def first_token(self, seconds: float) -> None:
        """Seconds from acceptance to the first token."""
        self._generation_tokens.inc()
        self._ttft.observe(seconds)

    def gap(self, seconds: float) -> None:
        """Seconds between two tokens of one sequence: called for every token but the first."""
        self._generation_tokens.inc()
        self._gap.observe(seconds)

    def finished(
        self, reason: str, e2e_seconds: float, tokens: int, ttft_seconds: float | None = None
    ) -> None:
        """A sequence's end. With `ttft_seconds` its time per output token is known too."""
        self._sequences.labels(self._model, reason).inc()
        self._e2e.observe(e2e_seconds)
        self._answer_length.observe(tokens)
        if ttft_seconds is not None and tokens > 1:
            self._tpot.observe((e2e_seconds - ttft_seconds) / (tokens - 1))

    def shift(self, outcome: str, seconds: float) -> None:
        """A change of gear ended: `committed`, `aborted`."""
        self._shifts.labels(self._model, outcome).inc()
        self._shift_time.observe(seconds)

    # -- what the gateway reports

    def answered(self, finish_reason: str) -> None:
        self._answers.labels(self._model, finish_reason).inc()

    def http(self, method: str, path: str, status: int) -> None:
        self._http.labels(method, path, str(status)).inc()

    # -- reading

    def watch(self, serving: Callable[[], Serving]) -> None:
        """Read the gauges from here at each scrape; once in the life of the registry."""
        self.registry.register(_ServingCollector(self._model, serving))

    def watch_figures(self, figures: Callable[[], Mapping[str, float | None]]) -> None:
        """Read the figures that judge the shifts from here at each scrape; once in a life.

        Those of `_FIGURES`; None is left out.
        """
        self.registry.register(_FiguresCollector(self._model, figures))

    def watch_steps(self, totals: Callable[[], StepTotals]) -> None:
        """Read the counts of steps from here at each scrape; once in the life of the registry."""
        self.registry.register(_StepsCollector(self._model, totals))

    def watch_nodes(self, readings: Callable[[], Readings]) -> None:
        """Read the nodes' ports and cards from here at each scrape."""
        self._nodes = readings

    def node_readings(self) -> Readings:
        """What `node_metrics.node_page` makes a page of: much, with many nodes, so in a thread."""
        return self._nodes()

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """The page of the service itself and its content type, in the form an Accept asks for."""
        encoder, content_type = choose_encoder(accept)
        return encoder(self.registry), content_type


class _FiguresCollector(Collector):
    def __init__(self, model_name: str, figures: Callable[[], Mapping[str, float | None]]) -> None:
        self._model, self._figures = model_name, figures

    def collect(self) -> Iterable[Metric]:
        now = self._figures()
        for stem, words in _FIGURES.items():
            gauge = GaugeMetricFamily(f"flexslurm_{stem}_ratio", words, labels=("model_name",))
            value = now.get(stem)
            if value is not None:
                gauge.add_metric((self._model,), value)
            yield gauge

    def describe(self) -> Iterable[Metric]:
        """Nothing, so that registering reads no figures."""
        return ()


class _StepsCollector(Collector):
    """Steps that were answered, and what they computed: the rest of a cycle is between them."""

    def __init__(self, model_name: str, totals: Callable[[], StepTotals]) -> None:
        self._model, self._totals = model_name, totals

    def collect(self) -> Iterable[Metric]:
        now = self._totals()
        for stem, words, value in (
            ("steps", "Steps answered by the last stages.", now.steps),
            ("step_compute_seconds", "Seconds that the last stages computed.", now.computed_s),
        ):
            counter = CounterMetricFamily(f"flexslurm_{stem}", words, labels=("model_name",))
            counter.add_metric((self._model,), value)
            yield counter
        clock = GaugeMetricFamily(
            "flexslurm_last_step_seconds",
            "When the last step was answered, on a steady clock of the head.",
            labels=("model_name",),
        )
        clock.add_metric((self._model,), now.last_at_s)
        yield clock

    def describe(self) -> Iterable[Metric]:
        """Nothing, so that registering reads no counts."""
        return ()


class _ServingCollector(Collector):
    def __init__(self, model_name: str, serving: Callable[[], Serving]) -> None:
        self._model = model_name
        self._serving = serving

    def collect(self) -> Iterable[Metric]:
        now = self._serving()
        for stem, (words, read) in _GAUGES.items():
            gauge = GaugeMetricFamily(f"flexslurm_{stem}", words, labels=("model_name",))
            gauge.add_metric((self._model,), read(now))
            yield gauge
        states = GaugeMetricFamily("flexslurm_state", "1 for the present state.", labels=("state",))
        for state in ServiceState:
            states.add_metric((state,), float(now.state == state))
        yield states
        build = GaugeMetricFamily("flexslurm_build_info", "Always 1.", labels=("version",))
        build.add_metric((flexslurm.__version__,), 1)
        yield build

    def describe(self) -> Iterable[Metric]:
        """Nothing, so that registering reads no figures."""
        return ()
