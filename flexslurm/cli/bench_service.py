"""A service on virtual GPUs that is asked for gears while it streams; measures nothing itself.

The head writes down what it does and when: the journal is read rather than the head asked, which
has its hands full in a shift.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import yaml

from flexslurm.cli import launch as launching
from flexslurm.cli import submitting
from flexslurm.cli.ask import ask, ask_status, pool_is_whole
from flexslurm.cli.bench_round import BEGUN, TAIL, Round
from flexslurm.cli.demo_streams import StreamRun, open_streams
from flexslurm.cli.stopping import stop_service
from flexslurm.config.schema import parse_section
from flexslurm.config.service import Service
from flexslurm.config.site import Site
from flexslurm.errors import DeadlineExceeded, ServiceError
from flexslurm.messages import ShiftAnswer, ShiftAsk
from flexslurm.wire.journal import read_journal
from flexslurm.wire.service_dir import ServiceDir

Say = Callable[[str], None]
Record = dict[str, Any]

BLOCK_TOKENS = 16
STREAMS = 4
PROMPT_BYTES = 200
_MOST_CONTEXT = 1024
_LOOK_S = 0.03


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """What is measured, on which model. Layouts are of a100 (roomy) or l40s (tight)."""

    model: Mapping[str, Any]
    memory: Mapping[str, str]
    walk: tuple[tuple[str, str], ...]
    max_tokens: int = 450
    link_bytes_per_s: float = 0.0
    """What is declared of the link between GPUs; 0: nothing."""
    executor: Mapping[str, Any] | None = None


@contextmanager
def launched(
    home: Path, model: Path, plan: BenchPlan, env: Mapping[str, str]
) -> Iterator[BenchService]:
    """Launch as `flexslurm launch --cluster local` does; end it whatever happens."""
    service = parse_section(Service, yaml.safe_dump(_service(model, plan)), "service.yaml")
    site = parse_section(Site, yaml.safe_dump(_site(plan, env)), "site.yaml")
    directory = ServiceDir(home / "service")
    made = BenchService(launching.plan_launch(service, site, directory, "local", True), plan)
    try:
        made.launch()
        made.wait_for_pool()
        yield made
    finally:
        stop_service(directory, 0.0, 30.0, lambda _: None)


def _service(model: Path, plan: BenchPlan) -> dict[str, Any]:
    return {
        "name": "bench",
        "model": {"path": str(model), "dtype": "float64", "name": "bench"},
        "pool": [
            {"gpu_type": "a100", "gpus": 4, "count": 1},
            {"gpu_type": "l40s", "gpus": 2, "count": 1},
        ],
        "serving": {
            "block_tokens": BLOCK_TOKENS, "max_batch": 2 * STREAMS, "max_batch_tokens": 64,
            "max_context": _MOST_CONTEXT,
        },
        "workload": {"prompt_tokens": PROMPT_BYTES, "output_tokens": 300},
        "executor": dict(plan.executor or {}),
    }  # fmt: skip


def _site(plan: BenchPlan, env: Mapping[str, str]) -> dict[str, Any]:
    return {
        "name": "bench",
        "slurm": {"poll_interval": "0.5s", "kill_wait": "2s"},
        "env": dict(env),
        "gpu_types": {
            name: {"memory": memory, "virtual": {}, **_link(plan)}
            for name, memory in plan.memory.items()
        },
    }


def _link(plan: BenchPlan) -> dict[str, Any]:
    if not plan.link_bytes_per_s:
        return {}
    return {"gpu_link": {"bandwidth": f"{plan.link_bytes_per_s / 1e6:.0f} MB/s"}}


class BenchService:
    """A service that is asked for gears while it streams."""

    def __init__(self, plan: launching.LaunchPlan, bench: BenchPlan) -> None:
        self._plan, self._bench = plan, bench
        self._directory = plan.directory

    def launch(self) -> None:
        submitting.execute(self._plan, lambda _: None)
        launching.wait_until_serving(self._plan, lambda _: None, 120.0)

    def cold_restart(self) -> float:
        """Seconds from the stop to the first token of the service that is launched again."""
        began = time.monotonic()
        stop_service(self._directory, 0.0, 30.0, lambda _: None)
        self.launch()
        bodies = [{**self._bodies()[0], "max_tokens": 1}]
        took_s = self._finish(*self._open(bodies))[0].times[0] - began
        self.wait_for_pool()
        return took_s

    def wait_for_pool(self) -> None:
        """All pilots are there: a service may answer before the last of them has come."""
        _until(lambda: pool_is_whole(self._directory, len(self._plan.pilots)))

    def calm(self) -> list[StreamRun]:
        """The streams without any disturbance, to their ends."""
        return self._finish(*self._open(self._bodies()))

    def beside(self, measure: Callable[[], float]) -> float:
        """Measure something while streams go on."""
        runs, threads = self._open(self._bodies())
        _until(lambda: all(len(run.times) >= BEGUN or run.error for run in runs))
        found = measure()
        self._finish(runs, threads, early=True)
        return found

    def round(
        self, start: str, to: str, say: Say, link: Callable[[], float] | None = None
    ) -> Round:
        """From one gear into another, in the middle of the streams.

        `link` is measured in the same gear beside the same streams, before they begin anew.
        """
        self.shift(start)
        link_bytes_per_s = 0.0 if link is None else self.beside(link)
        before = ask_status(self._directory)
        runs, threads = self._open(self._bodies())
        _until(lambda: all(len(run.times) >= BEGUN or run.error for run in runs))
        asked_at = time.monotonic()
        epoch = self.shift(to)
        switched = self._noted("switched", epoch=epoch)
        cut_at = self._cut_at(switched)
        _until(lambda: all(_has_tail(run, cut_at) for run in runs))
        self._finish(runs, threads, early=True)
        after = ask_status(self._directory)
        line = next((dict(one) for one in after.shifts if one["epoch"] == epoch), None)
        if line is None:
            raise ServiceError(f"the head has no history of epoch {epoch}")
        say(f"{line['from']}  ⇒  {line['to']}: {line['mode']}, {line['outcome']}")
        return Round(
            runs=runs,
            before=before,
            after=after,
            line=line,
            planned=self._noted("planned", epoch=epoch),
            switched=switched,
            asked_at=asked_at,
            cut_at=cut_at,
            link_bytes_per_s=link_bytes_per_s,
        )

    def shift(self, to: str) -> int:
        """Go into a gear; returns the epoch under which it was installed last."""
        answer = ask(self._directory, ShiftAsk(to=to), 15.0)
        if not isinstance(answer, ShiftAnswer):
            raise ServiceError("the head gave another answer than the plan of a shift")
        if answer.epoch <= self._last_epoch() and self._layout(self._last_epoch()) == answer.to:
            return self._last_epoch()
        _until(lambda: self._serves(answer))
        return self._last_epoch()

    def _serves(self, answer: ShiftAnswer) -> bool:
        epoch = self._last_epoch()
        return epoch >= answer.epoch and self._layout(epoch) == answer.to

    def _last_epoch(self) -> int:
        """The last one that was switched to."""
        return int(self._noted("switched")["epoch"])

    def _layout(self, epoch: int) -> str:
        return str(self._noted("epoch", epoch=epoch)["layout"])

    def _cut_at(self, switched: Record) -> float:
        """When the head went over, on our monotonic clock; it runs on this machine."""
        ahead_s = time.time() - time.monotonic()
        return float(switched["at"]) - ahead_s

    def _noted(self, event: str, **wanted: object) -> Record:
        """The last such record of the head's journal."""
        records, _ = read_journal(self._directory.journal)
        for record in reversed(records):
            if {"event": event, **wanted}.items() <= record.items():
                return record
        raise ServiceError(f"the head has written down no '{event}' of {wanted}")

    def _open(self, bodies: Sequence[dict[str, Any]]) -> tuple[list[StreamRun], list[Thread]]:
        head = self._directory.head()
        if head is None:
            raise ServiceError("the head has gone")
        return open_streams(head.api, bodies)

    def _finish(
        self, runs: list[StreamRun], threads: Sequence[Thread], *, early: bool = False
    ) -> list[StreamRun]:
        for run in runs:
            run.enough = early
        for thread in threads:
            thread.join(180.0)
        error = next((run.error for run in runs if run.error), "")
        if error or any(run.finish is None and not early for run in runs):
            raise ServiceError(f"a stream has failed: {error or 'it hangs'}")
        return runs

    def _bodies(self) -> list[dict[str, Any]]:
        """Requests with equally long prompts; every other one is sampled, with a seed."""
        return [
            {
                "model": "bench",
                "messages": [{"role": "user", "content": (f"{n} bottles; " * 40)[:PROMPT_BYTES]}],
                "max_tokens": self._bench.max_tokens,
                "ignore_eos": True,
                "temperature": 0.0 if n % 2 == 0 else 0.9,
                "seed": 100 + n,
            }
            for n in range(STREAMS)
        ]


def _has_tail(run: StreamRun, cut_at: float) -> bool:
    after = sum(at > cut_at for at in run.times[-TAIL:])
    return bool(run.error) or run.finish is not None or after >= TAIL


def _until(done: Callable[[], bool], timeout_s: float = 90.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not done():
        if time.monotonic() > deadline:
            raise DeadlineExceeded(
                f"the bench waited {timeout_s:g} s for what did not come",
                hint="run it with --keep and read the head's log",
            )
        time.sleep(_LOOK_S)
