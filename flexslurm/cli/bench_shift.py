"""Measures planned shifts under streams, on virtual GPUs of this machine; decides nothing.

Every figure is of this run: a launched service is asked for one gear after the other while streams
go on. A second service, whose workers cannot pull KV, does the same changes: what its streams lose
is the price of recomputing. What a cold restart costs is measured by one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import yaml

from flexslurm.cli import launch as launching
from flexslurm.cli import submitting
from flexslurm.cli.ask import ask, ask_status
from flexslurm.cli.bench_link import loopback_bytes_per_s
from flexslurm.cli.demo_streams import StreamRun, open_streams
from flexslurm.cli.stopping import stop_service
from flexslurm.config.schema import parse_section
from flexslurm.config.service import Service
from flexslurm.config.site import Site
from flexslurm.errors import DeadlineExceeded, ServiceError
from flexslurm.messages import ShiftAnswer, ShiftAsk, StatusAnswer
from flexslurm.wire.journal import read_journal
from flexslurm.wire.service_dir import ServiceDir

Say = Callable[[str], None]

BLOCK_TOKENS = 16
STREAMS = 4
PROMPT_BYTES = 200
_BEGUN = 8
"""Tokens that every stream has before a shift is asked for."""
_RECOMPUTING = {"FLEXSLURM_FAULTS": "cutover.pull:1+:raise"}
"""Every pull of KV fails, so sequences go on from their tokens."""


class ShiftFigures(msgspec.Struct, kw_only=True):
    """One planned shift. None: not measured."""

    before: str = msgspec.field(name="from")
    after: str = msgspec.field(name="to")
    mode: str
    """How KV got there: `beside`, `park`, or `recompute`."""
    tokens_equal: bool
    longest_extra_gap_s: float | None
    """The longest time between two tokens of a stream in the shift, less a decode step."""
    pause_s: float
    """Of the head's own history: from the pause of the old gear to the start of the new one."""
    decode_step_s: float
    """Median time between two tokens, in the slower of the two gears."""
    bytes_moved: int
    """Weights and KV that came from outside the GPU that needs them."""
    bytes_optimal: int | None
    """The least that any placement and any routes move; None: KV was on several replicas."""
    transfer_s: float
    """The slowest worker's weights, then the rounds of KV beside the serving gear."""
    link_bytes_per_s: float
    recompute_s: float | None
    """As `longest_extra_gap_s`, where KV is recomputed."""
    cold_restart_s: float
    """From the stop of the service to the first token after its launch."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured, on which model. Layouts are of a100 (roomy) or l40s (tight)."""

    model: Mapping[str, Any]
    memory: Mapping[str, str]
    walk: tuple[tuple[str, str], ...]
    max_tokens: int


def even(gpu_type: str, layers: int, *tps: int) -> str:
    """A layout of stages of the same depth, by their TP degrees."""
    depth = layers // len(tps)
    parts = [f"{gpu_type} tp{tp} [{n * depth},{(n + 1) * depth})" for n, tp in enumerate(tps)]
    return " → ".join(parts)


def _walk(layers: int) -> tuple[tuple[str, str], ...]:
    def a100(*tps: int) -> str:
        return even("a100", layers, *tps)

    third = layers // 3
    uneven = f"a100 tp2 [0,{2 * third}) → a100 tp1 [{2 * third},{layers})"
    return (
        (a100(1), a100(1, 1)),
        (a100(1, 1), a100(1, 1, 1)),
        (a100(1, 1, 1), a100(1)),
        (a100(1), a100(2)),
        (a100(2), a100(3)),
        (a100(3), a100(1)),
        (a100(1, 1), a100(2)),
        (a100(2), a100(1, 1, 1)),
        (a100(1, 1, 1), uneven),
        (a100(1), f"2x({a100(1)})"),
        (even("l40s", layers, 1, 1), even("l40s", layers, 2)),
    )


QUICK = Plan(
    model={"layers": 6, "hidden": 48, "heads": 6, "kv_heads": 3, "intermediate": 768},
    memory={"a100": "64MiB", "l40s": "6MiB"},
    walk=tuple(_walk(6)[n] for n in (0, 6, 10)),
    max_tokens=300,
)
FULL = Plan(
    model={"layers": 12, "hidden": 192, "heads": 6, "kv_heads": 6, "intermediate": 1536},
    memory={"a100": "512MiB", "l40s": "94MiB"},
    walk=_walk(12),
    max_tokens=300,
)


