"""Gears that change under load, with KV moved, half moved, failed or lost: the tokens are right."""

from __future__ import annotations

from fake_fleet import Fleet, FleetReplica
from fake_replica import Answers, make_request
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from flexslurm.engine.ownership import ReplicaAt, Seat
from flexslurm.errors import ContextTooLong, Overloaded
from flexslurm.gear import Replica, Stage
from flexslurm.head.ledger import Adoption, Ledger, LedgerSettings
from flexslurm.head.mover import Mover
from flexslurm.head.moving import MoverPhase, MoverSettings, NewEnd, OldEnd, Tickets
from flexslurm.head.stream import Stream
from flexslurm.messages import SequenceRequest
from tests.reshard_cases import LAYERS, shard_map

CONTEXT = 40
WORKERS = 6


@st.composite
def gears(draw: st.DrawFn) -> list[tuple[tuple[int, ...], Replica]]:
    """Replicas with the workers they are on; no worker in two of them."""
    free = list(draw(st.permutations(range(WORKERS))))
    made = []
    for _ in range(draw(st.integers(1, 2))):
        depth = draw(st.integers(1, 3))
        cuts = sorted(draw(st.sets(st.integers(1, LAYERS - 1), min_size=depth - 1,
                                   max_size=depth - 1)))  # fmt: skip
        ends = [0, *cuts, LAYERS]
        blocks = draw(st.integers(10, 24))
        tps = [draw(st.integers(1, 3)) for _ in range(depth)]
        if sum(tps) > len(free):
            tps = [1] * depth
        if sum(tps) > len(free):
            break
        stages = tuple(Stage("a", tp, ends[i], ends[i + 1], blocks, i) for i, tp in enumerate(tps))
        batch, tokens = draw(st.integers(1, 5)), draw(st.integers(1, 12))
        mine, free = free[: sum(tps)], free[sum(tps) :]
        made.append((tuple(mine), Replica(stages, batch, tokens, CONTEXT)))
    return made


