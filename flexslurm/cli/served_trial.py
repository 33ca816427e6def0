"""Serves a model on one stage kind of this machine and counts whole cycles; only that.

A trial of stages says how long they compute. What lies between the last stage's token and the next
step on the first (head, messages, streams to clients, processes that share the cores) is seen only
in a service: one replica, kept full of requests that are streamed to their ends.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from flexslurm.engine.served_cycles import Cycles, Reading, cycles_of
from flexslurm.engine.trial import Served, first_half
from flexslurm.errors import DeadlineExceeded, ServiceError

Say = Callable[[str], None]

START_S = 120.0
CYCLES_S = 60.0
"""Most time for warming up and for measuring, each."""
_PARTS, _PART_S, _PART_STEPS = 9, 1.2, 8
"""Parts of the time that is looked at; the least length of each, and steps of it."""
_MORE = 1.5
"""Requests that are there, for each that can run: a free place is taken at once."""
_ENDED = "flexslurm_request_time_per_output_token_seconds_count"
_COUNTERS = (
    "flexslurm_steps_total",
    "flexslurm_step_compute_seconds_total",
    "flexslurm_last_step_seconds",
)


class ServeAsk(msgspec.Struct, frozen=True):
    """The replica to serve, and its load."""

    site: dict[str, Any]
    """Of the site file, with figures that hold on this machine."""
    model: str
    dtype: str
    gpu_type: str
    tp: int
    layers: int
    batch: int
    prompt_tokens: int
    output_tokens: int
    block_tokens: int
    max_batch_tokens: int
    halves: bool = False
    """By two stages too, which takes twice as many GPUs."""

    @property
    def layout(self) -> str:
        return f"{self.gpu_type} tp{self.tp} [0,{self.layers})"

    @property
    def layout_of_halves(self) -> str:
        kind, middle = f"{self.gpu_type} tp{self.tp}", first_half(self.layers)
        return f"{kind} [0,{middle}) → {kind} [{middle},{self.layers})"

    def service(self) -> dict[str, Any]:
        """The service file of the trial."""
        return {
            "name": "trial",
            "model": {"path": self.model, "dtype": self.dtype, "name": "trial"},
            "pool": [{"gpu_type": self.gpu_type, "gpus": self.tp, "count": 1 + self.halves}],
            "keeping": {"enabled": False},
            "gateway": {"host": "127.0.0.1"},
            "serving": {
                "block_tokens": self.block_tokens,
                "max_batch": self.batch,
                "max_batch_tokens": self.max_batch_tokens,
                "max_context": self.prompt_tokens + self.output_tokens,
                "lost_after": "10s",
            },
            "workload": {
                "prompt_tokens": self.prompt_tokens,
                "output_tokens": self.output_tokens,
            },
        }


def served_limit_s(ask: ServeAsk) -> float:
    """The most time that `serve` takes, but for ending."""
    return START_S + (1 + ask.halves) * (START_S + 3 * CYCLES_S)


def serve(ask: ServeAsk, home: Path, say: Say) -> Served:
    """The cycles of the replica; the service is ended whatever happens.

    Raises FlexslurmErrors of what cannot be launched, and DeadlineExceeded.
    """
    with _launched(ask, home) as directory:
        head = directory.head()
        assert head is not None, "a service that serves has published its head"
        _into(directory, ask.layout)  # before there is any load
        with _clients(head.api, ask):
            whole = _cycles(directory, head.api, ask, ask.layout, 1, say)
            halves = None
            if ask.halves:
                halves = _cycles(directory, head.api, ask, ask.layout_of_halves, 2, say)
    return Served(ask.layers, ask.batch, ask.prompt_tokens, ask.output_tokens, whole, halves)


def _cycles(
    directory: Any, endpoint: str, ask: ServeAsk, layout: str, stages: int, say: Say
) -> Cycles:
    _into(directory, layout)
    say(f"serving {layout} to {round(_MORE * ask.batch)} streams")
    _requests_end(endpoint, ask.batch)  # warm
    cycles = cycles_of(_readings(endpoint), stages)
    say(
        f"a cycle takes {cycles.cycle_s * 1e3:.3f} ms, a step of the last stage "
        f"{cycles.step_s * 1e3:.3f} ms"
    )
    return cycles


@contextlib.contextmanager
def _launched(ask: ServeAsk, home: Path) -> Iterator[Any]:
    """The service's directory, once it serves."""
    from flexslurm.cli import launch, submitting
    from flexslurm.cli.ask import pool_is_whole
    from flexslurm.cli.stopping import stop_service
    from flexslurm.config.schema import parse_section
    from flexslurm.config.service import Service
    from flexslurm.config.site import Site
    from flexslurm.wire.service_dir import ServiceDir

    service = parse_section(Service, json.dumps(ask.service()), "the trial's service")
    site = parse_section(Site, json.dumps(ask.site), "the trial's site")
    directory = ServiceDir(home / "service")
    plan = launch.plan_launch(service, site, directory, "local", True)
    try:
        submitting.execute(plan, _silent)
        launch.wait_until_serving(plan, _silent, START_S)
        _until(lambda: pool_is_whole(directory, len(plan.pilots)), START_S, "not all pilots came")
        yield directory
    finally:
        stop_service(directory, 0.0, 30.0, _silent)


