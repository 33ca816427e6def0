#!/usr/bin/env python
"""Serves several gears on virtual GPUs and holds what they do against what the planner expects.

For each pacing: the profiles are measured by `flexslurm profile`, each gear is served for real and
kept full of requests, and throughput and time per output token are compared. A table is printed;
the exit status is 1 when a figure is further off than the goal.

    python tests/bench/estimates_against_reality.py [acted|as-it-comes] [GEAR ...] [--keep DIR]

With --keep, models and profiles stay in DIR and are taken from there the next time.
"""

# ruff: noqa: E402 - the environment is set before torch is imported
from __future__ import annotations

import argparse
import os
import random
import re
import sys
import tempfile
import threading
import time
import urllib.request
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_BUILD_OPS", "0")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ["HF_HUB_OFFLINE"] = "1"
ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import leaks
import yaml

from flexslurm.cli.endings import endings_raise

os.environ[leaks.TOKEN_VARIABLE] = uuid.uuid4().hex

from flexslurm.cli.main import run as flexslurm
from flexslurm.config.schema import parse_section
from flexslurm.config.service import Service
from flexslurm.config.site import Site
from flexslurm.engine.tiny import write_tiny_model
from flexslurm.gear import Gear
from flexslurm.planner.files import load_acted, load_profiles, load_spec
from flexslurm.planner.problem import Problem, StageKind
from flexslurm.planner.topology import Topology
from flexslurm.planner.workload import Goal
from tests.service_harness import Ask, RunningService, running, stream, tiny_service

GOAL = 0.15
PROMPT, OUTPUT = 32, 24
MAX_BATCH, MAX_TOKENS, CONTEXT, BLOCK = 8, 64, 128, 16
WARM_S, WINDOW_S = 4.0, 14.0
MORE = 1.5
"""Requests that are there, for each that can run: a free place is taken at once."""
SMALL, SMALLER, LARGE = 0.8, 0.42, 8.0
"""Memory of a GPU, in weights of the whole model."""


@dataclass(frozen=True)
class Case:
    """One gear: the pool that gives it."""

    name: str
    pool: tuple[tuple[str, int, int], ...]
    """(GPU type, GPUs of the node, nodes)."""
    memory: float = LARGE
    tpot: str | None = None
    """A target that one GPU alone does not meet."""


CASES = (
    Case("one GPU", (("a100", 1, 1),)),
    Case("two replicas", (("a100", 2, 1),)),
    Case("unequal replicas", (("a100", 1, 1), ("l40s", 1, 1))),
    Case("tensor parallel", (("a100", 2, 1),), tpot="tight"),
    Case("two stages", (("a100", 1, 2),), memory=SMALL),
    Case("unequal stages", (("a100", 1, 1), ("l40s", 1, 1)), memory=SMALL),
    Case("stages of two GPUs", (("a100", 2, 2),), memory=SMALLER),
)


PROFILED = (("a100", 1), ("a100", 2), ("l40s", 1))
"""GPU type, and GPUs of a stage."""


@dataclass(frozen=True)
class World:
    """One pacing: its model, and the two GPU types."""

    pacing: str
    model: dict[str, Any]
    virtual: dict[str, dict[str, Any]]
    tight: str
    """A TPOT that needs two GPUs in a group."""
    dtype: str = "float32"

    def site(self, memory_bytes: int) -> dict[str, Any]:
        return {
            "name": self.pacing,
            "slurm": {"poll_interval": "0.2s", "kill_wait": "2s"},
            "gpu_types": {
                name: {"memory": memory_bytes, **entry} for name, entry in self.virtual.items()
            },
            "network": {"interface": "lo", "node_link": {"bandwidth": "1GB/s", "latency": "50us"}},
        }


def _acted(card: str) -> dict[str, Any]:
    return {"model": card, "virtual": {"pacing": "acted", "acts_model": "llama-3.1-70b"}}


WORLDS = (
    World(
        "acted",
        {"layers": 4, "hidden": 64, "heads": 8, "kv_heads": 4, "intermediate": 1024},
        {"a100": _acted("a100-80"), "l40s": _acted("l40s")},
        tight="70ms",
        dtype="bfloat16",
    ),
    World(
        "as-it-comes",
        {"layers": 8, "hidden": 256, "heads": 8, "kv_heads": 4, "vocab": 2048},
        {"a100": {"virtual": {"speed": 0.06}}, "l40s": {"virtual": {"speed": 0.04}}},
        tight="120ms",
    ),
)


