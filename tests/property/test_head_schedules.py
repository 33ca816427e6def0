"""Random schedules of shifts, faults, requests and cancels through a whole head, in played time."""

from __future__ import annotations

import random
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from fake_replica import make_request

from flexslurm.control.events import Cordon, ShiftWanted
from flexslurm.errors import Overloaded
from tests.head_world import CONTEXT, HeadWorld, is_over
from tests.played_bodies import Worker

PHASES = ("plan_shift", "meet_epoch", "begin_transfer", "after begin_transfer", "begin_cutover",
          "after begin_cutover", "switch_over", "after switch_over", "park_all",
          "after park_all")  # fmt: skip
FAULTS = (
    "kill source", "kill target", "hang source", "hang target", "kill node", "notice",
    "failing pulls", "failing pulls", "failing install", "failing step", "another gear",
    "best gear", "cordon", "notice to all", "nothing",
)  # fmt: skip
ROOMY, TIGHT = 64 << 20, 400_000


class Schedule:
    """One service's life, drawn from a seed."""

    def __init__(self, seed: int, directory: Path) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        files = self.rng.choice((None, directory))
        self.world = HeadWorld(seed, self.rng.choice((ROOMY, TIGHT)), files)
        self.sizes = {f"f{n}": self.rng.randint(1, 3) for n in range(self.rng.randint(2, 3))}
        self.crowd = self.rng.choice((1, 1, 4))
        self.number = 0
        self.fault: tuple[str, str] | None = None
        self.told: list[str] = []
        self.cordoned = ""
        self.world.on_phase = self._on_phase

    def run(self) -> None:
        world, rng = self.world, self.rng
        for fragment, gpus in self.sizes.items():
            world.join(fragment, gpus)
        world.run_until(world.serves, 60)
        for turn in range(rng.randint(2, 5)):
            for _ in range(rng.randint(1, 5) * self.crowd):
                self._submit()
            world.run(rng.uniform(0.0, 0.3))
            self.fault = (rng.choice(PHASES), rng.choice(FAULTS))
            self.told.append(f"{world.now:.2f} wants gear {turn}, {self.fault}")
            world.want(f"g{turn}")
            for _ in range(rng.randint(0, 3)):
                world.run(rng.uniform(0.0, 0.2))
                self._submit()
                self._cancel()
            world.run(rng.uniform(0.0, 3.0))
            self._mend()
        self._end()

    def _submit(self) -> None:
        rng = self.rng
        self.number += 1
        prompt = [rng.randrange(23) for _ in range(rng.randint(1, 20))]
        most = rng.randint(1, CONTEXT - len(prompt))
        try:
            self.world.submit(make_request(f"r{self.number}", prompt, most, seed=self.number))
        except Overloaded:
            pytest.fail("there is room for more")

    def _cancel(self) -> None:
        found = [s for s, (_, _, events) in self.world.streams.items()
                 if not is_over(events) and s not in self.world.cancelled]  # fmt: skip
        if found and self.rng.random() < 0.3:
            self.world.cancel(self.rng.choice(found))

    def _on_phase(self, phase: str) -> None:
        if self.fault is not None and self.fault[0] == phase:
            _, what = self.fault
            self.fault = None
            self.told.append(f"{self.world.now:.2f} {what} at {phase}")
            self._strike(what)

    def _strike(self, what: str) -> None:
        world, rng = self.world, self.rng
        deed, _, who = what.partition(" ")
        found = self._of(who)
        match deed:
            case "kill" if who == "node":
                agents = [a for a in world.agents.values() if a.alive]
                world.kill_agent(rng.choice(agents))
            case "kill" if found:
                world.kill_worker(rng.choice(found))
            case "hang" if found:
                rng.choice(found).hung = True
            case "notice" if who:
                for agent in [a for a in world.agents.values() if a.alive]:
                    world.leave(agent, self.rng.choice((1.0, 3.0)))
            case "cordon":
                self.cordoned = rng.choice(sorted(self.sizes))
                world.later(Cordon(self.cordoned, True))
            case "another":
                world.want("other")
            case "best":
                world.later(ShiftWanted(None, "test"))
            case "failing" if who == "step":
                world.failing_steps = 1
            case "notice":
                agents = [a for a in world.agents.values() if a.alive]
                world.leave(rng.choice(agents), rng.choice((0.05, 0.5, 5.0)))
            case "failing" if who == "pulls":
                world.failing_pulls = rng.choice((0.1, 0.5, 1.0))
            case "failing":
                world.failing_installs = rng.randint(1, 3)

    def _of(self, who: str) -> list[Worker]:
        """Workers of the gear that serves, or of the one that is to."""
        control, world = self.world.control, self.world
        names: set[str] = set()
        if who == "source" and control.current is not None:
            names = set(control.current.workers.values())
        if who == "target" and control.shift is not None:
            names = {w for one in control.shift.target.values() for w in one.workers}
        return [world.workers[name] for name in sorted(names) if world.workers[name].alive]

    def _mend(self) -> None:
        world = self.world
        world.failing_pulls, world.failing_installs = 0.0, 0
        if self.cordoned:
            world.later(Cordon(self.cordoned, False))
            self.cordoned = ""
        live = {agent.fragment for agent in world.agents.values() if agent.alive}
        for fragment, gpus in self.sizes.items():
            if fragment not in live and self.rng.random() < 0.7:
                world.join(fragment, gpus)

    def _end(self) -> None:
        world = self.world
        self.fault = None
        self._mend()
        world.run(6.0)  # what was on notice has gone
        live = {agent.fragment for agent in world.agents.values() if agent.alive}
        for fragment, gpus in self.sizes.items():
            if fragment not in live:
                world.join(fragment, gpus)
        world.run_until(
            lambda: all(
                is_over(events) or seq_id in world.cancelled
                for seq_id, (_, _, events) in world.streams.items()
            ),
            200,
        )
        world.run(10.0)
        world.run_until(world.serves, 60)
        world.check_answers()
        world.check_nothing_left()


def run_schedule(seed: int) -> None:
    with TemporaryDirectory() as directory:
        _run(Schedule(seed, Path(directory)))


def _run(schedule: Schedule) -> None:
    try:
        schedule.run()
    except BaseException as error:
        error.add_note(f"seed {schedule.seed}: " + "; ".join(schedule.told))
        raise


@pytest.mark.parametrize("seed", range(25))
def test_a_random_schedule(seed: int) -> None:
    run_schedule(seed)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(5))
def test_random_schedules(part: int) -> None:
    for seed in range(1000 + 100 * part, 1100 + 100 * part):
        run_schedule(seed)