def _silent(_: str) -> None:
    """What a launch says is nobody's concern here."""


def _into(directory: Any, layout: str) -> None:
    """Shift into the layout; where it is in place already, have it stay."""
    from flexslurm.cli.ask import ask, ask_status
    from flexslurm.messages import ServiceState, ShiftAsk

    def there() -> bool:
        status = ask_status(directory)
        gear = status.gear
        return gear is not None and gear.layout() == layout and status.state is ServiceState.SERVING

    ask(directory, ShiftAsk(to=layout), 15.0)
    _until(there, START_S, f"the service did not go into {layout}")


def _until(done: Callable[[], bool], limit_s: float, words: str) -> None:
    deadline = time.monotonic() + limit_s
    while not done():
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"{words} within {limit_s:g} s")
        time.sleep(0.1)


# ------------------------------------------------------------------------------------ the load


@contextlib.contextmanager
def _clients(endpoint: str, ask: ServeAsk) -> Iterator[None]:
    """Streams that are opened again when they end. Raises ServiceError when one fails."""
    stop = threading.Event()
    failed: list[str] = []
    threads = [
        threading.Thread(target=_client, args=(endpoint, ask, n, stop, failed), daemon=True)
        for n in range(round(_MORE * ask.batch))
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(CYCLES_S)
    if failed:
        raise ServiceError(f"a request of the trial failed: {failed[0]}")


def _client(
    endpoint: str, ask: ServeAsk, number: int, stop: threading.Event, failed: list[str]
) -> None:
    length = ask.output_tokens
    first = 2 + (number * 7) % max(1, length - 1)  # so that requests do not march in step
    while not stop.is_set() and not failed:
        try:
            _stream(endpoint, ask, number, first, stop)
        except (OSError, HTTPException, ServiceError) as error:
            if not stop.is_set():
                failed.append(str(error))
        first = length


def _stream(endpoint: str, ask: ServeAsk, number: int, length: int, stop: threading.Event) -> None:
    """One streamed completion, read to its end or until told to stop."""
    parts = urlsplit(endpoint)
    connection = HTTPConnection(parts.hostname or "", parts.port or 80, timeout=CYCLES_S)
    body = {
        "model": "trial", "prompt": [1 + (number + n) % 50 for n in range(ask.prompt_tokens)],
        "max_tokens": length, "stream": True, "temperature": 0.0, "ignore_eos": True,
    }  # fmt: skip
    with contextlib.closing(connection):
        connection.request(
            "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        response = connection.getresponse()
        if response.status != 200:
            raise ServiceError(response.read().decode(errors="replace"))
        for _ in response:
            if stop.is_set():
                return


# ------------------------------------------------------------------------------------- reading


def _readings(endpoint: str) -> list[Reading]:
    """The counters at the ends of parts of the time; fewer parts where steps take long."""
    end = time.monotonic() + CYCLES_S
    found = [_reading(endpoint)]
    while len(found) < 2 or (len(found) <= _PARTS and time.monotonic() < end):
        found.append(_next_reading(endpoint, found[-1]))
    return found


def _next_reading(endpoint: str, last: Reading) -> Reading:
    time.sleep(_PART_S)  # without asking: the head is what is measured
    words = f"not {_PART_STEPS} steps of the trial were done"
    _until(lambda: _reading(endpoint).steps >= last.steps + _PART_STEPS, CYCLES_S, words)
    return _reading(endpoint)


def _reading(endpoint: str) -> Reading:
    steps, computed_s, at_s = _figures(endpoint, _COUNTERS)
    return Reading(int(steps), computed_s, at_s)


def _requests_end(endpoint: str, count: int) -> None:
    words = f"not {count} requests of the trial ended"
    wanted = _ended(endpoint) + count
    _until(lambda: _ended(endpoint) >= wanted, CYCLES_S, words)


def _ended(endpoint: str) -> float:
    return _figures(endpoint, (_ENDED,))[0]


def _figures(endpoint: str, names: Sequence[str]) -> list[float]:
    """Figures of the head's page, by name. Raises ServiceError."""
    try:
        with urllib.request.urlopen(f"{endpoint}/metrics", timeout=10) as answer:  # noqa: S310 - http
            text = answer.read().decode()
    except (OSError, HTTPException) as error:
        raise ServiceError(f"the head's metrics cannot be read: {error}") from error
    found = [re.search(rf"^{name}{{.*}} (\S+)$", text, re.M) for name in names]
    if None in found:
        raise ServiceError(f"the head's metrics lack one of {', '.join(names)}")
    return [float(match[1]) for match in found if match is not None]
