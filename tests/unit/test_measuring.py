"""From what the ledger and the replicas show to samples, windows, figures and metrics pages."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexslurm.config.schema import parse_section
from flexslurm.config.service import Service
from flexslurm.control.spread import Spread
from flexslurm.control.trends import Sample, p95
from flexslurm.engine.load import SchedulerLoad
from flexslurm.errors import ConfigError
from flexslurm.gateway.metrics import Metrics
from flexslurm.gateway.port import StepTotals
from flexslurm.head.meter import Meter
from flexslurm.head.observer import SequenceSummary, SilentObserver
from flexslurm.head.settings import policy_settings, risk_kind
from flexslurm.messages import FinishReason, SamplingParams, SequenceRequest, StopRules
from flexslurm.wire.service_dir import Pilot

IDLE = SchedulerLoad(
    running=0, waiting=0, in_flight=0, blocks=10, used_blocks=0, free_blocks=10, queued_blocks=0,
    block_tokens=4, max_batch=8, max_context=40, steps=0, evictions=0, prefill_tokens=0,
    decode_tokens=0,
)  # fmt: skip


def load(running: int, decoded: int = 0) -> SchedulerLoad:
    return msgspec.structs.replace(IDLE, running=running, decode_tokens=decoded)


def summary(tokens: int, ttft_s: float | None, e2e_s: float) -> SequenceSummary:
    return SequenceSummary(
        seq_id="s", reason=FinishReason.STOP, prompt_tokens=3, output_tokens=tokens, e2e_s=e2e_s,
        ttft_s=ttft_s, longest_gap_s=0.0, moves=0,
    )  # fmt: skip


REQUEST = SequenceRequest(
    seq_id="s", prompt=(1, 2), sampling=SamplingParams(), stop=StopRules(max_tokens=4)
)


# -------------------------------------------------------------------------------------- spread


@given(st.lists(st.floats(1e-4, 1e4), min_size=1, max_size=200))
def test_a_spread_s_p95_is_a_tenth_too_large_at_most(values: list[float]) -> None:
    spread = Spread.of(values)
    exact = p95(values)
    assert spread.p95_s is not None
    assert exact <= spread.p95_s * (1 + 1e-9) and spread.p95_s <= exact * 1.1 * (1 + 1e-9)
    assert spread.mean_s == pytest.approx(sum(values) / len(values))
    assert spread.count == len(values)


@given(st.lists(st.lists(st.floats(0, 10), max_size=20), max_size=6))
def test_spreads_join_as_their_values_would(parts: list[list[float]]) -> None:
    whole, joined = (
        Spread.of(v for part in parts for v in part),
        Spread.joined(map(Spread.of, parts)),
    )
    assert dict(joined.counts) == dict(whole.counts)
    assert joined.total_s == pytest.approx(whole.total_s)
    assert joined.p95_s == whole.p95_s


def test_an_empty_spread_says_nothing() -> None:
    assert (Spread().mean_s, Spread().p95_s, Spread().count) == (None, None, 0)


# --------------------------------------------------------------------------------------- meter


def test_an_interval_s_sample_is_of_that_interval() -> None:
    meter = Meter(SilentObserver(), 10.0)
    assert meter.look(0.0, 1000, 3, {"e1r0": load(4, 500), "e1r1": load(0, 90)}) is None
    meter.accepted(REQUEST)
    meter.first_token(0.3)
    meter.next_token(0.1)
    meter.ended(summary(5, 0.3, 1.1))
    meter.ended(summary(0, None, 0.5))
    for second in range(1, 10):
        assert meter.look(float(second), 1100, 3, {"e1r0": load(4, 550)}) is None
    sample = meter.look(10.0, 1200, 2, {"e1r0": load(4, 650), "e1r1": load(2, 120)})
    assert sample is not None
    assert (sample.at_s, sample.tokens_per_s, sample.running, sample.waiting) == (10.0, 20.0, 6, 2)
    assert sample.full == 6 / 16
    assert sample.busy == pytest.approx((0.5 + 9 + 1) / 11)
    assert sample.replicas == {"e1r0": 15.0, "e1r1": 3.0}
    assert (sample.arrived, sample.ended, sample.ended_tokens) == (1, 2, 5)
    assert sample.ttft.mean_s == pytest.approx(0.3)
    assert sample.tpot.mean_s == pytest.approx(0.2) and sample.tpot.count == 1
    after = meter.look(20.0, 1200, 0, {"e1r0": load(0, 650)})
    assert after is not None
    assert (after.tokens_per_s, after.arrived, after.ttft.count) == (0.0, 0, 0)


def test_samples_keep_their_schedule_though_looks_come_late() -> None:
    meter, found = Meter(SilentObserver(), 1.0), []
    for number in range(1000):
        now = 0.07 * number
        sample = meter.look(now, 0, 0, {})
        if sample is not None:
            found.append(sample.at_s)
    assert len(found) == 69, "one for each second, though each is late"
    assert all(0 <= at - round(at - 0.035) < 0.14 for at in found)
    stalled = meter.look(200.0, 0, 0, {})
    assert stalled is not None
    assert meter.look(200.5, 0, 0, {}) is None, "what was missed is not made up for"
    assert meter.look(201.1, 0, 0, {}) is not None


def test_a_replica_that_comes_in_between_counts_from_its_start() -> None:
    meter = Meter(SilentObserver(), 10.0)
    meter.look(0.0, 0, 0, {"e1r0": load(1, 700)})
    sample = meter.look(10.0, 0, 0, {"e2r0": load(1, 50)})
    assert sample is not None and sample.replicas == {"e2r0": 5.0}
    nothing = meter.look(20.0, 0, 7, {})
    assert nothing is not None and nothing.replicas == {} and nothing.busy == 0.0
    assert nothing.full == 0.0 and nothing.pressed, "what waits, waits"


class Heard(SilentObserver):
    def __init__(self) -> None:
        self.calls: list[str] = []

    def accepted(self, request: SequenceRequest) -> None:
        self.calls.append("accepted")

    def first_token(self, ttft_s: float) -> None:
        self.calls.append("first")

    def next_token(self, gap_s: float) -> None:
        self.calls.append("next")

    def ended(self, summary: SequenceSummary) -> None:
        self.calls.append("ended")


def test_it_passes_on_what_it_hears() -> None:
    heard = Heard()
    meter = Meter(heard, 1.0)
    meter.accepted(REQUEST)
    meter.first_token(0.1)
    meter.next_token(0.1)
    meter.ended(summary(2, 0.1, 0.2))
    assert heard.calls == ["accepted", "first", "next", "ended"]


def test_a_sample_is_pressed_by_what_waits_or_by_full_replicas() -> None:
    def pressed(waiting: int, busy: float, full: float) -> bool:
        return Sample(1.0, 10.0, 3, waiting, busy, full).pressed

    assert pressed(1, 0.0, 0.0)
    assert pressed(0, 1.0, 0.5)
    assert not pressed(0, 1.0, 0.4)
    assert not pressed(0, 0.8, 1.0)


# ------------------------------------------------------------------------------------- metrics


def page(metrics: Metrics) -> str:
    return metrics.exposition("text/plain")[0].decode()


def test_the_figures_of_the_shifts_are_on_the_metrics_page() -> None:
    metrics = Metrics("m")
    figures: dict[str, float | None] = {
        "throughput_kept_during": 0.9, "throughput_kept_after": None,
        "requests_succeeded": 1.0, "time_shifting": 0.03, "paused_s": 4.0,
    }  # fmt: skip
    metrics.watch_figures(lambda: figures)
    lines = page(metrics).splitlines()
    assert 'flexslurm_throughput_kept_during_ratio{model_name="m"} 0.9' in lines
    assert 'flexslurm_time_shifting_ratio{model_name="m"} 0.03' in lines
    assert not any(line.startswith("flexslurm_throughput_kept_after_ratio{") for line in lines)
    figures["throughput_kept_after"] = 1.1
    assert 'flexslurm_throughput_kept_after_ratio{model_name="m"} 1.1' in page(metrics)


# ------------------------------------------------------------------------------------ settings


def service(**sections: object) -> Service:
    text = {
        "name": "s", "model": {"path": "/m"},
        "pool": [
            {"gpu_type": "a100", "gpus": 1, "count": 2, "partition": "owned"},
            {"gpu_type": "l40s", "gpus": 1},
            {"gpu_type": "a100", "gpus": 4, "partition": "scavenge"},
        ],
        **sections,
    }  # fmt: skip
    import yaml

    return parse_section(Service, yaml.safe_dump(text), "service.yaml")


def test_pilots_share_their_risks_by_type_and_partition() -> None:
    pilots = [
        Pilot("a-1", "7", "owned", "a100", 2, 1),
        Pilot("a-2", "8", "scavenge", "a100", 2, 1),
        Pilot("l-1", "9", None, "l40s", 1, 1),
    ]
    kinds = [risk_kind(name, pilots) for name in ("a-1", "a-2", "l-1", "x")]
    assert kinds == ["a100@owned", "a100@scavenge", "l40s", ""]


def test_the_keys_of_the_decisions_reach_the_policy() -> None:
    made = policy_settings(
        service(
            decisions={
                "min_action_gap_sec": 7, "migration_benefit_ratio": 2.5, "eviction_risk_weight": 0.1
            },
            scheduling={"plans": ["l40s:1,a100:4"], "fallback_plan": "a100:1"},
            profiling={"interval_sec": 1, "window_minutes": 2},
        )
    )  # fmt: skip
    assert (made.min_action_gap_s, made.migration_benefit_ratio) == (7, 2.5)
    assert (made.eviction_risk_weight, made.window_s) == (0.1, 120.0)
    assert made.plans == ("a100:4,l40s:1",)
    assert (made.default_plan, made.fallback_plan) == (None, "a100:1")


def test_an_interval_is_no_longer_than_its_window() -> None:
    with pytest.raises(ConfigError) as caught:
        service(profiling={"interval_sec": 90, "window_minutes": 1})
    assert "no longer than the window" in str(caught.value)


def test_the_steps_are_on_the_metrics_page() -> None:
    metrics = Metrics("m")
    metrics.watch_steps(lambda: StepTotals(3, 0.25, 17.5))
    lines = page(metrics).splitlines()
    assert 'flexslurm_steps_total{model_name="m"} 3.0' in lines
    assert 'flexslurm_step_compute_seconds_total{model_name="m"} 0.25' in lines
    assert 'flexslurm_last_step_seconds{model_name="m"} 17.5' in lines