def measure_shifts(home: Path, plan: Plan, say: Say) -> list[ShiftFigures]:
    """All shifts of a plan. Raises FlexslurmErrors of what cannot be launched or shifted."""
    from flexslurm.engine.tiny import write_tiny_model

    model = write_tiny_model(home / "model", **plan.model)
    say("a service is launched, stopped, and launched again")
    with launched(home / "moving", model, plan, {}) as service:
        restart_s = service.cold_restart()
        calm = service.calm()
        rounds = [service.round(*change, say) for change in plan.walk]
    say("the same with KV recomputed")
    with launched(home / "recomputing", model, plan, _RECOMPUTING) as service:
        again = [service.round(*change, say) for change in plan.walk]
    if any(one.tokens != [run.tokens for run in calm] for one in again):
        raise ServiceError("tokens differ from the undisturbed run's where KV is recomputed")
    link = loopback_bytes_per_s()
    return [
        _figures(model, calm, one, other, link, restart_s)
        for one, other in zip(rounds, again, strict=True)
    ]


def _figures(
    model: Path, calm: list[StreamRun], one: Round, other: Round, link: float, restart_s: float
) -> ShiftFigures:
    from flexslurm.cli.bench_least import least_bytes, padding_bytes

    line = one.line
    padded = int(line["weights_bytes"])
    padding = padding_bytes(model, BLOCK_TOKENS, one.after, padded)
    from_outside = padded - padding - int(line["kept_bytes"])
    return ShiftFigures(
        before=str(line["from"]),
        after=str(line["to"]),
        mode=str(line["mode"]),
        tokens_equal=one.tokens == [run.tokens for run in calm],
        longest_extra_gap_s=_rounded(one.extra_gap_s),
        pause_s=float(line["pause_s"]),
        decode_step_s=round(one.step_s, 4),
        bytes_moved=from_outside + int(line["kv_bytes"]),
        bytes_optimal=least_bytes(model, BLOCK_TOKENS, one.before, one.after, one.computed),
        transfer_s=round(float(line["load_s"]) + float(line["transfer_s"]), 4),
        link_bytes_per_s=round(link),
        recompute_s=None if other.line["sequences_moved"] else _rounded(other.extra_gap_s),
        cold_restart_s=round(restart_s, 3),
    )


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)


# ---------------------------------------------------------------------------------- one shift


@dataclass(slots=True)
class Round:
    """Streams through one shift. Times are seconds on the monotonic clock."""

    runs: list[StreamRun]
    before: StatusAnswer
    after: StatusAnswer
    line: dict[str, Any]
    """The shift in the head's history."""
    asked_at: float
    seen_at: float
    """When its gear was seen to serve."""
    cut_at: float
    """When the head opened the new gear."""
    prompt_tokens: int
    computed: list[int] = field(init=False)
    """Tokens of each stream whose KV was there at the cut-over."""

    def __post_init__(self) -> None:
        self.computed = [
            self.prompt_tokens + seen - 1 for run in self.runs if (seen := self._seen(run))
        ]

    @property
    def tokens(self) -> list[list[int]]:
        return [run.tokens for run in self.runs]

    def _seen(self, run: StreamRun) -> int:
        """Tokens before the cut-over: no step was under way then, and the next takes a while."""
        return sum(at <= self.cut_at for at in run.times)

    @property
    def step_s(self) -> float:
        """In the slower gear."""
        old = [b - a for run in self.runs for a, b in pairwise(run.times) if b <= self.asked_at]
        new = [b - a for run in self.runs for a, b in pairwise(run.times) if a >= self.seen_at]
        return max((statistics.median(gaps) for gaps in (old, new) if gaps), default=0.0)

    @property
    def extra_gap_s(self) -> float | None:
        """None: no stream lived through."""
        lived = [run for run in self.runs if run.times and run.times[-1] > self.cut_at]
        gaps = [
            b - a
            for run in lived
            for a, b in pairwise(run.times)
            if b >= self.asked_at and a <= self.seen_at
        ]
        return max(max(gaps) - self.step_s, 0.0) if gaps else None


# ------------------------------------------------------------------------------------ a service


@contextmanager
def launched(home: Path, model: Path, plan: Plan, env: Mapping[str, str]) -> Iterator[BenchService]:
    """Launch as `flexslurm launch --cluster local` does; end it whatever happens."""
    service = parse_section(Service, yaml.safe_dump(_service(model)), "service.yaml")
    site = parse_section(Site, yaml.safe_dump(_site(plan, env)), "site.yaml")
    directory = ServiceDir(home / "service")
    made = BenchService(launching.plan_launch(service, site, directory, "local", True), plan)
    try:
        made.launch()
        yield made
    finally:
        stop_service(directory, 0.0, 30.0, lambda _: None)


