"""The planner on a thousand GPUs: time, proved gap, memory; a table of ten thousand signatures."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.timeout(600)

SETUP = """
import json, resource, time
from flexslurm.gear import Gear, Signature, check_gear
from flexslurm.planner.model_spec import ModelSpec
from flexslurm.planner.planner import Planner
from flexslurm.planner.published import config_of
from flexslurm.planner.tabulate import PilotKind, make_table, pilots_of
from flexslurm.planner.table import GearTable
from flexslurm.planner.topology import Topology
from flexslurm.planner.workload import Goal, Workload

SPEC = ModelSpec.from_config(config_of("llama-3.1-70b"))
def planner(pool):
    names = tuple(sorted({s.gpu_type for s, _ in pool.counts}))
    return Planner(SPEC, Topology.from_catalogue(names), Goal(Workload(1000, 256)), pool)
def memory():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
"""


def measured(body: str) -> dict[str, float]:
    """Run in a process of its own, so that time and memory are the planner's."""
    done = subprocess.run(
        [sys.executable, "-c", SETUP + textwrap.dedent(body)],
        capture_output=True,
        text=True,
        timeout=590,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    print(answer)
    return answer


@pytest.mark.parametrize(
    "pool",
    [
        "h100:8x25,a100-80:4x75,l40s:4x75,l4:8x25",
        "h100:8x20,h100:3x10,a100-80:4x60,a100-80:7x10,l40s:4x60,l40s:2x50,t4:4x35",
    ],
)
def test_a_thousand_gpus_of_four_types(pool: str) -> None:
    answer = measured(
        f"""
        pool = Signature.parse("{pool}")
        began = time.monotonic()
        live = planner(pool)
        choice = live.choose(pool)
        gear = live.gear_of(pool, choice)
        took = time.monotonic() - began
        check_gear(gear, SPEC.num_layers)
        print(json.dumps(dict(gpus=pool.gpus(), used=gear.gpus, gap=choice.gap, seconds=took,
                              bytes=memory(), tokens_per_s=gear.estimates.tokens_per_s)))
        """
    )
    assert answer["gpus"] >= 950
    assert answer["gap"] <= 0.005
    assert answer["seconds"] < 10
    assert answer["bytes"] < 2 * 2**30


def test_a_table_of_ten_thousand_signatures() -> None:
    answer = measured(
        """
        pilots = tuple(PilotKind(Signature.parse(text), 9)
                       for text in ("h100:8x3", "a100-80:4x8", "l40s:4x8", "l4:8x3"))
        pool = Signature.of([n for p in pilots for n in p.nodes.nodes() * p.count])
        began = time.monotonic()
        data = make_table(planner(pool), pilots)
        took = time.monotonic() - began
        table = GearTable(data)
        gaps = sorted(table.find(s).gap for s in table.signatures())
        for signature in list(table.signatures())[::97]:
            gear = table.gear(signature)
            if isinstance(gear, Gear):
                check_gear(gear, SPEC.num_layers)
        print(json.dumps(dict(gpus=pool.gpus(), entries=len(table), seconds=took, bytes=memory(),
                              file_bytes=len(data), median_gap=gaps[len(gaps) // 2],
                              worst_gap=gaps[-1])))
        """
    )
    assert answer["entries"] == 10_000
    assert answer["seconds"] < 60
    assert answer["bytes"] < 2 * 2**30
    assert answer["median_gap"] <= 0.005


def test_a_lattice_of_thousands_of_signatures_is_exact() -> None:
    answer = measured(
        """
        pool = Signature.parse("a100-80:2x20,l40s:2x20,l4:1x15")
        began = time.monotonic()
        data = make_table(planner(pool), pilots_of(pool))
        took = time.monotonic() - began
        table = GearTable(data)
        worst = max(table.find(s).gap for s in table.signatures())
        print(json.dumps(dict(entries=len(table), seconds=took, bytes=memory(), worst_gap=worst)))
        """
    )
    assert answer["entries"] == 21 * 21 * 16
    assert answer["worst_gap"] == 0.0
    assert answer["seconds"] < 60


def test_a_table_of_many_shapes_is_near_and_exact_where_it_is_small() -> None:
    answer = measured(
        """
        pool = Signature.parse("a100-80:1x5,a100-80:2x5,a100-80:4x5,l40s:4x5,l40s:1x5")
        began = time.monotonic()
        data = make_table(planner(pool), pilots_of(pool))
        took = time.monotonic() - began
        table = GearTable(data)
        gaps = [(s.gpus(), table.find(s).gap) for s in table.signatures()]
        middle = sorted(gap for _, gap in gaps)[len(gaps) // 2]
        print(json.dumps(dict(entries=len(table), seconds=took, bytes=memory(), median_gap=middle,
                              small_gap=max(gap for gpus, gap in gaps if gpus <= 6))))
        """
    )
    assert answer["entries"] == 6**5
    assert answer["small_gap"] == 0.0
    assert answer["median_gap"] <= 0.01
    assert answer["seconds"] < 60
