"""What `flexslurm profile` plans to measure and makes of it; nothing is run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flexslurm.cli import served_trial
from flexslurm.cli.profile_command import SERVED_BATCH, plan_serving, served_rows
from flexslurm.cli.served_trial import ServeAsk
from flexslurm.config.schema import parse_section
from flexslurm.config.service import Service
from flexslurm.config.site import Site
from flexslurm.engine.served_cycles import Cycles
from flexslurm.engine.trial import Served
from flexslurm.errors import ServiceError
from flexslurm.planner.profiles import Row, read_profile, write_profile

ABOUT = {"model": "llama", "gpu_type": "plain", "tp": 1, "dtype": "float64"}
LAYER_S, STEP_S, HEAD_S = 2e-3, 1e-3, 7e-3


def site(memory: str = "64MiB") -> Site:
    return parse_section(
        Site,
        f"name: s\ngpu_types: {{plain: {{memory: {memory}, virtual: {{}}}}}}\n"
        "measured: {profiles: /nowhere}\n",
        "site.yaml",
    )


def options(model: Path) -> dict[str, Any]:
    return {
        "model": model, "dtype": "float64", "gpu_type": "plain", "max_batch": 8,
        "max_tokens": 64, "max_context": 128, "block_tokens": 16,
    }  # fmt: skip


def ask(model: Path, memory: str = "64MiB") -> tuple[ServeAsk | None, list[str]]:
    said: list[str] = []
    return plan_serving(site(memory), 1, options(model), said.append), said


def test_the_replica_that_is_served_is_a_service_of_its_own(tiny_model: Path) -> None:
    found, said = ask(tiny_model)
    assert found is not None and said == []
    assert found.layout == "plain tp1 [0,6)"
    service = parse_section(Service, str(found.service()), "service")
    assert (service.serving.max_batch, service.workload.prompt_tokens) == (8, 32)
    assert "measured" in found.site and found.site["measured"]["profiles"] is None


def test_a_head_that_does_not_answer_leaves_what_was_measured_before() -> None:
    """Of a service only a FlexslurmError is taken for one that could not be served."""
    with pytest.raises(ServiceError, match="metrics cannot be read"):
        served_trial._figures("http://127.0.0.1:9", ["flexslurm_steps_total"])


def test_no_more_streams_than_a_jobs_cores_can_read(tiny_model: Path) -> None:
    wide = {**options(tiny_model), "max_batch": 500}
    found = plan_serving(site(), 1, wide, print)
    assert found is not None and found.batch == SERVED_BATCH


def test_a_small_memory_serves_fewer_and_none_is_said(tiny_model: Path) -> None:
    few, _ = ask(tiny_model, "2MiB")
    assert few is not None and 0 < few.batch < 8
    none, said = ask(tiny_model, "1MiB")
    assert none is None and "do not hold the whole model" in said[0]


@pytest.mark.parametrize(
    ("step_s", "expected_s"),
    [
        pytest.param(6 * LAYER_S + STEP_S, HEAD_S, id="as-alone"),
        pytest.param(6 * LAYER_S + STEP_S + 3e-3, HEAD_S + 3e-3, id="longer-in-a-service"),
        pytest.param(6 * LAYER_S, HEAD_S, id="longer-alone"),
    ],
)
def test_what_a_cycle_takes_besides_is_what_the_stage_does_not(
    tiny_model: Path, step_s: float, expected_s: float
) -> None:
    cycles = Cycles(step_s + HEAD_S, step_s, HEAD_S, HEAD_S, HEAD_S, 5e-4)
    (row,), remarks = rows_of_served(tiny_model, cycles)
    assert row[:4] == ("head", 6, 8, 0) and len(remarks) == 1
    assert row.seconds == pytest.approx(expected_s, abs=2e-4)


@pytest.mark.parametrize("slower_s", [0.0, 4e-3, -4e-3])
@pytest.mark.parametrize(("more_s", "expected_s"), [(5e-3, 5e-3), (-5e-3, 0.0)])
def test_what_a_second_stage_adds_is_what_its_steps_do_not(
    tiny_model: Path, slower_s: float, more_s: float, expected_s: float
) -> None:
    """Two steps of three layers, the head once, and the rest is passing on; never below 0.

    A machine that was slower while it served, or faster, was so for both.
    """
    step_s, half_s = 6 * LAYER_S + STEP_S + slower_s, 3 * LAYER_S + STEP_S
    whole = Cycles(step_s + HEAD_S, step_s, HEAD_S, HEAD_S, HEAD_S, 5e-4)
    cycle_s = 2 * half_s + slower_s + HEAD_S + more_s
    halves = Cycles(cycle_s, half_s, HEAD_S + more_s, 0.0, 0.0, 0.0)
    (_, row), remarks = rows_of_served(tiny_model, whole, halves)
    assert row[:4] == ("pass", 6, 8, 0) and len(remarks) == 2
    assert row.seconds == pytest.approx(expected_s, abs=3e-4)


def rows_of_served(
    model: Path, whole: Cycles, halves: Cycles | None = None
) -> tuple[list[Row], list[str]]:
    """On a machine of flat times: each layer and each step take theirs, whatever they hold."""
    rows = [Row("decode", 1, batch, 32, LAYER_S) for batch in (1, 8, 64)]
    rows += [Row("prefill", 1, 1, new, LAYER_S) for new in (8, 64)]
    rows += [Row("step", 1, 1, 0, STEP_S)]
    profile = read_profile(write_profile(ABOUT, rows), "p.csv")
    return served_rows(Served(6, 8, 32, 32, whole, halves), profile, site(), options(model))


def test_virtual_gpus_are_served_by_two_stages_too(tiny_model: Path) -> None:
    found, _ = ask(tiny_model)
    assert found is not None and found.halves
    assert found.layout_of_halves == "plain tp1 [0,3) → plain tp1 [3,6)"
    assert parse_section(Service, str(found.service()), "service").pool[0].count == 2
    real = parse_section(Site, "name: s\ngpu_types: {plain: {model: l4}}\n", "site.yaml")
    alone = plan_serving(real, 1, options(tiny_model), print)
    assert alone is not None and not alone.halves
    assert parse_section(Service, str(alone.service()), "service").pool[0].count == 1


def test_a_remark_is_for_those_who_look_at_the_file() -> None:
    rows = [Row("decode", 1, batch, 32, LAYER_S) for batch in (1, 8)]
    text = write_profile(ABOUT, rows, ["a served cycle: 3.000 ms"])
    assert text.endswith("# a served cycle: 3.000 ms\n")
    assert read_profile(text, "p.csv") == read_profile(write_profile(ABOUT, rows), "p.csv")
