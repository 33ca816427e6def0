"""Sequences that come with their KV: reserved blocks, adoption at any length, limits."""

from __future__ import annotations

import pytest
from fake_replica import Answers, FakeWorkers, make_replica, make_request

from flexslurm.engine.scheduler import Scheduler
from flexslurm.messages import FreeBlocks, Step

BLOCK = 4


class Pair:
    """An old and a new replica, with the KV of one to be had by the other."""

    def __init__(self, **new: int) -> None:
        self.answers = Answers()
        self.old = FakeWorkers(1, 0, make_replica(), BLOCK, self.answers.take)
        self.new = FakeWorkers(2, 0, make_replica(**new), BLOCK, self.answers.take, paused=True)

    def begin(self, steps: int, count: int = 1, max_tokens: int = 20) -> None:
        self.requests = [
            make_request(f"s{n}", range(1, 8 + n), max_tokens, arrival=n) for n in range(count)
        ]
        for request in self.requests:
            self.old.driver.submit(request)
        self.old.driver.pump()
        for _ in range(steps):
            assert self.old.answer()

    def pause(self) -> None:
        self.old.driver.pause()
        while self.old.answer():
            pass
        assert self.old.driver.idle

    def move(self, most_blocks: int = 99) -> dict[str, int]:
        """Pull blocks of every sequence; returns the tokens that are there, by sequence."""
        moved = {}
        for kv in self.old.driver.running_kv():
            blocks = kv.blocks[:most_blocks]
            ours = self.new.driver.reserve(kv.seq_id, len(blocks))
            assert ours is not None
            self.new.engine.pull(self.old.engine, list(zip(blocks, ours, strict=True)))
            moved[kv.seq_id] = min(kv.computed, len(blocks) * BLOCK)
        return moved

    def switch(self, moved: dict[str, int]) -> list[bool]:
        adopted = []
        for live in self.old.driver.close():
            computed = moved.get(live.request.seq_id, 0)
            taken = self.new.driver.adopt(live.request, live.output, computed)
            adopted.append(taken)
            if not taken:
                self.new.driver.submit(live.request, live.output)
        self.new.driver.scheduler.check_invariants()
        self.new.driver.resume()
        return adopted

    def finish(self) -> None:
        while self.new.answer():
            self.new.driver.scheduler.check_invariants()
        for request in self.requests:
            self.answers.check(request)
        load = self.new.driver.load()
        assert load.free_blocks == load.blocks


@pytest.mark.parametrize("steps", range(1, 18))
def test_a_moved_sequence_goes_on_where_it_was(steps: int) -> None:
    pair = Pair()
    pair.begin(steps)
    pair.pause()
    assert pair.switch(pair.move()) == [True]
    pair.finish()
    load = pair.new.driver.load()
    assert load.prefill_tokens == 0, "nothing was computed twice"


@pytest.mark.parametrize("blocks", [0, 1, 2])
def test_a_prefix_that_was_moved_is_not_recomputed(blocks: int) -> None:
    pair = Pair()
    pair.begin(9)
    pair.pause()
    pair.switch(pair.move(blocks))
    pair.finish()
    length = 7 + 9 + 1  # one more step was in flight
    assert pair.new.driver.load().prefill_tokens == length - blocks * BLOCK


def test_a_sequence_in_the_middle_of_its_prefill_moves() -> None:
    pair = Pair()
    pair.old.driver.scheduler.max_batch_tokens = 5
    pair.begin(0)
    pair.pause()
    [kv] = pair.old.driver.running_kv()
    assert kv.computed == 5
    pair.switch(pair.move())
    pair.finish()
    assert pair.new.driver.load().prefill_tokens == 2


def test_what_has_no_place_in_the_batch_is_recomputed() -> None:
    pair = Pair(max_batch=1)
    pair.begin(4, count=3)
    pair.pause()
    assert pair.switch(pair.move()) == [True, False, False]
    pair.finish()


