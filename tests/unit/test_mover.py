"""The mover: rounds beside the serving gear, the rest in the pause, and all that interferes."""

from __future__ import annotations

from flexslurm.head.moving import LEGAL, MoverPhase, MoverSettings
from tests.reshard_cases import BLOCK_TOKENS
from tests.unit.mover_rig import Rig, stages


def test_full_blocks_go_first_and_the_rest_in_the_pause() -> None:
    rig = Rig()
    rig.submit("s", 14, 20, 0)
    rig.step(2)
    rig.advance()
    assert {pull.layers for _, pull in rig.fleet.pulls} == {(0, 3), (3, 6)}
    assert {len(pull.pairs) for _, pull in rig.fleet.pulls} == {3}
    assert not rig.mover.settled
    rig.pull_all()
    assert rig.mover.settled and rig.mover.phase is MoverPhase.ROUNDS
    rig.step(5)  # 20 tokens computed: two more blocks are full
    rig.advance()
    assert {len(pull.pairs) for _, pull in rig.fleet.pulls} == {2}
    rig.pull_all()
    rig.cut_over()
    assert rig.switch() == {"s": 14 + 7}
    assert rig.new.driver.load().prefill_tokens == 0


def test_nothing_to_move_is_settled_and_done_at_once() -> None:
    rig = Rig()
    rig.advance()
    assert rig.mover.settled
    rig.cut_over()
    assert rig.switch() == {}


def test_sequences_that_come_during_the_rounds_move_too() -> None:
    rig = Rig()
    rig.submit("s", 9, 20, 0)
    rig.step(2)
    rig.advance()
    rig.submit("late", 10, 20, 1)
    rig.step(2)
    rig.pull_all()
    rig.advance()
    rig.pull_all()
    rig.cut_over()
    assert rig.switch().keys() == {"s", "late"}


def test_a_pull_that_fails_is_tried_again_and_then_let_be() -> None:
    rig = Rig(most_tries=2)
    rig.submit("s", 14, 20, 0)
    rig.step()
    rig.advance()
    rig.pull(1)  # of three blocks the second does not come
    rig.pull_all()
    assert rig.mover.settled
    rig.cut_over()
    assert rig.switch() == {"s": 15}
    rig = Rig(most_tries=2)
    rig.submit("s", 14, 20, 0)
    rig.step()
    rig.advance()
    while rig.fleet.pulls:
        rig.pull(0)
    assert rig.mover.settled
    rig.cut_over()
    assert rig.switch() == {}


def test_what_was_pulled_before_a_failure_is_used() -> None:
    rig = Rig(most_tries=1)
    rig.submit("s", 14, 20, 0)
    rig.step()
    rig.advance()
    while rig.fleet.pulls:
        rig.pull(2)
    rig.cut_over()
    assert rig.switch() == {"s": 2 * BLOCK_TOKENS}


def test_blocks_that_changed_hands_under_a_pull_are_not_believed() -> None:
    """The young one is evicted and comes back with other blocks, while its old ones are pulled."""
    rig = Rig(old=stages(2, blocks=8))
    rig.old.driver.scheduler.max_context = 100
    rig.submit("old", 10, 14, 0)
    rig.submit("young", 10, 14, 1)
    rig.step(2)
    rig.advance()
    waits = list(rig.fleet.pulls)
    before = {kv.seq_id: kv.tenure for kv in rig.old.driver.running_kv()}
    while rig.old.driver.load().evictions == 0:
        rig.step()
    while not any(kv.seq_id == "young" for kv in rig.old.driver.running_kv()):
        rig.step()
    after = {kv.seq_id: kv.tenure for kv in rig.old.driver.running_kv()}
    assert after["young"] == before["young"] + 1
    rig.fleet.pulls = waits
    while rig.fleet.pulls and rig.fleet.pulls[0] in waits:
        rig.pull()
    assert rig.mover._moves["young"].done == 0
    rig.pull_all()
    rig.cut_over()
    rig.switch()


def test_the_youngest_give_way_where_the_new_replica_is_smaller() -> None:
    rig = Rig(new=stages(1, 2, blocks=9))
    for n in range(3):
        rig.submit(f"s{n}", 9, 20, n)
    rig.step(2)
    rig.advance()
    rig.pull_all()
    rig.step(12)
    rig.advance()
    rig.pull_all()
    rig.cut_over()
    moved = rig.mover.adoptions()
    assert "s0" in moved and "s2" not in moved
    rig.new.driver.scheduler.max_context = 36
    rig.mover.release()


def test_a_sequence_that_ends_gives_its_blocks_back_when_nothing_fills_them() -> None:
    rig = Rig()
    rig.submit("s", 9, 20, 0)
    rig.submit("t", 9, 20, 1)
    rig.step(2)
    rig.advance()
    rig.pull()
    rig.dead.add("s")
    rig.old.driver.abort("s")
    rig.advance()
    assert rig.new.driver.load().free_blocks == 32 - 4
    rig.pull_all()
    assert rig.new.driver.load().free_blocks == 32 - 2
    rig.cut_over()
    assert rig.switch().keys() == {"t"}


def test_a_lost_old_replica_leaves_what_was_pulled() -> None:
    rig = Rig()
    rig.submit("s", 9, 20, 0)
    rig.step(2)
    rig.advance()
    rig.pull_all()
    rig.mover.lose(0)
    live = rig.old.driver.close()
    rig.fleet.retire(rig.old)
    rig.advance()
    rig.mover.begin_last(rig.now, 5.0)
    assert rig.mover.phase is MoverPhase.DONE
    assert rig.mover.adoptions() == {"s": (0, 2 * BLOCK_TOKENS)}
    assert rig.new.driver.adopt(live[0].request, live[0].output, 2 * BLOCK_TOKENS)
    rig.new.driver.resume()
    while rig.new.step():
        pass
    rig.answers.check(rig.requests["s"])


