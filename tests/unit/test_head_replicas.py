"""Drivers that come, go, share the traffic and are ramped up: 20, then 50, then 100 % of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_replica import FakeReplica, make_replica, make_request, undisturbed

from flexslurm.control.installed import InstalledReplica, ReplicaKey, SeatedWorker
from flexslurm.control.members import GpuAt
from flexslurm.engine.driver import Driver
from flexslurm.gateway.router import RAMP
from flexslurm.head.ledger import Adoption, Ledger, LedgerSettings
from flexslurm.head.ramp import STEPS_EACH, Ramps
from flexslurm.head.replicas import Replicas
from flexslurm.head.stream import Stream
from flexslurm.messages import FreeBlocks, Message, Step, StepDone, StepFailed

BLOCK = 4


class World:
    """A ledger and its replicas; the workers answer when they are let."""

    def __init__(self) -> None:
        self.ledger = Ledger(LedgerSettings(model_context=64), now=lambda: 0.0)
        self.broken: list[tuple[ReplicaKey, str]] = []
        self.sent: list[tuple[tuple[str, ...], Step]] = []
        self.engines: dict[ReplicaKey, FakeReplica] = {}
        self.streams: dict[str, Stream] = {}
        self.steps: dict[ReplicaKey, int] = {}
        self.replicas = Replicas(
            self.ledger,
            send=self._send,
            broken=lambda key, why: self.broken.append((key, why)),
            now=lambda: 0.0,
        )

    def _send(self, workers: tuple[str, ...], message: Message) -> None:
        if isinstance(message, Step):
            self.sent.append((workers, message))
        elif isinstance(message, FreeBlocks):
            self.engines[ReplicaKey(message.epoch, message.replica)].free(message.blocks)

    def arrive(self, epoch: int, index: int = 0, *, max_batch: int = 10) -> ReplicaKey:
        key = ReplicaKey(epoch, index)
        replica = make_replica(max_batch=max_batch, kv_blocks=200)
        seat = SeatedWorker(GpuAt("a", index), f"w{epoch}.{index}", "n", "10.0.0.1", 1)
        self.replicas.arrive(InstalledReplica(key, replica, (seat,)), BLOCK)
        self.engines.setdefault(key, FakeReplica(replica, BLOCK))
        return key

    def open(self, *keys: ReplicaKey, closed: tuple[ReplicaKey, ...] = ()) -> None:
        self.replicas.switch(keys, closed, {}, {})

    def submit(self, count: int, max_tokens: int = 30) -> None:
        for _ in range(count):
            name = f"s{len(self.streams)}"
            request = make_request(name, (1, 2, len(self.streams) % 23), max_tokens)
            self.streams[name] = self.ledger.submit([request])

    def answer(self) -> bool:
        """Do the oldest step."""
        if not self.sent:
            return False
        workers, step = self.sent.pop(0)
        key = ReplicaKey(step.epoch, step.replica)
        tokens = self.engines[key].run(step.chunks, step.freed)
        self.steps[key] = self.steps.get(key, 0) + 1
        self.replicas.on_step_done(
            StepDone(
                worker=workers[-1], epoch=step.epoch, replica=step.replica, step=step.step,
                tokens=tokens, compute_s=0.25,
            )
        )  # fmt: skip
        return True

    def running(self, key: ReplicaKey) -> int:
        load = self.replicas.open[key].load()
        return load.running + load.waiting

    def share(self, key: ReplicaKey) -> float:
        [seat] = [s for n, s in self.ledger._dispatch._seats.items() if n == self.driver(key).seat]
        return seat.ramp

    def driver(self, key: ReplicaKey) -> Driver:
        return self.replicas.open[key]


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.ledger.check_invariants()


# ---------------------------------------------------------------------------------------- ramp


def test_a_ramp_climbs_one_weight_for_each_so_many_good_steps() -> None:
    ramps = Ramps(steps_each=4)
    assert ramps.begin(7, steps=100) == RAMP[0] == 0.2
    assert [ramps.look(7, 100 + n) for n in range(4)] == [None] * 4
    assert ramps.look(7, 104) == 0.5
    assert [ramps.look(7, 105 + n) for n in range(3)] == [None] * 3
    assert ramps.look(7, 109) == 1.0, "late looks count from when they were"
    assert ramps.look(7, 10_000) is None and ramps.seats == ()


def test_a_ramp_that_is_dropped_or_alone_climbs_no_further() -> None:
    ramps = Ramps(steps_each=1)
    ramps.begin(1, 0)
    ramps.begin(2, 0)
    ramps.begin(3, 0)
    ramps.drop(2)
    ramps.drop(2)
    assert ramps.look(2, 50) is None and ramps.seats == (1, 3)
    assert ramps.alone() == [1, 3]
    assert ramps.look(1, 50) is None and ramps.seats == ()


def test_the_first_gear_takes_all_its_traffic_at_once(world: World) -> None:
    first, second = world.arrive(1, 0), world.arrive(1, 1)
    world.open(first, second)
    assert world.share(first) == world.share(second) == 1.0
    world.submit(20)
    assert world.running(first) == world.running(second) == 10


def test_a_new_replica_gets_a_fifth_then_half_then_all_of_its_traffic(world: World) -> None:
    old = world.arrive(1)
    world.open(old)
    new = world.arrive(2)
    world.open(new)
    assert (world.share(old), world.share(new)) == (1.0, 0.2)
    world.submit(20)
    assert world.running(old) == 10
    assert world.running(new) == 2, "two of its ten places, though others wait"
    seen = [(world.steps.get(new, 0), world.share(new), world.running(new))]
    while world.answer():
        now = (world.steps.get(new, 0), world.share(new), world.running(new))
        if now[1] != seen[-1][1]:
            seen.append(now)
        world.submit(1) if len(world.streams) < 60 else None
    assert [share for _, share, _ in seen] == [0.2, 0.5, 1.0]
    assert seen[1][0] == STEPS_EACH and seen[2][0] == 2 * STEPS_EACH
    assert seen[1][2] <= 5 and seen[2][2] <= 10
    for name, stream in world.streams.items():
        tokens = [event.token for event in stream.ready() if event.token is not None]
        number = int(name[1:]) % 23
        assert tokens == undisturbed(make_request(name, (1, 2, number), 30))[0], name


def test_when_the_others_are_lost_a_new_replica_takes_everything(world: World) -> None:
    old = world.arrive(1)
    world.open(old)
    new = world.arrive(2)
    world.open(new)
    world.submit(10)
    assert world.running(new) <= 2
    world.replicas.detach([old], "a worker died")
    assert world.share(new) == 1.0
    assert world.running(new) == 10
    while world.answer():
        pass
    assert world.ledger.empty


def test_a_lost_ramp_of_several_leaves_the_climb_to_the_others(world: World) -> None:
    old = world.arrive(1)
    world.open(old)
    one, two = world.arrive(2, 0), world.arrive(2, 1)
    world.open(one, two)
    world.replicas.detach([one], "lost")
    assert world.share(two) == 0.2, "the old one still takes the rest"
    world.replicas.detach([old], "lost")
    assert world.share(two) == 1.0


# ------------------------------------------------------------------------------------- replicas


def test_seats_tell_apart_all_drivers_that_are_open_or_arrive(world: World) -> None:
    first = world.arrive(1)
    world.open(first)
    again = world.arrive(2)
    assert world.replicas.driver(again) is not None
    assert world.replicas.arrive(world_replica(again), BLOCK) is world.replicas.driver(again)
    seats = {world.driver(first).seat, world.replicas.driver(again).seat}  # type: ignore[union-attr]
    assert len(seats) == 2
    world.open(again, closed=(first,))
    third = world.arrive(3)
    driver = world.replicas.driver(third)
    assert driver is not None and driver.seat != world.driver(again).seat
    assert world.replicas.driver(first) is None


def world_replica(key: ReplicaKey) -> InstalledReplica:
    seat = SeatedWorker(GpuAt("a", 0), f"w{key.epoch}.0", "n", "10.0.0.1", 1)
    return InstalledReplica(key, make_replica(), (seat,))


def test_what_arrives_serves_nothing_before_the_switch_and_nothing_if_forgotten(
    world: World,
) -> None:
    old = world.arrive(1)
    world.open(old)
    new = world.arrive(2)
    world.submit(3)
    assert all(step.epoch == 1 for _, step in world.sent)
    driver = world.replicas.driver(new)
    assert driver is not None
    world.replicas.forget_arriving()
    assert driver.closed and world.replicas.driver(new) is None
    fresh = world.arrive(2)
    assert world.replicas.driver(fresh) is not driver


def test_a_switch_moves_what_was_adopted_and_recomputes_the_rest(world: World) -> None:
    old = world.arrive(1)
    world.open(old)
    world.submit(2, 6)
    for _ in range(2):
        world.answer()
    world.driver(old).pause()
    while world.answer():
        pass
    new = world.arrive(2)
    kv = {one.seq_id: one for one in world.driver(old).running_kv()}
    arriving = world.replicas.driver(new)
    assert arriving is not None and set(kv) == {"s0", "s1"}
    moved = kv["s0"]
    blocks = arriving.reserve("s0", len(moved.blocks))
    assert blocks is not None
    world.engines[new].pull(world.engines[old], list(zip(moved.blocks, blocks, strict=True)))
    adopted = world.replicas.switch(
        [new], [old], {"s0": Adoption(arriving.seat, moved.computed)}, {new: 50.0}
    )
    assert adopted == {"s0"}
    prompts = {c.seq_id: len(c.tokens) for _, step in world.sent for c in step.chunks}
    assert prompts["s0"] == 1, "it goes on from its KV"
    assert prompts["s1"] > 1, "it is computed again"
    while world.answer():
        pass
    for name, stream in world.streams.items():
        tokens = [event.token for event in stream.ready() if event.token is not None]
        assert tokens == undisturbed(make_request(name, (1, 2, int(name[1:])), 6))[0]


def test_answers_of_drivers_that_are_gone_are_dropped(world: World) -> None:
    old = world.arrive(1)
    world.open(old)
    world.submit(1)
    late = world.sent.pop(0)[1]
    world.replicas.detach([old], "lost")
    world.replicas.on_step_done(
        StepDone(worker="w1.0", epoch=1, replica=0, step=late.step, tokens=())
    )
    world.replicas.detach([old], "again")
    assert not world.ledger.empty and not world.broken


def test_steps_are_counted_over_all_drivers_that_ever_served(world: World) -> None:
    first, second = world.arrive(1, 0), world.arrive(2, 0)
    world.open(first)
    world.submit(2, max_tokens=2)
    while world.answer():
        pass
    done = world.replicas.steps().steps
    assert done == world.steps[first] > 0
    world.open(second, closed=(first,))
    world.submit(1, max_tokens=2)
    while world.answer():
        pass
    assert world.replicas.steps().steps == done + world.steps[second]
    assert world.replicas.steps().computed_s == pytest.approx(0.25 * (done + world.steps[second]))


def test_a_failed_step_breaks_the_replica_of_that_worker_alone(world: World) -> None:
    one, two = world.arrive(1, 0), world.arrive(1, 1)
    world.open(one, two)
    world.submit(4)
    world.replicas.on_step_failed(StepFailed(worker="w1.1", epoch=1, step=0, reason="NaN"))
    assert [key for key, _ in world.broken] == [two]
    assert "NaN" in world.broken[0][1]
    world.replicas.on_step_failed(StepFailed(worker="w1.0", epoch=7, step=0, reason="old"))
    assert len(world.broken) == 1, "of another epoch"