def test_what_has_no_block_for_its_next_token_is_recomputed() -> None:
    pair = Pair(kv_blocks=7, max_context=28)
    pair.begin(2, count=1)
    pair.pause()
    moved = pair.move()
    assert pair.new.driver.reserve("other", 4) is not None
    assert pair.switch(moved) == [True]  # one is left, and it is what the next token needs
    pair.new.driver.release("other")
    pair.finish()


def test_reserved_blocks_come_back_by_release() -> None:
    scheduler = Scheduler(make_replica(kv_blocks=6), BLOCK)
    assert scheduler.reserve("a", 2) == (0, 1)
    assert scheduler.reserve("b", 5) is None
    assert scheduler.reserve("a", 1) == (2,)
    assert not scheduler.empty
    scheduler.release("a")
    scheduler.release("a")
    assert scheduler.empty and scheduler.load().free_blocks == 6


def test_blocks_are_filled_from_outside_only_when_workers_know_them_free() -> None:
    """A step that frees a block may run after the pull that fills it."""
    workers = FakeWorkers(1, 0, make_replica(kv_blocks=4), BLOCK, lambda event: None)
    driver = workers.driver
    driver.submit(make_request("a", range(8), 1))
    driver.pump()
    assert workers.answer()  # "a" ends: blocks 0 to 1 are free, and FreeBlocks is on its way
    assert driver.reserve("moved", 3) is None
    assert driver.reserve("moved", 2) == (2, 3)
    driver.submit(make_request("b", range(3), 1))
    driver.pump()
    assert workers.answer()
    assert driver.reserve("moved", 1) == (1,), "the step that told of it is done; 0 was reused"


def test_freed_blocks_are_told_with_the_next_step_or_at_once_if_there_is_none() -> None:
    workers = FakeWorkers(1, 0, make_replica(pp=2), BLOCK, lambda event: None)
    for n in range(2):
        workers.driver.submit(make_request(f"s{n}", range(8), 1 + 2 * n, arrival=n))
    workers.driver.pump()
    while workers.answer():
        pass
    inbox = workers.inboxes[workers.names[0]]
    steps = [m for m in inbox if isinstance(m, Step)]
    assert [step.freed for step in steps][:2] == [(), (0, 1)]
    last = inbox[-1]
    assert isinstance(last, FreeBlocks) and last.blocks == (0, 2, 3)


def test_a_limit_on_blocks_holds_back_until_it_is_lifted() -> None:
    workers = FakeWorkers(1, 0, make_replica(kv_blocks=8), BLOCK, lambda event: None)
    driver = workers.driver
    driver.submit(make_request("a", range(8), 9, arrival=0))
    driver.pump()
    driver.limit_blocks(3)
    driver.submit(make_request("b", range(8), 4, arrival=1))
    for _ in range(5):
        workers.answer()
    assert driver.load().running == 1 and driver.load().free_blocks == 0
    assert not workers.answer(), "three blocks are full"
    driver.limit_blocks(None)
    driver.pump()
    while workers.answer():
        driver.scheduler.check_invariants()
    assert driver.scheduler.empty


def test_tenure_tells_blocks_that_were_given_anew() -> None:
    workers = FakeWorkers(1, 0, make_replica(kv_blocks=5), BLOCK, lambda event: None)
    driver = workers.driver
    driver.submit(make_request("old", range(6), 12, arrival=0))
    driver.submit(make_request("young", range(6), 6, arrival=1))
    driver.pump()
    workers.answer()
    before = {kv.seq_id: kv.tenure for kv in driver.running_kv()}
    assert before == {"old": 1, "young": 1}
    while driver.load().evictions == 0:
        assert workers.answer()
    assert [kv.seq_id for kv in driver.running_kv()] == ["old"]
    while not any(kv.seq_id == "young" for kv in driver.running_kv()):
        assert workers.answer()
    assert {kv.seq_id: kv.tenure for kv in driver.running_kv()}["young"] == 2
