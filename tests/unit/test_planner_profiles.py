"""Measured profiles: read, fitted, used in place of the formula; malformed ones refused."""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec
import pytest
from planned_gear import plan_gear

from flexslurm.errors import ConfigError
from flexslurm.gear import Gear, Signature
from flexslurm.planner.cost import LayerSums, stage_cost
from flexslurm.planner.files import load_profiles
from flexslurm.planner.model_spec import ModelSpec
from flexslurm.planner.problem import Problem, StageKind
from flexslurm.planner.profiles import Ramp, Row, read_profile, write_profile
from flexslurm.planner.published import config_of
from flexslurm.planner.topology import Link, Topology
from flexslurm.planner.workload import EngineLimits, Goal, Slo, Workload

ABOUT = {"model": "smollm2-135m", "gpu_type": "l4", "tp": 1, "dtype": "bfloat16"}
SPEC = ModelSpec.from_config(config_of("smollm2-135m"), name="smollm2-135m")
FIGURES = Topology.from_catalogue(("l4",))


def true_layer(new: float, context: float, pairs: float, sequences: float) -> float:
    """A machine: flat to 16 tokens, then linear; reading KV; attending; laying out a sequence."""
    step = 1e-3 + 5e-5 * max(0.0, new - 16)
    return step + 2e-7 * context + 1e-8 * pairs + 3e-5 * sequences