# ------------------------------------------------------------------------------------ expected


@dataclass(frozen=True)
class Figures:
    tokens_per_s: float
    tpot_s: float


def expected(gear: Gear, problem: Problem) -> Figures:
    """What the planner's model says of a gear that is kept full."""
    rates, cycles = [], []
    for replica in gear.replicas:
        depth = len(replica.stages)
        slots = -(-replica.max_batch // depth)
        slowest = max(
            float(problem.times(StageKind(s.gpu_type, s.tp), slots, depth)[s.lo, s.hi])
            for s in replica.stages
        )
        cycles.append(float(problem.cycle_s(depth, slowest)))
        rates.append(float(problem.tokens_per_s(replica.max_batch, cycles[-1])))
    tpot = sum(r * c for r, c in zip(rates, cycles, strict=True)) / sum(rates)
    return Figures(sum(rates), tpot)


# ------------------------------------------------------------------------------------ measured


@dataclass(eq=False)
class Client(threading.Thread):
    """Keeps one request running until told to stop."""

    endpoint: str
    number: int
    done: list[Ask] = field(default_factory=list)
    running: Ask | None = None

    def __post_init__(self) -> None:
        super().__init__(daemon=True)
        self.stop = threading.Event()

    def run(self) -> None:
        draw = random.Random(self.number)
        first = True
        while not self.stop.is_set():
            length = draw.randint(2, OUTPUT) if first else OUTPUT  # so that they do not march
            first = False
            ask = Ask([draw.randint(1, 200) for _ in range(PROMPT)], length)
            self.running = ask
            stream(self.endpoint, ask)
            assert not ask.error, ask.error
            self.done.append(ask)


def measured(service: RunningService, streams: int) -> Figures:
    """Tokens that arrive in a time window after a while of warming up, and the head's own TPOT.

    Clients do not see when a token was made: half a character is held back until it is whole.
    """
    clients = [Client(service.endpoint, number) for number in range(streams)]
    for client in clients:
        client.start()
    time.sleep(WARM_S)
    before, began = tpot_counters(service.endpoint), time.monotonic()
    time.sleep(WINDOW_S)
    after, ended = tpot_counters(service.endpoint), time.monotonic()
    for client in clients:
        client.stop.set()
    for client in clients:
        client.join(120)
    tokens = sum(began <= at < ended for c in clients for ask in c.done for at in ask.times)
    requests = after[1] - before[1]
    assert requests, "no request ended in the window"
    return Figures(tokens / (ended - began), (after[0] - before[0]) / requests)


def tpot_counters(endpoint: str) -> tuple[float, float]:
    """Sum and count of the requests' time per output token."""
    with urllib.request.urlopen(f"{endpoint}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    name = "flexslurm_request_time_per_output_token_seconds"
    found = {
        kind: float(re.search(rf"^{name}_{kind}{{.*}} (.*)$", text, re.M)[1])
        for kind in ("sum", "count")
    }
    return found["sum"], found["count"]


# ------------------------------------------------------------------------------------- running


def service_of(world: World, case: Case, model: Path) -> dict[str, Any]:
    made = tiny_service(
        model, [(kind, gpus, nodes) for kind, gpus, nodes in case.pool],
        block_tokens=BLOCK, max_batch=MAX_BATCH, max_batch_tokens=MAX_TOKENS, max_context=CONTEXT,
        lost_after="10s",
    )  # fmt: skip
    made["model"]["dtype"] = world.dtype
    made["workload"] = {"prompt_tokens": PROMPT, "output_tokens": OUTPUT}
    if case.tpot is not None:
        made["slo"] = {"tpot": world.tight}
    return made


def measure_profiles(
    world: World, model: Path, site: Path, folder: Path, cases: Sequence[Case]
) -> None:
    """Those of the cases' GPU types that are not there already."""
    used = {gpu_type for case in cases for gpu_type, _, _ in case.pool}
    for gpu_type, tp in PROFILED:
        if (
            gpu_type not in used
            or (folder / f"{model.name}-{gpu_type}-tp{tp}-{world.dtype}.csv").exists()
        ):
            continue
        done = flexslurm([
            "profile", str(model), "--local", "--site", str(site), "--gpu-type", gpu_type,
            "--tp", str(tp), "--dtype", world.dtype, "--max-batch", str(MAX_BATCH),
            "--max-tokens", str(MAX_TOKENS), "--max-context", str(CONTEXT),
            "--block-tokens", str(BLOCK), "--out", str(folder), "--quiet",
        ])  # fmt: skip
        if done:
            sys.exit(done)


def run_world(world: World, names: Sequence[str], home: Path) -> float:
    """Measure all gears of a pacing and print them; returns the worst relative error."""
    model = home / "model"
    if not model.exists():
        write_tiny_model(model, "llama", dtype=world.dtype, **world.model)
    spec = load_spec(str(model), world.dtype)
    weights = spec.weight_bytes()
    (home / "site.yaml").write_text(yaml.safe_dump(world.site(round(LARGE * weights))))
    cases = [case for case in CASES if not names or case.name in names]
    measure_profiles(world, model, home / "site.yaml", home / "profiles", cases)
    print(f"\n{world.pacing}: {PROMPT} + {OUTPUT} tokens, up to {MAX_BATCH} sequences a replica")
    print(
        f"{'gear':<20}{'tokens/s: expected':>19}{'measured':>10}{'error':>8}"
        f"{'TPOT ms: expected':>20}{'measured':>10}{'error':>8}   layout"
    )
    worst = 0.0
    for number, case in enumerate(cases):
        asked, site = service_of(world, case, model), world.site(round(case.memory * weights))
        topology = Topology.from_site(parse_section(Site, yaml.safe_dump(site), "s"), world.dtype)
        goal = Goal.from_service(parse_section(Service, yaml.safe_dump(asked), "s"))
        problem = Problem(
            spec, topology, goal, load_acted(topology, world.dtype),
            load_profiles([home / "profiles"], spec, topology),
        )  # fmt: skip
        run_home = Path(tempfile.mkdtemp(prefix=f"g{number}-", dir=home))
        with running(run_home, asked, site, 150.0) as service:
            gear = full_gear(service, case)
            wanted = expected(gear, problem)
            found = measured(service, round(MORE * sum(r.max_batch for r in gear.replicas)))
        worst = max(worst, _print(case.name, gear, wanted, found))
    return worst


def full_gear(service: RunningService, case: Case) -> Gear:
    """The gear of the whole pool: a node that is late comes by a shift."""
    gpus = sum(each * nodes for _, each, nodes in case.pool)
    gear = service.until(lambda status: status.gear is not None and status.gear.gpus == gpus).gear
    assert gear is not None
    return gear


def _print(name: str, gear: Gear, wanted: Figures, found: Figures) -> float:
    rate = wanted.tokens_per_s / found.tokens_per_s - 1
    tpot = wanted.tpot_s / found.tpot_s - 1
    print(
        f"{name:<20}{wanted.tokens_per_s:>19.1f}{found.tokens_per_s:>10.1f}{rate:>8.1%}"
        f"{wanted.tpot_s * 1e3:>20.1f}{found.tpot_s * 1e3:>10.1f}{tpot:>8.1%}   {gear.layout()}",
        flush=True,
    )
    return max(abs(rate), abs(tpot))


def main(argv: Sequence[str]) -> int:
    pacings = [world.pacing for world in WORLDS]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", metavar="PACING|GEAR", help="all by default")
    parser.add_argument("--keep", type=Path, help="where models and profiles are kept")
    asked = parser.parse_intermixed_args(argv)
    chosen = [word for word in asked.words if word in pacings] or pacings
    names = [word for word in asked.words if word not in pacings]
    unknown = set(names) - {case.name for case in CASES}
    if unknown:
        parser.error(f"no such gear: {', '.join(sorted(unknown))}")
    worst = 0.0
    for world in WORLDS:
        if world.pacing in chosen:
            with tempfile.TemporaryDirectory(prefix="flexslurm-bench-") as scratch:
                home = asked.keep / world.pacing if asked.keep else Path(scratch)
                home.mkdir(parents=True, exist_ok=True)
                worst = max(worst, run_world(world, names, home))
    print(f"\nworst error {worst:.1%}; the goal is {GOAL:.0%}")
    return int(worst > GOAL)


if __name__ == "__main__":
    with endings_raise():
        sys.exit(main(sys.argv[1:]))