def test_late_answers_of_a_lost_source_hold_nobody_up() -> None:
    rig = Rig()
    rig.submit("s", 9, 20, 0)
    rig.submit("t", 5, 20, 1)
    rig.step(2)
    rig.advance()
    rig.pull_all()
    rig.step(8)
    rig.advance()
    assert rig.fleet.pulls, "something is under way"
    rig.mover.lose(0)
    live = {one.request.seq_id: one for one in rig.old.driver.close()}
    rig.mover.begin_last(rig.now, 5.0)
    assert rig.mover.phase is MoverPhase.DONE
    assert rig.mover.adoptions() == {}, "something may still be written into their blocks"
    assert not rig.mover.release()
    for one in live.values():
        rig.new.driver.submit(one.request, one.output)
    rig.new.driver.resume()
    while rig.new.step():
        pass
    for seq_id in live:
        rig.answers.check(rig.requests[seq_id])
    assert rig.new.driver.load().used_blocks > 0
    rig.pull_all()
    assert rig.mover.release()
    assert rig.new.driver.load().used_blocks == 0


def test_an_answer_that_does_not_come_fails_the_whole() -> None:
    rig = Rig()
    rig.submit("s", 9, 20, 0)
    rig.step(2)
    rig.advance()
    rig.now = 9.0
    rig.advance()
    assert rig.mover.phase is MoverPhase.ROUNDS
    rig.now = 11.0
    rig.advance()
    assert rig.mover.phase is MoverPhase.FAILED and "not answered" in rig.mover.failure
    assert not rig.mover.release(), "blocks that may yet be written to are not given back"
    rig.pull_all()
    assert rig.mover.release()


def test_what_lacks_too_much_in_the_pause_is_recomputed_from_what_it_has() -> None:
    rig = Rig(most_last_blocks=2, batch_bytes=1)
    rig.submit("long", 30, 20, 0)
    rig.submit("short", 6, 20, 1)
    rig.step(2)
    rig.advance()
    first = len(rig.fleet.pulls)
    for _ in range(first):
        rig.pull()
    rig.old.driver.pause()
    while rig.old.step():
        pass
    rig.mover.begin_last(rig.now, 5.0)
    rig.post()
    rig.pull_all()
    moved = rig.switch()
    assert 0 < moved["long"] < 30 and moved["short"] >= 7


def test_parked_sequences_move_whole_after_their_driver_is_closed() -> None:
    rig = Rig()
    rig.mover._settings = MoverSettings(most_last_blocks=None)
    rig.submit("s", 30, 20, 0)
    rig.step(3)
    rig.old.driver.pause()
    while rig.old.step():
        pass
    rig.mover.freeze(0)
    live = rig.old.driver.close()
    rig.mover.begin_last(rig.now, 5.0)
    rig.post()
    rig.pull_all()
    assert rig.mover.adoptions() == {"s": (0, 33)}
    assert rig.new.driver.adopt(live[0].request, live[0].output, 33)
    rig.new.driver.resume()
    while rig.new.step():
        pass
    rig.answers.check(rig.requests["s"])
    assert rig.new.driver.load().prefill_tokens == 0


def test_rounds_end_when_they_no_longer_shrink() -> None:
    rig = Rig(most_rounds=50)
    for n in range(4):
        rig.submit(f"s{n}", 9, 60, n)
    rig.step(2)
    rig.advance()
    rounds = 0
    while not rig.mover.settled:
        rounds += 1
        rig.step(BLOCK_TOKENS)  # every round each sequence fills another block
        pulls, rig.fleet.pulls = rig.fleet.pulls, []
        for one in pulls:
            rig.fleet.pulls.insert(0, one)
            rig.pull()
        assert rounds < 10
    rig.pull_all()
    rig.cut_over()
    assert len(rig.switch()) == 4


def test_with_a_deadline_the_longest_goes_first() -> None:
    rig = Rig(batch_bytes=1)
    rig.mover._longest_first = True
    rig.submit("short", 9, 20, 0)
    rig.submit("long", 29, 20, 1)
    rig.step(2)
    rig.advance()
    blocks = {kv.seq_id: kv.blocks for kv in rig.old.driver.running_kv()}
    first = {theirs for _, pull in rig.fleet.pulls for theirs, _ in pull.pairs}
    assert first == {blocks["long"][0]}


def test_what_is_about_to_be_filled_gives_way_to_nobody() -> None:
    rig = Rig(new=stages(1, 2, blocks=9))
    rig.mover._longest_first = True
    rig.submit("short", 9, 25, 0)
    rig.submit("long", 17, 18, 1)
    rig.step(2)
    rig.advance()
    rig.pull_all()
    rig.step(12)
    rig.advance()  # the elder comes later in this batch, and there is no room for both
    filled = {ours for _, pull in rig.fleet.pulls for _, ours in pull.pairs}
    tables = rig.new.driver.scheduler.pool.tables
    assert filled and filled <= {block for table in tables.values() for block in table}
    rig.pull_all()
    rig.cut_over()
    assert rig.switch()


def test_every_phase_can_fail() -> None:
    for phase, after in LEGAL.items():
        assert not after or MoverPhase.FAILED in after, phase