def rows() -> list[Row]:
    found = [
        Row("decode", layers, batch, context, layers * true_layer(batch, batch * context,
                                                                  batch * context, batch))
        for layers in (2, 4)
        for batch in (1, 4, 16, 64)
        for context in (16, 256, 1024)
    ]  # fmt: skip
    found += [
        Row("prefill", 2, 1, n, 2 * true_layer(n, n, n * (n + 1) / 2, 1)) for n in (32, 128, 512)
    ]
    found += [
        Row("prefill", 2, 4, n // 4, 2 * true_layer(n, n, n * (n // 4 + 1) / 2, 4))
        for n in (32, 128)
    ]
    found += [Row("step", 1, n, 0, 2e-4) for n in (1, 64)]
    found += [Row("first", 0, n, 0, 1e-6 * n) for n in (1, 64, 512)]
    found += [Row("last", 0, n, 0, 1e-3 + 2e-5 * n) for n in (1, 16, 64)]
    return [*found, Row("load", 4, 0, 0, 0.4)]


def test_the_fit_gives_back_a_machine_of_its_kind() -> None:
    profile = read_profile(write_profile(ABOUT, rows()), "p.csv")
    assert profile.kind == StageKind("l4", 1)
    decodes = [(n, n * c, n * c, n) for n, c in ((1, 16), (8, 110), (40, 100), (64, 1024))]
    prefills = [(n, n, n * (n + 1) / 2, 1) for n in (40, 300)]
    for load in (*decodes, *prefills):
        assert profile.layer_s(*load) == pytest.approx(true_layer(*load), rel=0.03), load
    assert profile.load_layer_s == pytest.approx(0.1)
    assert profile.last(32) == pytest.approx(1e-3 + 2e-5 * 32, rel=1e-6)
    assert profile.covers(100, 1000)
    assert not profile.covers(1000, 1000) and not profile.covers(100, 10**6)


def test_times_never_fall_even_where_measurements_do() -> None:
    noisy = [r._replace(seconds=r.seconds * (1.3 if i % 3 else 0.7)) for i, r in enumerate(rows())]
    profile = read_profile(write_profile(ABOUT, noisy), "p.csv")
    for grid in (
        [profile.layer_s(n, 1000, 1000, 8) for n in range(1, 700, 7)],
        [profile.layer_s(8, n, n, 8) for n in range(1, 70_000, 700)],
        [profile.layer_s(64, 1000, 1000, n) for n in range(1, 64)],
        [profile.last(n) for n in range(1, 100)],
    ):
        assert all(a <= b for a, b in itertools.pairwise(grid))


def test_a_ramp_goes_on_with_its_last_slope() -> None:
    ramp = Ramp((1.0, 2.0, 4.0), (1.0, 1.0, 3.0))
    assert [ramp(x) for x in (0.5, 1.5, 3.0, 6.0)] == [1.0, 1.0, 2.0, 5.0]
    assert Ramp((), ())(5.0) == 0.0
    assert Ramp((1.0,), (2.0,))(9.0) == 2.0


def test_the_planner_uses_what_was_measured() -> None:
    profile = read_profile(write_profile(ABOUT, rows()), "p.csv")
    goal = Goal(Workload(64, 64), limits=EngineLimits(max_batch=16))
    problem = Problem(SPEC, FIGURES, goal, profiles={profile.kind: profile})
    time = problem.full_times(profile.kind, 4)
    new, context = 64 + 3, 64 + 3 * problem.load.context_tokens
    layer = profile.layer_s(new, context, 64 * 64 + 3 * problem.load.context_tokens, 4)
    send = FIGURES.node_link.latency_s + new * SPEC.activation_bytes / FIGURES.node_link.bandwidth
    assert time[3, 10] == pytest.approx(7 * layer + 2e-4 + send, rel=1e-9)
    ends = profile.first(new) + profile.last(4)
    assert time[0, 30] == pytest.approx(30 * layer + 2e-4 + ends, rel=1e-9)
    signature = Signature.parse("l4:1")
    slow = plan_gear(SPEC, FIGURES, goal, signature, profiles={profile.kind: profile})
    formula = plan_gear(SPEC, FIGURES, goal, signature)
    assert isinstance(slow, Gear) and isinstance(formula, Gear)
    assert slow.estimates.tokens_per_s < formula.estimates.tokens_per_s
    assert slow.estimates.load_s == pytest.approx(3.0)


def test_what_a_cycle_takes_besides_counts_once_a_cycle() -> None:
    """However many stages there are, tokens go through the head once."""
    goal = Goal(Workload(64, 64), limits=EngineLimits(max_batch=16))
    head = [*rows(), Row("head", 30, 8, 0, 6e-3)]
    plain, served = (
        Problem(SPEC, FIGURES, goal, profiles={profile.kind: profile})
        for profile in (read_profile(write_profile(ABOUT, r), "p.csv") for r in (rows(), head))
    )
    kind = StageKind("l4", 1)
    for depth in (1, 2, 5):
        cycles = [
            problem.cycle_s(depth, problem.times(kind, 4, depth)[3, 10])
            for problem in (plain, served)
        ]
        assert cycles[1] - cycles[0] == pytest.approx(6e-3 - FIGURES.step_s)


def test_passing_on_counts_for_each_further_stage() -> None:
    goal = Goal(Workload(64, 64), limits=EngineLimits(max_batch=16))
    passing = [*rows(), Row("pass", 30, 8, 0, 4e-3)]
    plain, passed = (
        Problem(SPEC, FIGURES, goal, profiles={profile.kind: profile})
        for profile in (read_profile(write_profile(ABOUT, r), "p.csv") for r in (rows(), passing))
    )
    kind = StageKind("l4", 1)
    for depth in (1, 2, 5):
        cycles = [
            problem.cycle_s(depth, problem.times(kind, 4, depth)[3, 10])
            for problem in (plain, passed)
        ]
        assert cycles[1] - cycles[0] == pytest.approx((depth - 1) * 4e-3)


GOOD = write_profile(ABOUT, rows())


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("", None, "does not say its model and gpu_type and tp and dtype"),
        (GOOD.replace(" tp=1", " tp=x"), 1, "tp must be a whole number"),
        (GOOD.replace("phase,layers", "phase,stages"), 2, "the columns must be"),
        (GOOD + "decode,2,1,64\n", 40, "5 values are expected, not 4"),
        (GOOD + "decode,2,1,64,-0.1\n", 40, "at least 0, not -0.1"),
        (GOOD + "decode,2,1,64,nan\n", 40, "finite"),
        (GOOD + "decode,2,1,64,soon\n", 40, "seconds must be a number, not 'soon'"),
        (GOOD + "decode,2,-1,64,1\n", 40, "batch must be a whole number"),
        (GOOD + "decode,0,1,64,1\n", 40, "above 0"),
        (GOOD + "warmup,2,1,64,1\n", 40, "unknown phase 'warmup'"),
        ("\n".join(line for line in GOOD.splitlines() if "decode" not in line), None, "decode"),
    ],
)
def test_malformed_profiles_are_refused(text: str, line: int | None, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        read_profile(text, "p.csv")
    assert caught.value.file == "p.csv"
    if line is not None:
        assert caught.value.line in (line, len(text.splitlines()))


def test_profiles_are_found_by_model_and_kind(tmp_path: Path) -> None:
    (tmp_path / "one.csv").write_text(GOOD)
    (tmp_path / "other.csv").write_text(GOOD.replace("smollm2-135m", "another"))
    found = load_profiles([tmp_path], SPEC, FIGURES)
    assert list(found) == [StageKind("l4", 1)]
    (tmp_path / "bad.csv").write_text(GOOD.replace("gpu_type=l4", "gpu_type=l5"))
    with pytest.raises(ConfigError, match="no GPU type 'l5'"):
        load_profiles([tmp_path], SPEC, FIGURES)
    with pytest.raises(ConfigError, match="cannot read it"):
        load_profiles([tmp_path / "none.csv"], SPEC, FIGURES)


def test_a_profile_of_what_the_formula_says_gives_the_formulas_gear() -> None:
    """On a machine whose steps are all reading, so that the formula is a sum as a profile is."""
    figures = msgspec.structs.replace(FIGURES.gpu("l4"), flops=1e30)
    topology = Topology({"l4": figures}, Link(1e30, 0.0))
    kind, layers = StageKind("l4", 1), SPEC.num_layers
    cost = stage_cost(LayerSums(SPEC, 1), figures, topology.node_link, 1, 2)
    whole = stage_cost(LayerSums(SPEC, 1), figures, topology.node_link, 0, layers)

    def layer_s(new: float, context: float) -> float:
        return cost.step_s(new, context)

    made = [Row("decode", 1, b, c, layer_s(b, b * c)) for b in (1, 8, 64) for c in (16, 1024)]
    made += [Row("prefill", 1, 1, n, layer_s(n, n)) for n in (8, 64, 512)]
    made += [Row("last", 1, b, 0, whole.weights_s - layers * cost.weights_s) for b in (1, 64)]
    profile = read_profile(write_profile(ABOUT, made), "p.csv")
    for pool in ("l4:1", "l4:1x3"):
        for goal in (Goal(Workload(64, 64)), Goal(Workload(700, 200), Slo(tpot_s=0.02))):
            plain, measured = (
                plan_gear(SPEC, topology, goal, Signature.parse(pool), profiles=profiles)
                for profiles in (None, {kind: profile})
            )
            assert isinstance(plain, Gear) and isinstance(measured, Gear)
            assert measured.layout() == plain.layout()
            for figure in ("tokens_per_s", "tpot_s"):
                assert getattr(measured.estimates, figure) == pytest.approx(
                    getattr(plain.estimates, figure), rel=0.01
                )
