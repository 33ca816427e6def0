"""Estimates against reality: whole services on virtual GPUs, both pacings, under a full load.

Prints, for every gear, tokens per second and time per token as predicted and as served.
"""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from flexslurm.config.site import Site
from flexslurm.gear import Gear, Signature
from flexslurm.planner.estimate import estimate
from flexslurm.planner.files import load_acted, load_profiles, load_spec
from flexslurm.planner.planner import Planner
from flexslurm.planner.problem import StageKind
from flexslurm.planner.profiles import Profile
from flexslurm.planner.topology import Topology
from flexslurm.planner.workload import Goal, Limits, Workload
from tests.service_harness import Ask, RunningService, running, stream

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(900)]

TinyModels = Callable[..., Path]
PROMPT, OUTPUT = 48, 48
SERVING = {
    "block_tokens": 16, "max_batch": 12, "max_batch_tokens": 96, "max_context": 256,
    "memory_fraction": 1.0, "heartbeat": "0.3s", "lost_after": "5s",
}  # fmt: skip
LIMITS = Limits(16, 12, 96, 256, 1.0)
WARM_S, WINDOW_S = 6.0, 14.0


@dataclass(frozen=True)
class Case:
    """A pool, and its GPUs' memory in multiples of the weights and KV of a full batch."""

    name: str
    pool: str
    memory: float


CASES = (
    Case("one GPU", "big:1", 3.0),
    Case("two copies", "big:1x2", 3.0),
    Case("two stages", "big:1x2", 0.6),
    Case("two unequal stages", "big:1,mid:1", 0.6),
    Case("three stages", "big:1x2,mid:1", 0.36),
    Case("a group of two", "mid:2", 0.6),
    Case("a group and a stage", "mid:2,big:1", 0.4),
)


@dataclass(frozen=True)
class Served:
    tokens_per_s: float
    tpot_s: float


