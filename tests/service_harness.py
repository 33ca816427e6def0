"""A whole service as users run it: launched by the command's own code, as local processes."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import leaks
import torch
import yaml

from flexslurm.cli import demo_streams, submitting
from flexslurm.cli import launch as launching
from flexslurm.cli.ask import ask_status
from flexslurm.cli.demo_streams import StreamRun
from flexslurm.cli.stopping import stop_service
from flexslurm.config.schema import parse_section
from flexslurm.config.service import Service
from flexslurm.config.site import Site
from flexslurm.engine.sampling import sample
from flexslurm.errors import ServiceUnreachable
from flexslurm.messages import (
    ChunkSampling,
    SamplingParams,
    ServiceState,
    StatusAnswer,
)
from flexslurm.slurm.local import LocalSubmitter
from flexslurm.wire.service_dir import ServiceDir
from tests.command_lines import command_lines

MOST_TOKENS = 440
"""Of an answer to one of `some_asks`, in the context of `tiny_service`."""
SLOWLY = 0.1
"""Of a virtual GPU's speed, where streams must outlast what is done to them on any machine: they
are slower by so much than the same machine is in acting on them, and leave it the time to act."""


class Ask(StreamRun):
    """One request to /v1/completions by token ids, and what came of it."""

    def __init__(
        self, prompt: list[int], max_tokens: int, sampling: dict[str, Any] | None = None
    ) -> None:
        self.prompt, self.max_tokens, self.sampling = prompt, max_tokens, sampling or {}
        super().__init__(
            {
                "model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0.0,
                "ignore_eos": True, **self.sampling,
            }
        )  # fmt: skip


class RunningService:
    """A launched service and its client."""

    def __init__(self, directory: ServiceDir, plan: launching.LaunchPlan) -> None:
        self.directory, self.plan = directory, plan
        self.submitter = LocalSubmitter(directory.path)

    def status(self) -> StatusAnswer:
        return ask_status(self.directory, 20.0)  # a busy head answers late

    @property
    def endpoint(self) -> str:
        head = self.directory.head()
        assert head is not None
        return head.api

    def until(self, what: Callable[[StatusAnswer], bool], timeout_s: float = 100.0) -> StatusAnswer:
        """The first status of which `what` is true; fails the test after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        last: object = None
        while time.monotonic() < deadline:
            try:
                answer = self.status()
            except ServiceUnreachable as error:
                last = error
            else:
                if what(answer):
                    return answer
                pilots = [(f.name, f.state, f.detail) for f in answer.fragments]
                last = (answer.state, answer.epoch, answer.reason, pilots, answer.shifts[-2:])
            time.sleep(0.05)
        raise AssertionError(f"not within {timeout_s} s; last seen: {last}")

    def start(self, asks: Sequence[Ask]) -> list[threading.Thread]:
        threads = [
            threading.Thread(target=stream, args=(self.endpoint, ask), daemon=True) for ask in asks
        ]
        for thread in threads:
            thread.start()
        return threads

    def run(self, asks: Sequence[Ask], timeout_s: float = 100.0) -> None:
        finish(self.start(asks), timeout_s)

    def under_way(
        self, count: int, max_tokens: int, seed: int = 0
    ) -> tuple[list[Ask], list[threading.Thread]]:
        """Start streams; returns when all have tokens and none has ended.

        On a busy machine some may end before others have begun: then longer ones are started.
        """
        for _ in range(5):
            asks = some_asks(count, max_tokens, seed)
            threads = self.start(asks)
            _have_begun(asks)
            if all(ask.finish is None for ask in asks):
                return asks, threads
            finish(threads, 90)
            max_tokens = min(2 * max_tokens, MOST_TOKENS)
        raise AssertionError("some streams always end before all have begun")

    def job_of(self, fragment: str) -> str:
        pilots = self.directory.pilots()
        assert pilots is not None
        return next(p.job_id for p in pilots.pilots if p.fragment == fragment)

    def process(self, text: str) -> int:
        """The process id of the service's process whose command line holds `text`."""
        found = list(self.processes(text))
        assert found, f"no process of this service with '{text}'"
        return found[0]

    def processes(self, text: str) -> Iterator[int]:
        mine = str(self.directory.path)
        for pid, line in command_lines():
            if mine in line and text in line and "local_job" not in line:
                yield pid

    def kill(self, text: str) -> None:
        os.kill(self.process(text), signal.SIGKILL)

    def worker_pids(self) -> dict[str, int]:
        """Process ids of workers by slot, from the agents' own records in the head's status."""
        return {
            gpu.slot: gpu.pid
            for fragment in self.status().fragments
            for gpu in fragment.gpus
            if gpu.slot is not None and gpu.pid
        }


