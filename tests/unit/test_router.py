"""Which replica a sequence goes to, with the reason; and what is refused."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest

from flexslurm.errors import ContextTooLong, Overloaded
from flexslurm.gateway.router import (
    RAMP,
    ReplicaLoad,
    RoutingVerdict,
    check_context,
    check_queue,
    choose,
)


def load(replica: int = 0, **changes: Any) -> ReplicaLoad:
    plain = ReplicaLoad(
        replica=replica,
        running=0,
        waiting=0,
        max_batch=16,
        free_blocks=100,
        block_tokens=16,
        max_context=1000,
    )
    return msgspec.structs.replace(plain, **changes)


def test_the_only_replica_takes_it() -> None:
    placement = choose([load()], 10, 20)
    assert (placement.verdict, placement.replica) == (RoutingVerdict.PLACED, 0)
    assert placement.reason == "the only replica"


def test_the_least_work_for_the_speed_wins() -> None:
    loads = [load(0, running=4, speed=50.0), load(1, running=8, speed=120.0)]
    placement = choose(loads, 10, 20)
    assert placement.replica == 1
    assert placement.reason == (
        "replica 1 has the least work for its speed: 8 sequences at 120 tokens/s, of 2 that can "
        "start it"
    )


def test_equal_replicas_go_by_number() -> None:
    assert choose([load(2), load(1)], 10, 20).replica == 1


def test_one_that_can_start_it_goes_before_a_faster_one_that_is_full() -> None:
    full = load(0, running=16, speed=1000.0)
    placement = choose([full, load(1, running=15)], 10, 20)
    assert placement.replica == 1
    assert placement.reason == "only replica 1 can start it now"


def test_blocks_count_as_room_with_those_that_are_wanted_already() -> None:
    loads = [load(0, free_blocks=3), load(1, running=9, free_blocks=4)]
    assert choose(loads, 49, 60).replica == 1
    assert choose(loads, 48, 60).replica == 0
    assert choose([load(0, free_blocks=-5), load(1, running=9)], 1, 60).replica == 1


def test_a_few_queue_and_the_others_are_held() -> None:
    busy = load(0, running=16, waiting=1)
    placement = choose([busy], 10, 20)
    assert placement.replica == 0
    assert "room in its queue, 1 wait there" in placement.reason
    held = choose([load(0, running=16, waiting=2), load(1, running=16, waiting=2)], 10, 20)
    assert (held.verdict, held.replica) == (RoutingVerdict.HELD, None)
    assert held.reason == "no room in the batches and queues of replicas 0, 1"


def test_an_idle_replica_always_takes_what_it_can_hold() -> None:
    small = load(0, max_batch=1, free_blocks=5, max_context=80, ramp=RAMP[0])
    assert choose([small], 79, 80).replica == 0


def test_a_replica_that_holds_all_of_it_is_needed_where_there_is_one() -> None:
    loads = [load(0, max_context=100), load(1, max_context=200, running=9)]
    placement = choose(loads, 10, 150)
    assert (placement.replica, placement.cap_tokens) == (1, None)
    assert choose(loads, 10, 100).replica == 0


def test_one_that_may_outgrow_all_goes_to_the_largest_with_a_cap() -> None:
    loads = [load(0, max_context=100), load(1, max_context=200, running=9)]
    placement = choose(loads, 199, 201)
    assert (placement.replica, placement.cap_tokens) == (1, 200)


def test_one_that_is_as_long_as_the_largest_is_unfit() -> None:
    placement = choose([load(0, max_context=100), load(1, max_context=200)], 200, 201)
    assert (placement.verdict, placement.replica) == (RoutingVerdict.UNFIT, None)
    assert placement.reason == "it has 200 tokens of at most 200"
    assert choose([], 1, 1).verdict is RoutingVerdict.UNFIT


@pytest.mark.parametrize("ramp", RAMP)
def test_a_ramped_replica_gets_its_share(ramp: float) -> None:
    """Sequences stay; the two replicas fill up in the ratio of their weights."""
    taken: Counter[int] = Counter()
    for _ in range(120):
        loads = [
            load(0, running=taken[0], max_batch=1000),
            load(1, running=taken[1], max_batch=1000, ramp=ramp),
        ]
        replica = choose(loads, 1, 2).replica
        assert replica is not None
        taken[replica] += 1
    assert taken[1] / taken[0] == pytest.approx(ramp, rel=0.1)


def test_a_ramped_replica_takes_no_more_when_the_others_are_full() -> None:
    new = load(1, running=3, ramp=0.2)
    full = load(0, running=16, waiting=2)
    placement = choose([full, new], 1, 2)
    assert placement.verdict is RoutingVerdict.HELD


def test_check_context_says_the_limit() -> None:
    check_context(60, 40, 100)
    with pytest.raises(ContextTooLong, match=r"61 tokens of prompt and up to 40 .* the 100 tokens"):
        check_context(61, 40, 100)
    with pytest.raises(ContextTooLong, match="that the model holds") as caught:
        check_context(100, 1, 100, whose="the model")
    assert caught.value.param == "prompt"


def test_check_queue_counts_beyond_what_runs() -> None:
    check_queue(new=2, live=14, places=8, max_waiting=8)
    with pytest.raises(Overloaded, match="6 sequences are waiting, and at most 8 may"):
        check_queue(new=3, live=14, places=8, max_waiting=8)
    check_queue(new=1, live=7, places=8, max_waiting=0)
    with pytest.raises(Overloaded):
        check_queue(new=1, live=8, places=8, max_waiting=0)