def _about(draw: random.Random, mean: int) -> int:
    """Lengths differ, or all requests would go through their phases together."""
    return draw.randint(mean // 2, mean * 3 // 2)


class Load:
    """Clients that each ask anew as soon as they are answered."""

    def __init__(self, service: RunningService, clients: int) -> None:
        self.asks: list[Ask] = []
        self._service, self._over = service, threading.Event()
        self._threads = [
            threading.Thread(target=self._client, args=(n,), daemon=True) for n in range(clients)
        ]

    def measure(self) -> Served:
        for thread in self._threads:
            thread.start()
        time.sleep(WARM_S)
        began = time.monotonic()
        time.sleep(WINDOW_S)
        ended = time.monotonic()
        self._over.set()
        for thread in self._threads:
            thread.join(60)
        assert not any(ask.error for ask in self.asks), [a.error for a in self.asks if a.error]
        given = [t for ask in list(self.asks) for t in ask.times if began <= t < ended]
        paces = [
            (ask.times[-1] - ask.times[0]) / (len(ask.times) - 1)
            for ask in list(self.asks)
            if len(ask.times) > 1 and began <= ask.times[0] and ask.times[-1] < ended
        ]
        return Served(len(given) / (ended - began), sum(paces) / len(paces))

    def _client(self, number: int) -> None:
        turn = 0
        while not self._over.is_set():
            draw = random.Random(number * 1000 + turn)
            prompt = [draw.randint(1, 200) for _ in range(_about(draw, PROMPT))]
            ask = Ask(prompt, _about(draw, OUTPUT))
            self.asks.append(ask)
            stream(self._service.endpoint, ask)
            turn += 1


def compare(
    home: Path,
    model: Path,
    site: dict[str, Any],
    case: Case,
    profiles: Mapping[StageKind, Profile],
) -> str:
    """Serve a case and hold it against its estimate; returns a line of the report."""
    spec = load_spec(str(model), "float32")
    whole = spec.weight_bytes() + spec.kv_bytes_per_token() * 12 * (PROMPT + OUTPUT) * 3 // 2
    for entry in site["gpu_types"].values():
        entry["memory"] = int(whole * case.memory)
    topology = Topology.from_site(Site.model_validate(site), "float32")
    goal = Goal(Workload(PROMPT, OUTPUT), limits=LIMITS)
    pool = Signature.parse(case.pool)
    acted = load_acted(topology, "float32")
    planner = Planner(spec, topology, goal, pool, acted=acted, profiles=profiles)
    service = {
        "name": "tiny",
        "model": {"path": str(model), "dtype": "float32", "name": "tiny"},
        "pool": [{"gpu_type": s.gpu_type, "gpus": s.gpus} for s in pool.nodes()],
        "serving": SERVING,
        "workload": {"prompt_tokens": PROMPT, "output_tokens": OUTPUT},
    }
    with running(home, service, site) as live:
        status = live.until(
            lambda a: a.gear is not None and a.gear.signature == pool and a.state == "serving"
        )
        gear = status.gear
        assert isinstance(gear, Gear)
        expected = estimate(planner.problem, gear)
        served = Load(live, sum(one.batch for one in expected)).measure()
    total = sum(one.tokens_per_s for one in expected)
    tpot = sum(one.tpot_s * one.tokens_per_s for one in expected) / total
    off = (served.tokens_per_s / total - 1, served.tpot_s / tpot - 1)
    line = (
        f"{case.name:22} {gear.layout():58} "
        f"{total:8.1f} {served.tokens_per_s:8.1f} {off[0]:+7.1%}   "
        f"{tpot * 1e3:7.2f} {served.tpot_s * 1e3:7.2f} {off[1]:+7.1%}"
    )
    print("\n" + line, flush=True)
    assert max(abs(o) for o in off) <= 0.15, line
    return line


def acted_site() -> dict[str, Any]:
    def gpu(bandwidth: str, flops: str) -> dict[str, Any]:
        return {
            "memory_bandwidth": bandwidth,
            "flops": flops,
            "virtual": {"pacing": "acted", "acts_model": "llama-2-13b"},
        }

    return {
        "name": "acted",
        "gpu_types": {"big": gpu("1.5TB/s", "300TFLOPS"), "mid": gpu("0.9TB/s", "180TFLOPS")},
        "network": {"node_link": {"bandwidth": "12.5GB/s", "latency": "5us"}},
    }


def paced_site() -> dict[str, Any]:
    return {
        "name": "paced",
        "gpu_types": {"big": {"virtual": {"speed": 0.2}}, "mid": {"virtual": {"speed": 0.12}}},
    }


@pytest.fixture(scope="module")
def small(tiny_models: TinyModels) -> Path:
    """For acting: its own arithmetic should take next to no time."""
    return tiny_models(layers=12, hidden=96, intermediate=512, dtype="float32")


@pytest.fixture(scope="module")
def middling(tiny_models: TinyModels) -> Path:
    """For its own pace: enough arithmetic that the rest does not show."""
    return tiny_models(
        layers=12, hidden=384, heads=6, kv_heads=3, intermediate=1024, dtype="float32"
    )


@pytest.fixture(scope="module")
def measured(middling: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Profiles as `flexslurm profile` measures them."""
    home = tmp_path_factory.mktemp("profiles")
    site = paced_site()
    for entry in site["gpu_types"].values():
        entry["memory"] = "2GiB"
    (home / "site.yaml").write_text(yaml.safe_dump(site))
    main = "import sys; from flexslurm.cli.main import main; sys.exit(main())"
    for gpu_type, degrees in (("big", (1,)), ("mid", (1, 2))):
        command = [
            sys.executable, "-c", main, "profile", str(middling), "--site",
            str(home / "site.yaml"), "--gpu-type", gpu_type, "--local", "--dtype", "float32",
            "--max-batch", "12", "--max-tokens", "96", "--max-context", "256",
            "--block-tokens", "16", "--minutes", "0.7", "--out", str(home / "csv"),
            *(word for tp in degrees for word in ("--tp", str(tp))),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stderr
    yield home / "csv"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_acted(case: Case, small: Path, tmp_path: Path) -> None:
    compare(tmp_path, small, acted_site(), case, {})


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_at_its_own_pace(case: Case, middling: Path, measured: Path, tmp_path: Path) -> None:
    spec = load_spec(str(middling), "float32")
    site = paced_site()
    for entry in site["gpu_types"].values():
        entry["memory"] = "2GiB"
    topology = Topology.from_site(Site.model_validate(site), "float32")
    compare(tmp_path, middling, paced_site(), case, load_profiles([measured], spec, topology))
