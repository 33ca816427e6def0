"""Live KV parked in files when all GPUs go: when, how far, what is kept of it and for how long."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_replica import FakeReplica, make_request, undisturbed

from flexslurm.control.events import ParkedAway
from flexslurm.control.installed import InstalledGear, InstalledReplica, ReplicaKey, SeatedWorker
from flexslurm.control.members import GpuAt
from flexslurm.engine.parking import _file_name
from flexslurm.head.away import Away
from flexslurm.head.ledger import Ledger, LedgerSettings
from flexslurm.head.moving import Tickets
from flexslurm.head.replicas import Replicas
from flexslurm.head.storage import Storage
from flexslurm.head.stored import AGE_S
from flexslurm.messages import DirectoryProbed, KvParked, Message, ParkKv, Step, StepDone, UnparkKv
from tests.reshard_cases import BLOCK_TOKENS, LAYERS, gear_of, replica, shard_map

KEY = ReplicaKey(3, 0)
WORKERS = ("w0", "w1")
RATE = 1e4


class World:
    """One replica of two stages whose GPUs will be taken, and a directory for its KV."""

    def __init__(self, path: Path, *, probed: bool = True) -> None:
        self.now = 0.0
        self.ledger = Ledger(
            LedgerSettings(model_context=256, wait_for_gpus_s=1e9), now=lambda: self.now
        )
        self.steps: list[Step] = []
        self.asked: list[tuple[str, ParkKv]] = []
        self.called_off: list[tuple[str, int]] = []
        self.replicas = Replicas(
            self.ledger, send=self._step, broken=lambda *_: None, now=lambda: self.now
        )
        self.storage = Storage(path, "svc")
        self.storage.begin()
        if probed:
            where = str(self.storage.path)
            self.storage.heard(DirectoryProbed(incarnation="agent", path=where, reason=""))
        self.away = Away(
            self.replicas,
            self.ledger,
            self.storage,
            shards=shard_map,
            rate_bytes_per_s=lambda types: RATE,
            tickets=Tickets(),
            send=self._ask,
            now=lambda: self.now,
        )
        one = replica((1, 0, 2), (1, 2, LAYERS))
        seats = tuple(
            SeatedWorker(GpuAt("agent", n), name, "n", "10.0.0.1", 1)
            for n, name in enumerate(WORKERS)
        )
        installed = InstalledReplica(KEY, one, seats)
        self.gear = InstalledGear(gear_of("g", (1, 1), one), {0: installed})
        self.engine = FakeReplica(one, BLOCK_TOKENS)
        self.replicas.arrive(installed, BLOCK_TOKENS)
        self.replicas.switch([KEY], [], {}, {})
        self.streams = {}
        for number, prompt in enumerate((11, 3, 7)):
            request = make_request(f"s{number}", range(1, 1 + prompt), 20)
            self.streams[request.seq_id] = request, self.ledger.submit([request])

    def _step(self, workers: tuple[str, ...], message: Message) -> None:
        assert workers == WORKERS
        if isinstance(message, Step):
            self.steps.append(message)

    def _ask(self, worker: str, message: Message) -> None:
        if isinstance(message, UnparkKv):
            self.called_off.append((worker, message.epoch))
            return
        assert isinstance(message, ParkKv)
        self.asked.append((worker, message))

    def answer_steps(self, most: int = 10**6) -> None:
        while self.steps and most:
            step, most = self.steps.pop(0), most - 1
            tokens = self.engine.run(step.chunks, step.freed)
            self.replicas.on_step_done(
                StepDone(worker="w1", epoch=3, replica=0, step=step.step, tokens=tokens)
            )

    def park(self, deadline_s: float = 5.0) -> None:
        """As the controller does: where it can be, and then to a step boundary."""
        assert self.away.needed_s(self.gear) is not None
        assert self.away.park([KEY], deadline_s) is None
        self.answer_steps()
        assert self.away.advance() is None

    def parked(self, number: int, failed: tuple[int, ...] = ()) -> None:
        """A worker has written its file."""
        worker, ask = self.asked[number]
        file = self.storage.path / _file_name(worker, ask.epoch, ask.ticket)
        file.write_bytes(b"kv")
        answer = KvParked(
            worker=worker, epoch=3, ticket=ask.ticket, parked_bytes=2, seconds=0.1, failed=failed
        )
        self.away.take(answer)

    def files(self) -> int:
        return len(list(self.storage.path.glob("*.park")))

    def detach(self) -> None:
        self.away.before_detach([KEY])
        self.replicas.detach([KEY], "its GPUs are taken")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.ledger.check_invariants()


def test_how_long_parking_takes_is_said_where_it_can_be_done(tmp_path: Path) -> None:
    unprobed = World(tmp_path / "a", probed=False)
    assert unprobed.away.needed_s(unprobed.gear) is None, "nobody has tried the directory"
    world = World(tmp_path / "b")
    world.answer_steps(2)
    needed = world.away.needed_s(world.gear)
    blocks = world.replicas.open[KEY].load().used_blocks
    fullest = blocks * max(shard_map().block_bytes(h) for h in _holdings(world))
    assert blocks > 0 and needed is not None
    assert needed > fullest / RATE, "it is begun in time"
    world.storage.fault = "the disk is full"
    assert world.away.needed_s(world.gear) is None


def _holdings(world: World) -> list[object]:
    from flexslurm.head.move_plan import replica_at

    return list(replica_at(world.gear.replicas[0]).holdings)


def test_streams_pause_and_files_are_asked_for_at_the_step_boundary(world: World) -> None:
    world.answer_steps(1)
    assert world.away.needed_s(world.gear) is not None
    assert world.steps and world.away.park([KEY], 5.0) is None
    assert not world.asked, "a step is in flight"
    assert world.away.awaits_steps
    world.answer_steps()
    world.away.advance()
    assert {worker for worker, _ in world.asked} == set(WORKERS)
    assert all(ask.directory == str(world.storage.path) for _, ask in world.asked)
    assert all((ask.deadline_s, ask.rate_bytes_per_s) == (5.0, RATE) for _, ask in world.asked)
    world.replicas.open[KEY].pump()
    assert not world.steps, "it stands still"


def test_it_says_once_that_all_is_parked(world: World) -> None:
    world.answer_steps(3)
    world.park()
    for number in range(len(world.asked) - 1):
        world.parked(number)
    assert world.away.advance() is None
    world.parked(len(world.asked) - 1)
    assert world.away.advance() == ParkedAway()
    assert world.away.advance() is None


def test_what_was_parked_waits_until_something_serves_it(world: World) -> None:
    world.answer_steps(3)
    world.park()
    for number in range(len(world.asked)):
        world.parked(number)
    world.away.advance()
    world.detach()
    assert world.files() == len(world.asked)
    [end] = world.away.ends()
    assert set(end.view()) == {"s0", "s1", "s2"} and end.idle
    assert end.at.workers == WORKERS and end.directory == str(world.storage.path)
    assert world.away.advance() is None, "nothing is under way any more"
    world.away.tidy(["s0", "s2"])
    [end] = world.away.ends()
    assert set(end.view()) == {"s1"}
    world.away.tidy(["s1"])
    assert world.away.ends() == () and world.files() == 0


def test_a_request_that_ends_meanwhile_takes_its_file_with_it(world: World) -> None:
    world.answer_steps(3)
    world.park()
    for number in range(len(world.asked)):
        world.parked(number)
    world.detach()
    world.ledger.abort(["s0", "s1"])
    world.away.tidy()
    assert set(world.away.stored.names()) == {"s2"}
    assert 0 < world.files() < len(world.asked)


def test_what_nobody_came_for_ages_out(world: World) -> None:
    world.answer_steps(3)
    world.park()
    for number in range(len(world.asked)):
        world.parked(number)
    world.detach()
    world.now = AGE_S - 1
    world.away.tidy()
    assert world.away.stored
    world.now = AGE_S + 1
    world.away.tidy()
    assert not world.away.stored and world.files() == 0


def test_out_of_time_only_whole_answers_count_and_no_file_is_left_for_the_rest(
    world: World,
) -> None:
    world.answer_steps(3)
    world.park()
    by_ticket: dict[tuple[int, ...], list[int]] = {}
    for number, (_, ask) in enumerate(world.asked):
        by_ticket.setdefault(ask.blocks, []).append(number)
    first, *_ = by_ticket.values()
    assert len(first) == 2, "both workers have a part of each sequence"
    for number in first:
        world.parked(number)
    other = next(n for n in range(len(world.asked)) if n not in first)
    world.parked(other)
    world.detach()
    kept = world.away.stored.names()
    assert len(kept) == 1, "the other worker of the second has not answered"
    assert world.files() == 2
    assert not world.ledger.empty, "the rest is recomputed"


def test_requests_that_end_while_they_are_parked_leave_no_file(world: World) -> None:
    world.answer_steps(3)
    world.park()
    for number in range(len(world.asked)):
        world.parked(number)
    for _, stream in world.streams.values():
        stream.close()
    world.detach()
    assert world.files() == 0 and not world.away.stored


def test_a_file_that_comes_after_the_end_is_dropped_too(world: World) -> None:
    world.answer_steps(3)
    world.park()
    worker, ask = world.asked[0]
    world.detach()
    late = world.storage.path / _file_name(worker, ask.epoch, ask.ticket)
    late.write_bytes(b"kv")
    world.now += 2.0
    world.away.tidy()
    assert world.files() == 0
    world.now += 60.0
    world.away.tidy()
    assert not world.away._doomed, "it is not looked for without end"


def test_a_notice_taken_back_goes_on_as_if_nothing_had_been(world: World) -> None:
    world.answer_steps(3)
    world.park()
    world.parked(0)
    world.away.drop()
    assert world.files() == 0 and not world.away.stored and world.steps
    assert world.called_off == [("w0", 3), ("w1", 3)], "what is being written stops too"
    world.answer_steps()
    for request, stream in world.streams.values():
        tokens = [event.token for event in stream.ready() if event.token is not None]
        assert tokens == undisturbed(request)[0]


def test_a_replica_lost_on_the_way_leaves_nothing_to_wait_for(world: World) -> None:
    world.answer_steps(2)
    world.park()
    world.detach()
    assert world.away.stored.names() == frozenset() and world.away.ends() == ()
    assert not world.away.awaits_steps
    world.away.drop()
    assert not world.replicas.open
