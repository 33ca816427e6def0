"""The gears of a small mixed pool, pinned: a change of the cost model or the search shows here.

FLEXSLURM_REWRITE_GOLDEN=1 writes the file anew.
"""

from __future__ import annotations

import os
from pathlib import Path

from flexslurm.cli.plan_report import gear_table, picture
from flexslurm.gear import Gear, Signature
from flexslurm.planner.hashing import inputs_hash
from flexslurm.planner.model_spec import ModelSpec
from flexslurm.planner.planner import Planner
from flexslurm.planner.published import config_of
from flexslurm.planner.table import GearTable
from flexslurm.planner.tabulate import make_table, pilots_of
from flexslurm.planner.topology import Topology
from flexslurm.planner.workload import Goal, Slo, Workload

GOLDEN = Path(__file__).parent / "planner" / "gears.txt"


def written() -> str:
    spec = ModelSpec.from_config(config_of("qwen2.5-7b"), name="qwen2.5-7b")
    topology = Topology.from_catalogue(("a10", "h100", "t4"))
    goal = Goal(Workload(800, 200), Slo(tpot_s=0.08))
    pool = Signature.parse("a10:2x2,h100:1x1,t4:4x1,t4:3x1")
    table = GearTable(make_table(Planner(spec, topology, goal, pool), pilots_of(pool)))
    gears = {signature: table.gear(signature) for signature in table.signatures()}
    known = {signature: gear for signature, gear in gears.items() if gear is not None}
    whole = known[pool]
    assert isinstance(whole, Gear)
    lines = [
        f"inputs {inputs_hash(spec, topology, goal, pool)}",
        "",
        *gear_table(known),
        "",
        *picture(whole),
    ]
    return "\n".join(lines) + "\n"


def test_gears_are_as_pinned() -> None:
    text = written()
    if os.environ.get("FLEXSLURM_REWRITE_GOLDEN") == "1":
        GOLDEN.write_text(text, encoding="utf-8")
    assert text == GOLDEN.read_text(encoding="utf-8")
