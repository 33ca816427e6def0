"""A shift's moves through a whole head in played time: what moves, what is undone, what is said."""

from __future__ import annotations

import pytest
from fake_replica import make_request

from flexslurm.control.events import ShiftReport, ShiftWanted
from flexslurm.control.installed import ReplicaKey
from flexslurm.gear import Estimates, Gear, Replica, Signature, Stage
from flexslurm.head.move_plan import RoomBounds
from tests.head_world import CONTEXT, HeadWorld
from tests.reshard_cases import BLOCK_TOKENS, LAYERS

ROOMY, TIGHT = 64 << 20, 400_000
ALL = Signature.parse("a:3")


def gear(name: str, *replicas: tuple[int, ...], blocks: int = 64, rate: float = 100.0) -> Gear:
    """On one node; each replica by the TP degrees of its stages."""
    made = []
    for tps in replicas:
        ends = [LAYERS * n // len(tps) for n in range(len(tps) + 1)]
        stages = tuple(Stage("a", tp, ends[n], ends[n + 1], blocks, 0) for n, tp in enumerate(tps))
        made.append(Replica(stages, 6, 20, CONTEXT))
    return Gear(name, ALL, BLOCK_TOKENS, tuple(made), Estimates(rate, 0.1, 0.01, 1000, 1.0))


ONE, PIPELINE, WIDE = gear("one", (1,)), gear("pipeline", (1, 1)), gear("wide", (3,))
TWO = gear("two", (1,), (1,))


class Service(HeadWorld):
    """One node of three GPUs, with a gear that an operator asked for."""

    def __init__(self, first: Gear, memory_bytes: int = ROOMY) -> None:
        super().__init__(seed=5, memory_bytes=memory_bytes)
        self.join("f", 3)
        self.run_until(self.serves, 60)
        self.go(first)
        self.count = 0

    def go(self, to: Gear) -> ShiftReport:
        """Ask for a gear and wait until it serves; the history's line."""
        self.later(ShiftWanted(to, "test"))
        self.run_until(lambda: self.serves() and self.layout() == to.layout(), 60)
        self.run(0.5)
        return self.control.history[-1]

    def layout(self) -> str:
        assert self.control.current is not None
        return self.control.current.gear.layout()

    def load(self, count: int, *, prompt: int = 9, answer: int = 38) -> None:
        for _ in range(count):
            self.count += 1
            tokens = [(self.count * 7 + n) % 23 for n in range(prompt)]
            self.submit(make_request(f"r{self.count}", tokens, answer, seed=self.count))

    def end(self) -> None:
        """Everything ends with the right tokens, and nothing is left."""
        self.run_until(lambda: self.ledger.empty, 120)
        self.run(1.0)
        self.check_answers()
        self.check_nothing_left()


def test_beside_each_other_kv_moves_and_nothing_is_recomputed() -> None:
    world = Service(ONE)
    world.load(4)
    world.run(0.15)
    report = world.go(PIPELINE)
    figures = report.figures
    assert (report.outcome, report.mode) == ("committed", "beside")
    assert (figures.moved, figures.recomputed) == (4, 0)
    assert figures.moved_bytes > 0, "the second stage's KV left its GPU"
    assert 0 < figures.pause_s < report.took_s
    assert figures.pause_steps <= 2, "one for each stage in flight"
    world.end()


def test_a_replica_more_moves_nothing_and_disturbs_nobody() -> None:
    world = Service(ONE)
    world.load(3)
    world.run(0.1)
    [before] = world.effects.replicas.open
    report = world.go(TWO)
    figures = report.figures
    assert (figures.moved, figures.recomputed, figures.moved_bytes) == (0, 0, 0)
    assert figures.pause_s == 0
    assert before in world.effects.replicas.open, "its epoch and its driver are the same"
    world.end()


def test_without_room_for_both_kv_waits_in_host_memory() -> None:
    world = Service(ONE, TIGHT)
    world.load(3)
    world.run(0.15)
    report = world.go(WIDE)
    assert (report.outcome, report.mode) == ("committed", "park")
    assert report.figures.moved == 3 and report.figures.recomputed == 0
    world.end()


def test_pulls_that_fail_cost_a_recompute_and_no_token() -> None:
    world = Service(ONE)
    world.load(4)
    world.run(0.15)
    world.failing_pulls = 1.0
    report = world.go(PIPELINE)
    assert report.outcome == "committed"
    assert report.figures.moved == 0 and report.figures.recomputed == 4
    world.failing_pulls = 0.0
    world.end()


@pytest.mark.parametrize("phase", ["after begin_transfer", "after begin_cutover"])
def test_a_shift_that_is_given_up_leaves_the_old_gear_as_it_was(phase: str) -> None:
    world = Service(ONE)
    world.load(4)
    world.run(0.15)
    [key] = world.effects.replicas.open
    fresh = []

    def strike(name: str) -> None:
        shift = world.control.shift
        if name == phase and shift is not None and not fresh:
            mine = {w for one in shift.target.values() for w in one.workers}
            old = world.control.current
            assert old is not None
            fresh.extend(sorted(mine - set(old.workers.values())))
            world.kill_worker(world.workers[fresh[0]])

    world.on_phase = strike
    world.later(ShiftWanted(PIPELINE, "test"))
    world.run_until(lambda: any("aborted" in r.outcome for r in world.control.history), 60)
    assert fresh and key in world.effects.replicas.open
    driver = world.effects.replicas.open[key]
    assert driver.scheduler.pool.limit == driver.scheduler.pool.num_blocks
    assert not world.effects.replicas._arriving
    world.run_until(lambda: world.serves() and world.layout() == PIPELINE.layout(), 60)
    world.end()


def test_both_gears_keep_within_the_room_there_is_until_the_old_one_is_closed() -> None:
    world = Service(ONE, 1_600_000)
    world.load(3)
    world.run(0.15)
    limits: dict[str, int] = {}

    def look(name: str) -> None:
        [driver] = world.effects.replicas.open.values()
        limits[name] = driver.scheduler.pool.limit

    world.on_phase = look
    report = world.go(PIPELINE)
    assert report.mode == "beside"
    assert limits["begin_transfer"] < 64, "the old one, while the new weights are beside it"
    assert limits["after switch_over"] < 64, "the new one, while the old weights are still there"
    [driver] = world.effects.replicas.open.values()
    assert driver.scheduler.pool.limit == 64, "the old epoch is closed"
    world.end()


def test_what_is_computed_anew_waits_for_the_room_of_the_old_gear_too() -> None:
    world = Service(ONE, 1_600_000)
    world.load(3)
    world.run(0.15)
    world.failing_pulls = 1.0
    rooms: list[int] = []
    limits: list[int] = []

    def look(name: str) -> None:
        under = world.effects.moves._under
        if name == "switch_over" and under is not None and under.mover is not None:
            [old] = world.effects.replicas.open.items()
            [room] = under.plan.bounds.room({old[0]: old[1].load().used_blocks}).values()
            rooms.append(under.mover.new[0].driver.load().used_blocks + room)
        if name == "after switch_over":
            [driver] = world.effects.replicas.open.values()
            assert driver.load().used_blocks > 0, "what waited has taken blocks at once"
            limits.append(driver.scheduler.pool.limit)

    world.on_phase = look
    report = world.go(PIPELINE)
    assert report.mode == "beside" and report.figures.recomputed > 0
    assert limits == rooms and rooms[0] < 64
    world.failing_pulls = 0.0
    world.end()


def test_what_the_old_gear_has_grown_by_is_not_there_for_the_new_one() -> None:
    old, new, other = ReplicaKey(1, 0), ReplicaKey(2, 0), ReplicaKey(2, 1)
    bounds = RoomBounds({old: 30}, {old: 20}, {new: 10, other: 40}, {new: 3.0, other: 1.5})
    assert bounds.room({old: 18}) == bounds.room({old: 20}) == {new: 10, other: 40}
    assert bounds.room({old: 21}) == {new: 7, other: 38}
    assert bounds.room({old: 30}) == {new: 0, other: 25}
    assert bounds.room({}) == bounds.spare, "the old replica is lost with its blocks"


def test_what_a_shift_would_cost_grows_with_what_is_live() -> None:
    world = Service(ONE)

    def price() -> tuple[float, float]:
        ask = world.control.preview(world.now, PIPELINE)
        assert ask is not None
        found = world.effects.moves.price(ask)
        return found.seconds, found.tokens_per_s

    idle_s, rate = price()
    assert idle_s > 0 and 0 < rate <= ONE.estimates.tokens_per_s
    world.load(5, prompt=20, answer=28)
    world.run(0.4)
    loaded_s, _ = price()
    assert loaded_s > idle_s
    world.end()


def test_a_preview_says_the_moves_and_begins_nothing() -> None:
    world = Service(ONE)
    world.load(2)
    world.run(0.15)
    ask = world.control.preview(world.now, WIDE)
    assert ask is not None
    lines = world.effects.moves.preview(ask)
    said = "\n".join(lines)
    assert "weights:" in said and "kv:" in said and "pause" in said
    epoch = world.control.epoch
    world.run(0.5)
    assert world.control.shift is None and world.control.epoch == epoch
    assert set(world.effects.replicas.open) == {ReplicaKey(epoch, 0)}
    world.end()
