"""From tokens to decisions: a whole head in played time measures its load and acts on it."""

from __future__ import annotations

from dataclasses import replace

from fake_replica import make_request

from flexslurm.control.choices import PolicySettings
from flexslurm.control.events import ShiftWanted
from flexslurm.control.trends import Targets
from flexslurm.control.watch import Watch, WatchSettings
from flexslurm.gear import Estimates, Gear, NoGear, Replica, Signature, Stage
from flexslurm.head.installs import Installs
from flexslurm.head.measuring import Measuring
from flexslurm.head.observer import SilentObserver
from flexslurm.head.status import status_answer
from flexslurm.messages import StatusAnswer
from tests.head_world import CONTEXT, HeadWorld
from tests.reshard_cases import BLOCK_TOKENS, LAYERS

INTERVAL_S, WINDOW_S = 0.5, 5.0
ALL = Signature.parse("a:3")


def gear(name: str, replicas: int) -> Gear:
    """So many replicas on one GPU each; played workers do about 80 steps a second."""
    stage = Stage("a", 1, 0, LAYERS, 64, 0)
    made = (Replica((stage,), 4, 20, CONTEXT),) * replicas
    return Gear(name, ALL, BLOCK_TOKENS, made, Estimates(280.0 * replicas, 0.1, 0.01, 1000, 1.0))


ONE, THREE = gear("one", 1), gear("three", 3)


class Service(HeadWorld):
    """Three GPUs; what the head measures goes to its controller, as in the product."""

    def __init__(self) -> None:
        super().__init__(seed=11, memory_bytes=64 << 20)
        self.planner._known[ALL] = THREE
        self.planner._known[Signature()] = NoGear(Signature(), "there are no GPUs")
        policy = PolicySettings(
            min_action_gap_s=2.0, migration_benefit_ratio=1.3, window_s=WINDOW_S
        )
        self.control.settings = replace(self.control.settings, policy=policy)
        self.control.watch = Watch(WatchSettings(INTERVAL_S, WINDOW_S))
        self.measuring = Measuring(SilentObserver(), INTERVAL_S)
        self.ledger._observer = self.measuring.meter
        self.number = 0
        self.join("f", 3)
        self.run_until(self.serves, 60)

    def _tick(self) -> None:
        super()._tick()
        drivers = self.effects.replicas.open
        measured = self.measuring.look(self.now, self.control, self.ledger.figures(), drivers)
        if measured is not None:
            self.controller.take(measured)

    def load(self, seconds: float, streams: int) -> None:
        """Keep so many requests live."""
        end = self.now + seconds
        while self.now < end:
            while self.ledger.figures().live < streams:
                self.number += 1
                name = f"r{self.number}"
                self.submit(make_request(name, (1, 2, self.number % 23), 30, seed=self.number))
            self.run(0.1)

    def gear(self) -> str:
        assert self.control.current is not None
        return self.control.current.gear.name

    def status(self) -> StatusAnswer:
        return status_answer(
            service="s", endpoint="", control=self.control, figures=self.ledger.figures(),
            pilots=(), jobs={}, stopping=False, now=self.now, started_at=0.0,
            installs=Installs(), judge=self.measuring.judge,
        )  # fmt: skip


def in_the_small_gear() -> Service:
    world = Service()
    assert world.gear() == "three"
    world.later(ShiftWanted(ONE, "test"))
    world.run_until(lambda: world.serves() and world.gear() == "one", 60)
    world.later(ShiftWanted(None, "test"))
    world.run(0.2)
    return world


def test_an_operator_that_gives_the_choice_back_waits_for_no_window() -> None:
    world = in_the_small_gear()
    assert world.gear() == "one", "the policy alone waits for what is measured"
    world.later(ShiftWanted(ONE, "test"))
    world.later(ShiftWanted(None, "test", at_once=True))
    world.run_until(lambda: world.serves() and world.gear() == "three", 60)
    assert not world.control.watch.windows(world.now)
    assert "the choice was given back" in world.control.history[-1].why


def test_a_light_load_is_no_reason_and_says_so_with_its_figures() -> None:
    world = in_the_small_gear()
    world.load(4 * WINDOW_S, streams=1)
    assert world.gear() == "one"
    assert "three is estimated at 1.00 times one" in world.control.reason
    status = world.status()
    assert [one["verdict"] for one in status.decisions][-1] == "stay"
    latest, before = status.measured["windows"]
    assert not latest["saturated"] and not before["saturated"]
    assert latest["tokens_per_s"] > 20 and latest["replicas"].keys() == {"e1r0"}
    assert 0 < latest["ttft_s"] <= latest["p95_ttft_s"] < 1.0
    assert 0 < latest["tpot_s"] <= latest["p95_tpot_s"] < 0.1
    assert latest["offered_tokens_per_s"] > 20
    assert status.measured["corrections"] == {}


def test_tokens_that_come_too_late_are_no_use_even_at_a_light_load() -> None:
    """Played workers take 12 ms for a token; the other gear is estimated to be quicker."""
    world = in_the_small_gear()
    targets = Targets(ttft_s=5.0, tpot_s=0.005)
    world.control.settings = replace(
        world.control.settings, policy=replace(world.control.settings.policy, targets=targets)
    )
    world.control.watch.targets = targets
    world.load(3 * WINDOW_S, streams=1)
    assert world.gear() == "three"
    why = world.control.history[-1].why
    assert "against 0 (0 of " in why and "tokens/s within the targets)" in why
    assert "0% within the targets" in why
    world.load(2 * WINDOW_S, streams=1)
    latest = world.status().measured["windows"][0]
    assert latest["within_targets"] == 0.0 and not latest["saturated"]
    world.run_until(lambda: world.ledger.empty, 60)
    world.run(1.0)
    world.check_answers()


def test_a_heavy_load_makes_the_shift_after_two_windows_and_every_token_is_right() -> None:
    world = in_the_small_gear()
    world.load(3 * WINDOW_S, streams=1)
    began = world.now
    world.load(1.3 * WINDOW_S, streams=14)
    assert world.gear() == "one", "one window says so"
    world.load(1.9 * WINDOW_S, streams=14)
    assert world.gear() == "three"
    report = world.control.history[-1]
    assert report.started_at - began > 1.4 * WINDOW_S
    assert "three is estimated at" in report.why and "saturated" in report.why
    assert report.figures.recomputed == 0
    rate = world.measuring.judge.judge(world.now)
    assert rate.kept_during is not None and rate.shifts == 2
    world.run_until(lambda: world.ledger.empty, 60)
    world.run(1.0)
    world.check_answers()
    world.check_nothing_left()
    status = world.status()
    assert status.figures["requests_succeeded"] == 1.0
    assert 0 < float(status.figures["time_shifting"] or 0) < 0.2
    line = status.shifts[-1]
    assert line["outcome"] == "committed" and float(line["kept_during"]) > 0.5


def test_what_the_big_gear_does_is_measured_and_it_is_not_left_again() -> None:
    world = Service()
    world.load(5 * WINDOW_S, streams=20)
    assert world.gear() == "three" and len(world.control.history) == 1
    [(name, factor)] = world.status().measured["corrections"].items()
    assert name == "three" and 0.3 < factor < 2.0
    assert "three is the best gear" in world.control.reason
    assert "times the estimate" in world.control.reason