def finish(threads: Sequence[threading.Thread], timeout_s: float) -> None:
    """Wait for streams to end; a busy machine has twice the time that one may expect."""
    deadline = time.monotonic() + 2 * timeout_s
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0.0))
    assert not any(thread.is_alive() for thread in threads), f"a stream hangs after {timeout_s} s"


def stream(endpoint: str, ask: Ask) -> None:
    """Run one streamed completion to its end, as the demo's clients do."""
    demo_streams.stream(endpoint, ask, path="/v1/completions")


@contextmanager
def running(
    home: Path,
    service: dict[str, Any],
    site: dict[str, Any],
    timeout_s: float = 120.0,
    *,
    cluster: str = "local",
    look: bool = True,
) -> Iterator[RunningService]:
    """Launch a service, and end it whatever happens; on Slurm, the head is a job too.

    With `look`, nothing may be left of it; without, the caller looks, once Slurm is gone too. Local
    pilots are all there: it may serve before the last of them has come.
    """
    made = parse_section(Service, yaml.safe_dump(service), "service.yaml")
    place = parse_section(Site, yaml.safe_dump(site), "site.yaml")
    directory = ServiceDir(home / "service")
    plan = launching.plan_launch(made, place, directory, cluster, cluster == "local")
    said: list[str] = []
    token = os.environ[leaks.TOKEN_VARIABLE]
    before = leaks.take(token)
    try:
        submitting.execute(plan, said.append)
        launching.wait_until_serving(plan, said.append, timeout_s)
        service = RunningService(directory, plan)
        if cluster == "local":
            service.until(lambda status: pilots_there(status) == len(plan.pilots))
        yield service
    finally:
        stop_service(directory, 0.0, 60.0, said.append)
    left = leaks.left_since(before, token) if look else []
    assert not left, "the service left behind:\n  " + "\n  ".join(left)


def pilots_there(status: StatusAnswer) -> int:
    return sum(fragment.is_there for fragment in status.fragments)


def tiny_site(speed: float = 1.0, **memory: str) -> dict[str, Any]:
    """Two virtual GPU types of this speed; memory by type, such as a100="2MiB"."""
    return {
        "name": "test",
        "slurm": {"poll_interval": "0.2s", "kill_wait": "2s"},
        "gpu_types": {
            name: {"memory": memory.get(name, "64MiB"), "virtual": {"speed": speed}}
            for name in ("a100", "l40s")
        },
    }


def tiny_service(
    model: Path, pool: Sequence[tuple[str, int, int]], **serving: Any
) -> dict[str, Any]:
    """A service of a tiny model; pool entries are (GPU type, GPUs, count)."""
    return {
        "name": "tiny",
        "model": {"path": str(model), "dtype": "float64", "name": "tiny"},
        "pool": [{"gpu_type": t, "gpus": g, "count": c} for t, g, c in pool],
        "serving": {
            "block_tokens": 16, "max_batch": 16, "max_batch_tokens": 64, "max_context": 512,
            "heartbeat": "0.3s", "lost_after": "3s", **serving,
        },
        "workload": {"prompt_tokens": 32, "output_tokens": 32},
        "decisions": {"min_action_gap_sec": 0, "migration_benefit_ratio": 1.0},
        "keeping": {"enabled": False},  # what a test takes away stays away
    }  # fmt: skip


def oracle(model: Path, asks: Sequence[Ask]) -> list[list[int]]:
    """The tokens `transformers` gives on the whole model, by our sampler's rule where sampled."""
    from transformers import AutoModelForCausalLM

    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64).eval()
    return [_oracle_one(whole, ask) for ask in asks]


