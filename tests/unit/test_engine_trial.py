"""What a trial measures fits the memory, and its times become the rows that a profile wants."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexslurm.engine.families import check_model
from flexslurm.engine.footprint import block_bytes, stage_bytes
from flexslurm.engine.trial import (
    BODY,
    FIRST,
    INNER,
    LAST,
    Grid,
    Measurement,
    TrialLoad,
    check_rows,
    chunks_of,
    opening,
    plan,
    probes_of,
    rows_of,
)
from flexslurm.errors import CapacityError, ConfigError, DeadlineExceeded, ModelError
from flexslurm.planner.profiles import Row, read_profile, write_profile
from tests.conftest import TinyModels

GRID = Grid(max_batch=16, max_tokens=64, max_context=256, block_tokens=16)
ABOUT = {"model": "m", "gpu_type": "a", "tp": 1, "dtype": "float64"}


@pytest.mark.parametrize("arena_bytes", [1_000_000, 1_500_000, 50_000_000])
def test_stages_and_their_blocks_fit(tiny_model: Path, arena_bytes: int) -> None:
    info = check_model(tiny_model)
    runs, probes = plan(info, GRID, tp=1, dtype="float64", arena_bytes=arena_bytes)
    taken = sum(
        stage_bytes(info, r.lo, r.hi, 1, 0, "float64")
        + r.kv_blocks * block_bytes(info, r.lo, r.hi, 1, 0, "float64", 16)
        for r in runs
    )
    assert taken <= arena_bytes
    by_role = {run.role: run for run in runs}
    assert (by_role[FIRST].lo, by_role[LAST].hi) == (0, info.num_layers)
    assert 0 < by_role[BODY].lo < by_role[BODY].hi < info.num_layers, "the body has no ends"
    if by_role[BODY].layers > 1:
        assert (by_role[INNER].lo, by_role[INNER].hi) == (1, 2)
    most = max(probe.load.blocks(16) for probe in probes)
    assert all(run.kv_blocks == most for run in runs)


def test_a_large_memory_allows_every_step(tiny_model: Path) -> None:
    info = check_model(tiny_model)
    _, probes = plan(info, GRID, tp=1, dtype="float64", arena_bytes=1 << 30)
    assert probes == probes_of(GRID, info.max_context)
    loads = [probe.load for probe in probes]
    assert TrialLoad(16, 1, 256) in loads and TrialLoad(1, 64, 64) in loads
    assert max(load.new_tokens for load in loads) == GRID.max_tokens


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 5])
def test_models_of_few_layers(tiny_models: TinyModels, layers: int) -> None:
    info = check_model(tiny_models(layers=layers))
    runs, probes = plan(info, GRID, tp=1, dtype="float64", arena_bytes=1 << 30)
    by_role = {run.role: run for run in runs}
    assert (INNER in by_role) == (layers > 3)
    assert {probe.role for probe in probes} == {BODY, LAST} | ({FIRST} if layers > 3 else set())
    assert by_role[BODY].layers == max(1, layers - 1 - (layers > 3))


def test_no_memory_for_a_layer_says_how_many_bytes(tiny_model: Path) -> None:
    info = check_model(tiny_model)
    with pytest.raises(CapacityError, match=r"[\d,]+ bytes short"):
        plan(info, GRID, tp=1, dtype="float64", arena_bytes=10_000)


def test_a_degree_that_the_heads_do_not_allow(tiny_model: Path) -> None:
    info = check_model(tiny_model)
    with pytest.raises(ModelError, match="too few for 4"):
        plan(info, GRID, tp=4, dtype="float64", arena_bytes=1 << 30)


def test_a_grid_of_nothing() -> None:
    with pytest.raises(ConfigError):
        probes_of(Grid(max_context=1), 100)


def test_opening_puts_a_token_into_every_block_once() -> None:
    blocks = [chunk.blocks for step in opening(600) for chunk in step]
    assert blocks == [(n,) for n in range(600)]


def test_sequences_have_blocks_of_their_own() -> None:
    chunks = chunks_of(TrialLoad(3, 1, 33, sampled=True), 16, 100)
    assert [chunk.blocks for chunk in chunks] == [(0, 1, 2), (3, 4, 5), (6, 7, 8)]
    assert all(chunk.start == 32 and chunk.sample is not None for chunk in chunks)
    (prefill,) = chunks_of(TrialLoad(1, 20, 20), 16, 100)
    assert (prefill.start, len(prefill.tokens), prefill.sample) == (0, 20, None)


def _measured() -> list[Measurement]:
    """A GPU on which a layer takes 2 ms and 0.1 more a token, a step 3, the ends 1 and 5."""

    def layer(load: TrialLoad) -> float:
        return 2e-3 + 1e-4 * load.new_tokens

    found = [Measurement(BODY, 8, 4.0), Measurement(FIRST, 1, 9.0)]
    for load in (
        TrialLoad(1, 1, 32),
        TrialLoad(4, 1, 32),
        TrialLoad(1, 64, 64),
        TrialLoad(4, 1, 256),
    ):
        found.append(Measurement(BODY, 8, 3e-3 + 8 * layer(load), load, 3e-3 + layer(load)))
    load = TrialLoad(1, 64, 64)
    found.append(Measurement(FIRST, 1, 4e-3 + layer(load), load, 3e-3 + layer(load)))
    load = TrialLoad(4, 1, 32, sampled=True)
    found.append(Measurement(LAST, 1, 8e-3 + layer(load), load, 3e-3 + layer(load)))
    return found


def test_layers_steps_and_head_are_told_apart() -> None:
    rows = rows_of(_measured())
    assert Row("load", 8, 0, 0, 4.0) in rows
    by_phase = {(r.phase, r.batch, r.context): r.seconds for r in rows}
    assert by_phase["decode", 4, 256] == pytest.approx(8 * 2.4e-3)
    assert by_phase["prefill", 1, 64] == pytest.approx(8 * 8.4e-3)
    assert by_phase["step", 64, 0] == pytest.approx(3e-3)
    assert by_phase["first", 64, 0] == pytest.approx(1e-3)
    assert by_phase["last", 4, 0] == pytest.approx(5e-3)


def test_the_profile_gives_back_what_was_measured() -> None:
    rows = rows_of(_measured())
    profile = read_profile(write_profile(ABOUT, rows), "p.csv")
    assert profile.layer_s(4, 128, 128, 4) == pytest.approx(2.4e-3, rel=1e-3)
    assert profile.step(4) == pytest.approx(3e-3)
    assert profile.first(4) == pytest.approx(1e-3)
    assert profile.last(4) == pytest.approx(5e-3)
    assert profile.load_layer_s == pytest.approx(0.5)


def test_with_one_layer_nothing_is_taken_apart() -> None:
    rows = rows_of([Measurement(BODY, 1, 5e-3, TrialLoad(2, 1, 8), 5e-3)])
    assert rows == [Row("decode", 1, 2, 8, 5e-3)]


def test_noise_never_makes_a_time_negative() -> None:
    rows = rows_of([Measurement(BODY, 4, 1e-3, TrialLoad(2, 1, 8), 2e-3)])
    assert all(row.seconds >= 0 for row in rows)


def test_too_few_measurements_are_an_error_that_says_what_was_short() -> None:
    rows = [Row("decode", 4, 1, 8, 1.0)]
    with pytest.raises(DeadlineExceeded, match="no time for 7"):
        check_rows(rows, 7)
    with pytest.raises(CapacityError, match="KV cache"):
        check_rows(rows, 0)
    check_rows([*rows, Row("decode", 4, 2, 8, 1.0)], 0)