def _service(model: Path) -> dict[str, Any]:
    return {
        "name": "bench",
        "model": {"path": str(model), "dtype": "float64", "name": "bench"},
        "pool": [
            {"gpu_type": "a100", "gpus": 4, "count": 1},
            {"gpu_type": "l40s", "gpus": 2, "count": 1},
        ],
        "serving": {
            "block_tokens": BLOCK_TOKENS, "max_batch": 2 * STREAMS, "max_batch_tokens": 64,
            "max_context": 512,
        },
        "workload": {"prompt_tokens": PROMPT_BYTES, "output_tokens": 300},
    }  # fmt: skip


def _site(plan: Plan, env: Mapping[str, str]) -> dict[str, Any]:
    return {
        "name": "bench",
        "slurm": {"poll_interval": "0.5s", "kill_wait": "2s"},
        "env": dict(env),
        "gpu_types": {
            name: {"memory": memory, "virtual": {}} for name, memory in plan.memory.items()
        },
    }


class BenchService:
    """A service that is asked for gears while it streams."""

    def __init__(self, plan: launching.LaunchPlan, bench: Plan) -> None:
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
        return self._finish(*self._open(bodies))[0].times[0] - began

    def calm(self) -> list[StreamRun]:
        """The streams without any disturbance."""
        return self._finish(*self._open(self._bodies()))

    def round(self, start: str, to: str, say: Say) -> Round:
        """From one gear into another, in the middle of the streams."""
        self._shift(start)
        before = ask_status(self._directory)
        runs, threads = self._open(self._bodies())
        _until(lambda: all(len(run.times) >= _BEGUN or run.error for run in runs))
        asked_at = time.monotonic()
        epoch = self._shift(to)
        seen_at = time.monotonic()
        after = ask_status(self._directory)
        self._finish(runs, threads)
        last = ask_status(self._directory)
        line = next((dict(one) for one in last.shifts if one["epoch"] == epoch), None)
        if line is None:
            raise ServiceError(f"the head has no history of epoch {epoch}")
        say(f"{line['from']}  ⇒  {line['to']}: {line['mode']}, {line['outcome']}")
        return Round(
            runs=runs,
            before=before,
            after=after,
            line=line,
            asked_at=asked_at,
            seen_at=seen_at,
            cut_at=self._cut_at(epoch),
            prompt_tokens=self._prompt_tokens(),
        )

    def _shift(self, to: str) -> int:
        """Go into a gear; returns the epoch under which it was installed last."""
        answer = ask(self._directory, ShiftAsk(to=to), 15.0)
        if not isinstance(answer, ShiftAnswer):
            raise ServiceError("the head gave another answer than the plan of a shift")
        found: list[int] = []

        def there() -> bool:
            status = ask_status(self._directory)
            if status.state != "serving" or status.gear is None:
                return False
            if status.epoch < answer.epoch or status.gear.layout() != answer.to:
                return False
            found.append(status.epoch)
            return True

        _until(there)
        return found[-1]

    def _cut_at(self, epoch: int) -> float:
        """When the head went over, on our monotonic clock; it runs on this machine."""
        ahead_s = time.time() - time.monotonic()
        return float(self._noted("switched", epoch=epoch)["at"]) - ahead_s

    def _prompt_tokens(self) -> int:
        """All prompts are equally long; the head has written down how long."""
        return int(self._noted("accepted")["prompt"])

    def _noted(self, event: str, **wanted: object) -> dict[str, Any]:
        """The last such record of the head's journal."""
        records, _ = read_journal(self._directory.journal)
        for record in reversed(records):
            if {"event": event, **wanted}.items() <= record.items():
                return record
        raise ServiceError(f"the head has written down no '{event}' of {wanted}")

    def _open(self, bodies: Sequence[dict[str, Any]]) -> Any:
        head = self._directory.head()
        if head is None:
            raise ServiceError("the head has gone")
        return open_streams(head.api, bodies)

    def _finish(self, runs: list[StreamRun], threads: Sequence[Any]) -> list[StreamRun]:
        for thread in threads:
            thread.join(180.0)
        error = next((run.error for run in runs if run.error), "")
        if error or any(run.finish is None for run in runs):
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


def _until(done: Callable[[], bool], timeout_s: float = 90.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not done():
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"the bench waited {timeout_s:g} s for what did not come")
        time.sleep(0.01)
