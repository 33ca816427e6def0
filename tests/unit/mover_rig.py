"""An old replica, a new one and a mover between them; the test takes every step itself."""

from __future__ import annotations

from fake_fleet import Fleet
from fake_replica import Answers, make_request

from flexslurm.engine.ownership import ReplicaAt, Seat
from flexslurm.gear import Replica, Stage
from flexslurm.head.mover import Mover
from flexslurm.head.moving import MoverPhase, MoverSettings, NewEnd, OldEnd, Tickets
from tests.reshard_cases import LAYERS, shard_map


def stages(*tps: int, blocks: int = 32, batch: int = 8) -> Replica:
    cuts = [LAYERS * n // len(tps) for n in range(len(tps) + 1)]
    made = tuple(Stage("a", tp, cuts[n], cuts[n + 1], blocks, n) for n, tp in enumerate(tps))
    return Replica(made, batch, 64, 100)


def place(epoch: int, replica: Replica, *workers: str) -> ReplicaAt:
    return ReplicaAt(epoch, 0, replica, tuple(Seat(w, w[0]) for w in workers))


class Rig:
    """One old replica on a0 and a1, and a new one on a0, a1 and b0."""

    def __init__(
        self, old: Replica | None = None, new: Replica | None = None, **settings: int
    ) -> None:
        self.now = 0.0
        self.answers = Answers()
        self.dead: set[str] = set()
        shards = shard_map("llama")
        self.fleet = Fleet(shards, self.answers.take, lambda: self.now)
        at = place(1, old or stages(2), "a0", "a1")
        self.old = self.fleet.install(at, paused=False)
        self.new = self.fleet.install(place(2, new or stages(1, 2), "b0", "a0", "a1"), paused=True)
        self.mover = Mover(
            shards,
            [OldEnd(self.old.at, self.old.driver)],
            [NewEnd(self.new.at, self.new.driver)],
            MoverSettings(pull_timeout_s=5.0, **settings),  # type: ignore[arg-type]
            alive=lambda seq_id: seq_id not in self.dead,
            tickets=Tickets(),
        )
        self.requests = {}

    def submit(self, seq_id: str, prompt: int, tokens: int, arrival: int) -> None:
        request = make_request(seq_id, range(prompt), tokens, arrival=arrival)
        self.requests[seq_id] = request
        self.old.driver.submit(request)
        self.old.driver.pump()

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            assert self.old.step()

    def advance(self) -> None:
        self.mover.advance(self.now)
        self.post()

    def post(self) -> None:
        self.fleet.pulls += self.mover.outbox
        self.mover.outbox.clear()

    def pull(self, *fail: int) -> None:
        assert self.mover.pulled(self.now, self.fleet.pull(0, fail))
        self.post()

    def pull_all(self) -> int:
        """Answer everything; how many blocks came."""
        blocks = sum(len(pull.pairs) for _, pull in self.fleet.pulls)
        while self.fleet.pulls:
            self.pull()
        return blocks

    def cut_over(self) -> None:
        self.old.driver.pause()
        while self.old.step():
            pass
        self.mover.begin_last(self.now, 5.0)
        self.post()
        self.pull_all()
        assert self.mover.phase is MoverPhase.DONE

    def switch(self) -> dict[str, int]:
        """Go on with the new replica; how many tokens of each sequence were adopted."""
        computed = {seq_id: tokens for seq_id, (_, tokens) in self.mover.adoptions().items()}
        adopted = set()
        for live in self.old.driver.close():
            seq_id = live.request.seq_id
            if seq_id in computed and self.new.driver.adopt(
                live.request, live.output, computed[seq_id]
            ):
                adopted.add(seq_id)
            elif seq_id not in self.dead:
                self.new.driver.submit(live.request, live.output)
        assert self.mover.release(adopted)
        self.new.driver.scheduler.check_invariants()
        self.new.driver.resume()
        while self.new.step():
            pass
        for seq_id, request in self.requests.items():
            if seq_id not in self.dead:
                self.answers.check(request)
        load = self.new.driver.load()
        assert load.free_blocks == load.blocks
        return computed
