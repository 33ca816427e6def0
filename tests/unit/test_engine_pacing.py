"""Virtual GPU time with an injected clock: what a step is stretched to, what it may catch up."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from flexslurm.engine.pacing import Pacer, StepWork
from flexslurm.errors import ProtocolError
from flexslurm.messages import Chunk, ChunkSampling, Pacing, SamplingParams
from flexslurm.planner.cost import StageCost

NOTHING = StepWork(1, 1, 1, 1)


@dataclass
class Clock:
    """Wall and CPU time of one thread that works or sleeps."""

    wall: float = 100.0
    cpu: float = 5.0
    slept: list[float] = field(default_factory=list)

    def work(self, seconds: float, share: float = 1.0) -> None:
        """Compute for so long, with this share of a core."""
        self.wall += seconds
        self.cpu += seconds * share

    def sleep(self, seconds: float) -> None:
        self.slept.append(round(seconds, 9))
        self.wall += seconds

    def pacer(self, pacing: Pacing | None) -> Pacer:
        return Pacer(pacing, self.sleep, cpu=lambda: self.cpu, wall=lambda: self.wall)


def cost(**fields: float) -> dict[str, float]:
    return dict.fromkeys(StageCost.__struct_fields__, 0.0) | fields


@pytest.mark.parametrize("pacing", [None, Pacing(), Pacing(speed=1.0)])
def test_full_speed_adds_nothing(pacing: Pacing | None) -> None:
    clock = Clock()
    pacer = clock.pacer(pacing)
    pacer.begin(waited=True)
    clock.work(0.5)
    assert pacer.end(NOTHING) == pytest.approx(0.5)
    assert clock.slept == []


@pytest.mark.parametrize(("share", "slept"), [(1.0, [1.5]), (0.5, [0.5]), (0.2, [])])
def test_a_slow_gpu_takes_its_cpu_time_and_not_the_waiting_for_a_core(
    share: float, slept: list[float]
) -> None:
    """Half a second at this share of a core, of a GPU with a quarter of the speed."""
    clock = Clock()
    pacer = clock.pacer(Pacing(speed=0.25))
    pacer.begin(waited=True)
    clock.work(0.5, share)
    assert pacer.end(NOTHING) == pytest.approx(max(0.5, 0.5 * share / 0.25))
    assert clock.slept == slept


@pytest.mark.parametrize("speed", [0.0, -1.0, 1.5])
def test_a_speed_outside_zero_to_one_is_refused(speed: float) -> None:
    with pytest.raises(ProtocolError, match="speed"):
        Clock().pacer(Pacing(speed=speed))


@pytest.mark.parametrize("fields", [{}, {"weights_s": 1.0}, cost() | {"token_s": "much"}])
def test_a_cost_that_is_none_is_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ProtocolError, match="stage cost"):
        Clock().pacer(Pacing(acted=fields))


def test_acted_takes_the_seconds_of_the_cost_with_what_was_computed_in_them() -> None:
    clock = Clock()
    fields = cost(weights_s=0.2, context_s=0.001, token_s=0.01, pair_s=0.0001, fixed_s=0.05)
    pacer = clock.pacer(Pacing(acted=fields))
    load = StepWork(new_tokens=4, context_tokens=30, sampled_tokens=2, pairs=40)
    expected = StageCost(**fields).step_s(4, 30, 2, 40)
    assert expected == pytest.approx(0.28)
    pacer.begin(waited=True)
    clock.work(0.1)
    assert pacer.end(load) == pytest.approx(expected)
    assert clock.slept == [pytest.approx(expected - 0.1)]
    assert clock.wall == pytest.approx(100.0 + expected)


def test_acted_steps_in_a_row_do_not_pay_for_the_gaps_between() -> None:
    clock = Clock()
    pacer = clock.pacer(Pacing(acted=cost(fixed_s=0.1)))
    for step in range(5):
        pacer.begin(waited=step == 0)
        clock.work(0.02)
        pacer.end(NOTHING)
        clock.work(0.01)  # messages, Python
    assert clock.wall == pytest.approx(100.0 + 5 * 0.1 + 0.01)


def test_acted_idle_time_is_not_caught_up() -> None:
    clock = Clock()
    pacer = clock.pacer(Pacing(acted=cost(fixed_s=0.1)))
    for _ in range(2):
        pacer.begin(waited=True)
        pacer.end(NOTHING)
        clock.work(1.0)
    assert clock.slept == [0.1, 0.1]


def test_acted_catches_up_no_more_than_a_little() -> None:
    clock = Clock()
    pacer = clock.pacer(Pacing(acted=cost(fixed_s=0.1)))
    pacer.begin(waited=True)
    clock.work(2.0)  # the machine is far too slow for this figure
    assert pacer.end(NOTHING) == pytest.approx(0.1)
    pacer.begin(waited=False)
    pacer.end(NOTHING)
    assert clock.slept == [0.05]


def test_the_load_of_chunks() -> None:
    sample = ChunkSampling(params=SamplingParams(), position=0)
    chunks = (
        Chunk(seq_id="prefill", tokens=(1, 2, 3), start=4, blocks=(0, 1)),
        Chunk(seq_id="decode", tokens=(9,), start=10, blocks=(2,), sample=sample),
    )
    assert StepWork.of(chunks) == StepWork(
        new_tokens=4, context_tokens=7 + 11, sampled_tokens=1, pairs=5 + 6 + 7 + 11
    )
    assert StepWork.of(()) == StepWork(0, 0, 0, 0)