class Oracle:
    """`oracle`, which keeps what it has found: a shorter answer is the beginning of a longer."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._found: dict[str, list[int]] = {}

    def __call__(self, asks: Sequence[Ask]) -> list[list[int]]:
        keys = [f"{ask.prompt} {ask.sampling}" for ask in asks]
        lacking = {
            key: ask
            for key, ask in zip(keys, asks, strict=True)
            if len(self._found.get(key, ())) < ask.max_tokens
        }
        tokens = oracle(self._model, list(lacking.values())) if lacking else []
        self._found |= dict(zip(lacking, tokens, strict=True))
        return [self._found[key][: ask.max_tokens] for key, ask in zip(keys, asks, strict=True)]


def gear_of(status: StatusAnswer) -> str | None:
    """The layout of the gear in place."""
    return status.gear.layout() if status.gear is not None else None


class Load:
    """Keeps so many streams under way until it is told to end."""

    def __init__(self, service: RunningService, asks: Iterator[Ask], at_once: int) -> None:
        self._service, self._waiting, self._at_once = service, asks, at_once
        self.begun: list[Ask] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(120)
        assert not self._thread.is_alive(), "streams hang"

    def _run(self) -> None:
        threads: list[threading.Thread] = []
        while not self._ended.is_set():
            threads = [thread for thread in threads if thread.is_alive()]
            for ask in islice(self._waiting, self._at_once - len(threads)):
                self.begun.append(ask)
                threads += self._service.start([ask])
            time.sleep(0.01)
        finish(threads, 100)


def _oracle_one(whole: Any, ask: Ask) -> list[int]:
    greedy = not ask.sampling.get("temperature")
    tokens, cache, given = list(ask.prompt), None, list(ask.prompt)
    with torch.inference_mode():
        for position in range(ask.max_tokens):
            out = whole(torch.tensor([given]), past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            logits = out.logits[0, -1:]
            if greedy:
                token = int(logits.argmax())
            else:
                params = SamplingParams(
                    temperature=ask.sampling["temperature"],
                    top_p=ask.sampling.get("top_p", 1.0),
                    seed=ask.sampling["seed"],
                )
                token = sample(logits, [ChunkSampling(params=params, position=position)])[0][0]
            tokens.append(token)
            given = [token]
    return tokens[len(ask.prompt) :]


def some_asks(count: int, max_tokens: int, seed: int = 0) -> list[Ask]:
    """Prompts of different lengths; every other one sampled with a seed."""
    made = []
    for i in range(count):
        prompt = [(seed * 31 + i * 7 + j * 13) % 200 + 1 for j in range(5 + 9 * i % 60)]
        sampling = {} if i % 2 == 0 else {"temperature": 0.9, "seed": 100 + i}
        made.append(Ask(prompt, max_tokens, sampling))
    return made


def serves(signature: str) -> Callable[[StatusAnswer], bool]:
    """Whether a service serves, on just this allocation; for `RunningService.until`."""

    def there(status: StatusAnswer) -> bool:
        gear = status.gear
        return (
            status.state == ServiceState.SERVING
            and gear is not None
            and str(gear.signature) == signature
        )

    return there


def check(asks: list[Ask], expected: list[list[int]]) -> None:
    assert [ask.error for ask in asks] == [""] * len(asks)
    assert [ask.finish for ask in asks] == ["length"] * len(asks)
    assert [ask.tokens for ask in asks] == expected


def in_the_middle(asks: list[Ask]) -> None:
    """Wait until every stream has some tokens and none is done."""
    _have_begun(asks)
    assert all(ask.finish is None for ask in asks), "the streams were too short to be disturbed"


def _have_begun(asks: Sequence[Ask], tokens: int = 3) -> None:
    deadline = time.monotonic() + 60
    while not all(len(ask.tokens) >= tokens for ask in asks):
        assert time.monotonic() < deadline, [len(ask.tokens) for ask in asks]
        assert not any(ask.error for ask in asks), asks
        time.sleep(0.01)