class MoverWalk(RuleBasedStateMachine):
    @initialize(gear=gears(), least_bytes=st.sampled_from([1, 1 << 12, 1 << 20]))
    def begin(self, gear: list[tuple[tuple[int, ...], Replica]], least_bytes: int) -> None:
        self.now = 0.0
        self.shards = shard_map("llama")
        self.settings = MoverSettings(batch_bytes=least_bytes, pull_timeout_s=5.0)
        self.ledger = Ledger(
            LedgerSettings(model_context=CONTEXT, max_waiting=50), now=lambda: self.now
        )
        self.fleet = Fleet(self.shards, self.ledger.on_event, lambda: self.now)
        self.tickets = Tickets()
        self.answers = Answers()
        self.streams: dict[str, Stream] = {}
        self.requests: dict[str, SequenceRequest] = {}
        self.aborted: set[str] = set()
        self.epoch = 1
        self.mover: Mover | None = None
        self.zombies: list[Mover] = []
        self.serving = [self._install(n, one, paused=False) for n, one in enumerate(gear)]
        self.ledger.attach([one.driver for one in self.serving])

    def _install(
        self, number: int, placed: tuple[tuple[int, ...], Replica], *, paused: bool
    ) -> FleetReplica:
        workers, replica = placed
        seats = tuple(Seat(f"n{w // 2}/{w}", f"n{w // 2}") for w in workers)
        return self.fleet.install(ReplicaAt(self.epoch, number, replica, seats), paused=paused)

    # ------------------------------------------------------------------ load

    @rule(
        prompt=st.lists(st.integers(0, 22), min_size=1, max_size=24),
        max_tokens=st.integers(1, 16),
        seed=st.integers(0, 3),
    )
    def submit(self, prompt: list[int], max_tokens: int, seed: int) -> None:
        request = make_request(f"r{len(self.streams)}/0", prompt, max_tokens, seed=seed)
        try:
            self.streams[request.seq_id] = self.ledger.submit([request])
        except (Overloaded, ContextTooLong):
            return
        self.requests[request.seq_id] = request

    @rule(number=st.integers(0, 10))
    def close(self, number: int) -> None:
        stream = self.streams.get(f"r{number}/0")
        if stream is not None:
            self._read()
            stream.close()
            if f"r{number}/0" not in self.answers.finish:
                self.aborted.add(f"r{number}/0")

    @rule(times=st.integers(1, 8), which=st.integers(0, 3))
    def answer(self, times: int, which: int) -> None:
        for _ in range(times if self.fleet.replicas else 0):
            self.fleet.replicas[which % len(self.fleet.replicas)].step()
            self._advance()

    # ------------------------------------------------------------------ the shift

    @precondition(lambda self: self.mover is None)
    @rule(gear=gears(), keep=st.booleans(), longest_first=st.booleans(), whole=st.booleans())
    def begin_shift(
        self,
        gear: list[tuple[tuple[int, ...], Replica]],
        keep: bool,
        longest_first: bool,
        whole: bool,
    ) -> None:
        self.epoch += 1
        self.kept = self.serving[:1] if keep and len(self.serving) > 1 else []
        taken = {seat.worker for one in self.kept for seat in one.at.seats}
        gear = [g for g in gear if not {f"n{w // 2}/{w}" for w in g[0]} & taken]
        if not gear and not self.kept:
            return
        self.going = [one for one in self.serving if one not in self.kept]
        self.coming = [self._install(n, one, paused=True) for n, one in enumerate(gear)]
        ends = [NewEnd(one.at, one.driver) for one in (*self.kept, *self.coming)]
        self.mover = Mover(
            self.shards,
            [OldEnd(one.at, one.driver) for one in self.going],
            ends,
            self.settings,
            alive=self.ledger.has,
            tickets=self.tickets,
            longest_first=longest_first,
        )
        self._advance()

    @rule(
        number=st.integers(0, 20),
        fail=st.lists(st.integers(0, 8), max_size=2),
        times=st.integers(1, 4),
    )
    def pull(self, number: int, fail: list[int], times: int) -> None:
        for _ in range(times):
            if self.fleet.pulls:
                answer = self.fleet.pull(number, fail)
                for mover in (*([self.mover] if self.mover else []), *self.zombies):
                    if mover.pulled(self.now, answer):
                        break
                self._advance()

    def _advance(self) -> None:
        for zombie in list(self.zombies):
            zombie.advance(self.now)
            if zombie.release():
                self.zombies.remove(zombie)
        if self.mover is not None:
            self.mover.advance(self.now)
            self.fleet.pulls += self.mover.outbox
            self.mover.outbox.clear()
            if self.mover.phase is MoverPhase.DONE:
                self._switch()

    @precondition(lambda self: self.mover is not None and self.mover.phase is MoverPhase.ROUNDS)
    @rule()
    def cut_over(self) -> None:
        assert self.mover is not None
        for one in self.going:
            if not one.driver.closed:
                one.driver.pause()
        self.mover.begin_last(self.now, 2.0)
        self._advance()

    def _switch(self) -> None:
        mover, self.mover = self.mover, None
        assert mover is not None
        ends = [*self.kept, *self.coming]
        adoptions = {
            seq_id: Adoption(ends[number].driver.seat, computed)
            for seq_id, (number, computed) in mover.adoptions().items()
        }
        open_still = [one.driver.seat for one in self.going if not one.driver.closed]
        opened = [one.driver for one in self.coming]
        adopted = self.ledger.switch(opened, open_still, adoptions)
        if not mover.release(adopted):  # what was asked of a lost source is answered late
            self.zombies.append(mover)
        for driver in opened:
            driver.resume()
        for one in self.going:
            if one in self.fleet.replicas:
                self.fleet.retire(one)
        self.serving = ends

    @precondition(lambda self: self.mover is not None)
    @rule()
    def abort_shift(self) -> None:
        mover, self.mover = self.mover, None
        assert mover is not None
        mover.fail("test")
        for one in self.coming:
            one.driver.close()
            self.fleet.retire(one)
        if not mover.release():
            self.zombies.append(mover)
        self.serving = [one for one in self.serving if not one.driver.closed]
        for one in self.serving:
            one.driver.resume()

    @precondition(lambda self: self.mover is not None and self.going)
    @rule(number=st.integers(0, 3))
    def lose_an_old_one(self, number: int) -> None:
        assert self.mover is not None
        number %= len(self.going)
        one = self.going[number]
        if not one.driver.closed:
            self.mover.lose(number)
            self.ledger.detach([one.driver.seat])
            self.fleet.retire(one)
            self._advance()

    # ------------------------------------------------------------------ what holds

    def _read(self) -> None:
        for stream in self.streams.values():
            for event in stream.ready():
                self.answers.take(event)

    @invariant()
    def tokens_are_right_so_far(self) -> None:
        if not hasattr(self, "ledger"):
            return
        self.ledger.check_invariants()
        self._read()
        for one in self.fleet.replicas:
            if not one.driver.closed:
                one.driver.scheduler.check_invariants()
        for request in self.requests.values():
            self.answers.check_begun(request)

    def teardown(self) -> None:
        if not hasattr(self, "ledger"):
            return
        if self.mover is not None and self.mover.phase is MoverPhase.ROUNDS:
            self.cut_over()
        self._settle()
        assert self.mover is None and not self.zombies
        self.begin_shift([((0, 1), BIG)], False, False, True)
        self.cut_over() if self.mover is not None else None
        self._settle()
        assert self.ledger.empty, [one.driver.load() for one in self.fleet.replicas]
        for one in self.fleet.replicas:
            load = one.driver.load()
            assert load.free_blocks == load.blocks
        for seq_id, request in self.requests.items():
            if seq_id not in self.aborted:
                self.answers.check(request)

    def _settle(self) -> None:
        for _ in range(4000):
            self.now += 0.001
            worked = False
            for one in list(self.fleet.replicas):
                worked = one.step() or worked
            self._advance()
            if self.fleet.pulls:
                self.pull(0, [], 1)
                worked = True
            self._read()
            if not worked and self.mover is None:
                return
        raise AssertionError("it does not come to an end")


BIG = Replica((Stage("a", 1, 0, 3, 200, 0), Stage("a", 1, 3, LAYERS, 200, 1)), 16, 64, CONTEXT)

MoverWalk.TestCase.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
TestMoverWalk = MoverWalk.TestCase
